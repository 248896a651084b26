"""Files that loaders would make different models of, without a word: refused before one is built."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from forerun.checkpoint.files import shown
from forerun.checkpoint.quantised import quantisation_settings
from forerun.checkpoint.reader import CONFIG, INDEX, SINGLE, CheckpointReader
from forerun.checkpoint.tied import refuse_second_head
from forerun.checkpoint.trunk import FLOATS
from forerun.errors import UsageError


def refuse_ambiguous(reader: CheckpointReader, is_mtp: Callable[[str], bool]) -> None:
    """Refuse two saves in one directory, a tensor that two files hold and hold differently, a trunk whose weights are
    quantised (read without their scales) where config.json does not say so, and a second LM head.

    Args:
        is_mtp: whether a name is of the MTP block, which its own loader checks.

    Raises:
        UsageError: it is such a checkpoint, or a file's header cannot be read.
    """
    _refuse_two_saves(reader)
    holders: dict[str, str] = {}
    for shard in reader.shards:
        for name, header in reader.headers(shard).items():
            first = holders.setdefault(name, shard)
            if first != shard and not torch.equal(reader.tensor(name, first), reader.tensor(name, shard)):
                raise UsageError(
                    f"{reader.path}: {first} and {shard} hold {shown(name)} and differ in it: they are of two saves, "
                    "copy all of one again"
                )
            quantised = name.endswith(".weight") and header.dtype not in FLOATS and not is_mtp(name)
            if quantised and quantisation_settings(reader.config) is None:
                raise UsageError(
                    f"{shown(name)} in {reader.path / shard} is quantised ({header.dtype}), and {CONFIG} has no "
                    "quantization_config: restore the one that was saved with these weights"
                )
    refuse_second_head(reader)


def _refuse_two_saves(reader: CheckpointReader) -> None:
    """transformers reads SINGLE where there is one, others what the index names."""
    single = reader.path / SINGLE
    if reader.index is None or SINGLE in reader.shards or not single.exists():
        return
    # A save that was killed as it replaced another may leave one file under two names.
    if not all(os.path.samefile(reader.path / shard, single) for shard in reader.shards) and not _same(reader):
        raise UsageError(
            f"{reader.path} holds {SINGLE} and, by its {INDEX}, another save's files: remove what is left over from "
            "the earlier one"
        )


def _same(reader: CheckpointReader) -> bool:
    """Whether SINGLE holds the same tensors as the files that the index names."""
    others = {name: shard for shard in reader.shards for name in reader.headers(shard)}
    return reader.headers(SINGLE).keys() == others.keys() and all(
        torch.equal(reader.tensor(name, SINGLE), reader.tensor(name, shard)) for name, shard in others.items()
    )
