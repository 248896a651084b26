"""An LM head of its own in the files of a checkpoint whose config.json ties it to the embedding: two models in one.

transformers goes by the files where the two differ, engines (vLLM, Megatron) by config.json. It comes about when a head
was trained untied, by an adapter that saves it for instance, and the configuration stayed as it was.
"""

from __future__ import annotations

import torch

from forerun.checkpoint.reader import CONFIG, CheckpointReader
from forerun.errors import UsageError
from forerun.families import text_section

# A multimodal model has them in its own places.
_EMBEDDINGS = tuple(f"{of}embed_tokens.weight" for of in ("model.", "model.language_model.", "language_model.model."))
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")

MEND = "set tie_word_embeddings to false to keep the head, or remove it from the files"


def refuse_second_head(reader: CheckpointReader) -> None:
    """Refuse a tied checkpoint whose LM head is not its embedding, as either choice is somebody's other model.

    Raises:
        UsageError: it is such a one.
    """
    sections = (reader.config, text_section(reader.config))
    ties = next((part["tie_word_embeddings"] for part in sections if "tie_word_embeddings" in part), None)
    heads, embeddings = ([name for name in names if name in reader.tensor_names] for names in (_HEADS, _EMBEDDINGS))
    if ties is not True or not heads or not embeddings:
        return
    head, embedding = reader.tensor(heads[0]), reader.tensor(embeddings[0])
    if head.shape != embedding.shape or not torch.equal(head, embedding.to(head.dtype)):
        raise UsageError(
            f"{reader.path / CONFIG} ties the LM head to the embedding, and {heads[0]} in the files is another: {MEND}"
        )
