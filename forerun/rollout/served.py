"""An engine that was started on files: what these hold, and weights on their way there, under their names, in buckets.

A trainer's weights and files differ in this: the trainer holds experts stacked and files hold them apart; a file may
hold the embedding or the LM head once more, for the block or where the two are tied; and `forerun convert` gives biases
of zeros to a trunk that has none.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from forerun.checkpoint.reader import CheckpointReader
from forerun.errors import UsageError
from forerun.families import FamilyRecord, family_of, present_depth, text_section, trunk_layers
from forerun.models.layout import split
from forerun.models.weight_stream import Named

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_UNREAD = ".rotary_emb.inv_freq"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class ServedFiles:
    """The weights of a served checkpoint, from its headers.

    Args:
        path: its directory.

    Attributes:
        config: its config.json.
        family: says how its files hold the block and experts.
        depth: MTP layers in the files.
        shapes: name -> shape. Without what no engine reads (the rotary frequencies that old checkpoints hold).
        dtypes: name -> dtype in the files.
        copies: weights that are another one's copy -> that one.
        zero_biases: biases that are zeros, which a trainer whose model has none leaves out.

    Raises:
        UsageError: it cannot be read, or is quantised.
    """

    def __init__(self, path: str | Path) -> None:
        reader = CheckpointReader(path)
        headers = {
            name: header
            for shard in reader.shards
            for name, header in reader.headers(shard).items()
            if not name.endswith(_UNREAD)
        }
        for name, header in headers.items():
            if header.dtype not in _DTYPES:
                raise UsageError(f"{path} is quantised ({name} is {header.dtype}): serve it in bfloat16")
        self.config = reader.config
        self.family: FamilyRecord = family_of(reader.config)
        self.shapes = {name: header.shape for name, header in headers.items()}
        self.dtypes = {name: _DTYPES[header.dtype] for name, header in headers.items()}
        self._layers = trunk_layers(reader.config)
        self.depth = present_depth(self.family, reader.config, set(headers))
        copies = {
            self.family.duplicate_name(copy, k, self._layers): _EMBEDDING if copy.of == "embedding" else _HEAD
            for k in range(self.depth)
            for copy in self.family.duplicates
        }
        if any(part.get("tie_word_embeddings") is True for part in (reader.config, text_section(reader.config))):
            copies = dict.fromkeys(copies, _EMBEDDING) | {_HEAD: _EMBEDDING}
        self.copies = {name: of for name, of in copies.items() if name in headers}
        self.zero_biases = frozenset(
            name for name in headers if name.endswith(".bias") and not bool(reader.tensor(name).any())
        )

    def is_drafter(self, name: str) -> bool:
        """Whether a weight belongs to the MTP block, by its name in the files or at the trainer."""
        return self.family.owns(name, self.depth, self._layers)


def written_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that a config.json names, "auto" if it names none."""
    section = text_section(config)
    return section.get("dtype") or section.get("torch_dtype") or config.get("dtype") or "auto"


def split_experts(named_tensors: Iterable[Named], family: FamilyRecord, stored: Container[str]) -> Iterator[Named]:
    """The trainer's weights as files hold them: experts that a module stacks come one by one, as views.

    Args:
        named_tensors: under the trainer's names.
        family: says how its files hold experts.
        stored: the files' names; what is among them is left as it is.
    """
    for name, tensor in named_tensors:
        if name in stored:
            yield name, tensor
        else:
            yield from split(name, tensor, family)
        del tensor  # or it would be there while the next one is made


def buckets(named_tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """Lists of tensors of at most `limit` bytes together; one that is larger goes alone.

    A list is emptied when the next one is asked for, so that there is never more than one.
    """
    bucket: list[Named] = []
    size = 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket.clear()
            size = 0
        bucket.append((name, tensor))
        size += tensor.nbytes
        del tensor
    if bucket:
        yield bucket
