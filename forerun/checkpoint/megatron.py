"""Checkpoints under Megatron-Core's names, and back: the same directory, its tensors renamed and laid out anew."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from forerun.checkpoint.reader import CONFIG, CheckpointReader
from forerun.checkpoint.shards import SHARD_BYTES, new_directory, write_checkpoint
from forerun.errors import UsageError
from forerun.families import declared_depth, family_of, text_section, trunk_layers
from forerun.families.megatron import EMBEDDING, Entry, entries, join, needed, split

logger = logging.getLogger(__name__)


def to_megatron(source: str | Path, out: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a Hugging Face checkpoint's tensors under Megatron-Core's names, as safetensors beside its config.json.

    `GPTModel.load_state_dict` takes them (one tensor- and pipeline-parallel rank, vocabulary unpadded). Tensors are
    read and written one by one; the directory appears whole or not at all.

    Raises:
        UsageError: `out` is taken, or a tensor has no place in the mapping table.
    """
    out = new_directory(out)
    reader = _open(source, megatron=False)
    table, _, groups = _table(reader)
    names = reader.tensor_names
    if reader.config.get("tie_word_embeddings"):
        names = names - {"lm_head.weight"}
    found = needed(table, names, "hugging_face")
    family = family_of(reader.config)
    if family.trunk_hidden == "pre_norm" and any(entry.megatron.startswith("mtp.") for entry in found):
        logger.warning(
            "family %s reads the trunk's hidden before its final norm, Megatron's MTP block the one after: "
            "the head drafts worse there until it is trained on",
            family.name,
        )

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for entry in found:
            yield entry.megatron, join(entry, [reader.tensor(name) for name in entry.hugging_face], groups)

    write_checkpoint(out, tensors(), reader.config, reader.path, shard_bytes=shard_bytes)


def from_megatron(source: str | Path, out: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """The way back: a directory that `to_megatron` wrote, perhaps trained since, as its family's checkpoint.

    Raises:
        UsageError: `out` is taken, the names are not Megatron's, or a tensor has no place in the mapping table.
    """
    out = new_directory(out)
    reader = _open(source, megatron=True)
    table, heads, groups = _table(reader)
    found = needed(table, reader.tensor_names, "megatron")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for entry in found:
            yield from zip(entry.hugging_face, split(entry, reader.tensor(entry.megatron), heads, groups), strict=True)

    write_checkpoint(out, tensors(), reader.config, reader.path, shard_bytes=shard_bytes)


def _open(source: str | Path, *, megatron: bool) -> CheckpointReader:
    reader = CheckpointReader(source)
    if (EMBEDDING in reader.tensor_names) is not megatron:
        held = "Hugging Face" if megatron else "Megatron"
        raise UsageError(f"{source} holds {held} names already: convert it the other way, or not at all")
    return reader


def _table(reader: CheckpointReader) -> tuple[list[Entry], int, int]:
    """The mapping table, and the numbers of query and key-value heads."""
    heads = _positive(reader, "num_attention_heads", None)
    groups = _positive(reader, "num_key_value_heads", heads)
    family = family_of(reader.config)
    depth = declared_depth(family, reader.config) or 0
    return list(entries(family, trunk_layers(reader.config), depth)), heads, groups


def _positive(reader: CheckpointReader, name: str, default: int | None) -> int:
    value = text_section(reader.config).get(name, default)
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{reader.path / CONFIG} has {name}={value!r}: give the model's")
    return value
