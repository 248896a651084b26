"""An LM head of its own in the files of a checkpoint whose config.json ties it to the embedding: two models in one.

transformers goes by the files where the two differ, engines (vLLM, Megatron) by config.json. It comes about when a head
was trained untied, by an adapter that saves it for instance, and the configuration stayed as it was.
"""

from __future__ import annotations

import torch

from forerun.checkpoint.reader import CONFIG, CheckpointReader
from forerun.errors import UsageError

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

MEND = "set tie_word_embeddings to false to keep the head, or remove it from the files"


def refuse_second_head(reader: CheckpointReader) -> None:
    """Refuse a tied checkpoint whose LM head is not its embedding, as either choice is somebody's other model.

    Raises:
        UsageError: it is such a one.
    """
    if reader.config.get("tie_word_embeddings") is not True or not {_EMBEDDING, _HEAD} <= reader.tensor_names:
        return
    head, embedding = reader.tensor(_HEAD), reader.tensor(_EMBEDDING)
    if head.shape != embedding.shape or not torch.equal(head, embedding.to(head.dtype)):
        raise UsageError(
            f"{reader.path / CONFIG} ties the LM head to the embedding, and {_HEAD} in the files is another: {MEND}"
        )
