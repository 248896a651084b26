"""Checkpoints under Megatron-Core's names, and back: the same directory, its tensors renamed and laid out anew."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from forerun.checkpoint.reader import CONFIG, CheckpointReader
from forerun.checkpoint.shards import SHARD_BYTES, new_directory, write_checkpoint
from forerun.checkpoint.tied import refuse_second_head
from forerun.errors import UsageError, one_line
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
    refuse_second_head(reader)
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
            parts = [reader.tensor(name) for name in entry.hugging_face]
            with _fitting(reader, entry.hugging_face[0]):
                joined = join(entry, parts, groups)
            yield entry.megatron, joined

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
            tensor = reader.tensor(entry.megatron)
            with _fitting(reader, entry.megatron):
                parts = split(entry, tensor, heads, groups)
            yield from zip(entry.hugging_face, parts, strict=True)

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
    try:
        return list(entries(family, trunk_layers(reader.config), depth)), heads, groups
    except KeyError as error:
        raise UsageError(f"{reader.path} has no Megatron names: {error.args[0]} of a dense Llama-like layer") from None


@contextmanager
def _fitting(reader: CheckpointReader, name: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, IndexError) as error:  # torch's, of shapes that do not divide
        raise UsageError(
            f"{name} of {reader.path} has not the shape that the heads in config.json imply: restore the file that "
            f"belongs to these weights ({one_line(error):.100})"
        ) from error


def _positive(reader: CheckpointReader, name: str, default: int | None) -> int:
    value = text_section(reader.config).get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise UsageError(f"{reader.path / CONFIG} has {name}={value!r}: give the model's")
    return value
