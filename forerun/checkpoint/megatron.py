"""Checkpoints under Megatron-Core's names, and back: the same directory, its tensors renamed and laid out anew."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from forerun.checkpoint.reader import CheckpointReader
from forerun.checkpoint.shards import SHARD_BYTES, new_directory, write_checkpoint
from forerun.checkpoint.tied import refuse_second_head
from forerun.errors import UsageError, one_line
from forerun.families import Duplicate, FamilyRecord, declared_depth, family_of
from forerun.families.megatron import EMBEDDING, HEAD, Entry, TrunkShape, entries, join, needed, split, trunk_shape

logger = logging.getLogger(__name__)


def to_megatron(source: str | Path, out: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a Hugging Face checkpoint's tensors under Megatron-Core's names, as safetensors beside its config.json.

    `GPTModel.load_state_dict` takes them (one tensor- and pipeline-parallel rank, vocabulary unpadded). Tensors are
    read and written one by one; the directory appears whole or not at all. Copies of the embedding and the LM head that
    some families' files hold for the MTP layers are left out, and come back where their files always have them.

    Raises:
        UsageError: `out` is taken, or a tensor has no place in the mapping table.
    """
    out = new_directory(out)
    reader = _open(source, megatron=False)
    refuse_second_head(reader)
    family, shape, table = _table(reader)
    names = reader.tensor_names - {name for name, _ in _copies(family, shape, reader)}
    if reader.config.get("tie_word_embeddings"):
        names = names - {"lm_head.weight"}
    found = needed(table, names, "hugging_face")
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
                joined = join(entry, parts, shape.groups)
            yield entry.megatron, joined

    write_checkpoint(out, tensors(), reader.config, reader.path, shard_bytes=shard_bytes)


def from_megatron(source: str | Path, out: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """The way back: a directory that `to_megatron` wrote, perhaps trained since, as its family's checkpoint.

    Raises:
        UsageError: `out` is taken, the names are not Megatron's, or a tensor has no place in the mapping table.
    """
    out = new_directory(out)
    reader = _open(source, megatron=True)
    family, shape, table = _table(reader)
    found = needed(table, reader.tensor_names, "megatron")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for entry in found:
            tensor = reader.tensor(entry.megatron)
            with _fitting(reader, entry.megatron):
                parts = split(entry, tensor, shape.heads, shape.groups)
            yield from zip(entry.hugging_face, parts, strict=True)
        names = {"embedding": EMBEDDING, "head": HEAD if HEAD in reader.tensor_names else EMBEDDING}
        for name, copy in _copies(family, shape, reader):
            if copy.written:
                yield name, reader.tensor(names[copy.of])

    write_checkpoint(out, tensors(), reader.config, reader.path, shard_bytes=shard_bytes)


def _open(source: str | Path, *, megatron: bool) -> CheckpointReader:
    reader = CheckpointReader(source)
    if (EMBEDDING in reader.tensor_names) is not megatron:
        held = "Hugging Face" if megatron else "Megatron"
        raise UsageError(f"{source} holds {held} names already: convert it the other way, or not at all")
    return reader


def _table(reader: CheckpointReader) -> tuple[FamilyRecord, TrunkShape, list[Entry]]:
    family = family_of(reader.config)
    shape = trunk_shape(family, reader.config)
    depth = declared_depth(family, reader.config) or 0
    try:
        return family, shape, list(entries(family, shape, depth))
    except KeyError as error:
        raise UsageError(f"{reader.path} has no Megatron names: {error.args[0]} of a dense Llama-like layer") from None


def _copies(family: FamilyRecord, shape: TrunkShape, reader: CheckpointReader) -> list[tuple[str, Duplicate]]:
    """Names of the block's copies of embedding and LM head, which Megatron has not."""
    depth = declared_depth(family, reader.config) or 0
    return [(family.duplicate_name(copy, k, shape.layers), copy) for k in range(depth) for copy in family.duplicates]


@contextmanager
def _fitting(reader: CheckpointReader, name: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, IndexError) as error:  # torch's, of shapes that do not divide
        raise UsageError(
            f"{name} of {reader.path} has not the shape that the heads in config.json imply: restore the file that "
            f"belongs to these weights ({one_line(error):.100})"
        ) from error
