"""Every tensor that the files of a checkpoint hold, by their headers, and how the index agrees with them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from forerun.checkpoint.files import shown
from forerun.checkpoint.findings import Inspection
from forerun.checkpoint.reader import INDEX, SINGLE, SUFFIX, WEIGHTS, CheckpointReader, TensorHeader
from forerun.errors import UsageError

_RESAVE = "load the checkpoint and save it again, or download the index and the shards of one and the same revision"

# Bits of an element, by safetensors' dtype name.
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
_BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32}
_BITS |= {"F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64}


@dataclass(frozen=True)
class Stored:
    """A tensor of the files: its name there, the files it lies in (several if it was written twice), its header."""

    name: str
    files: tuple[str, ...]
    header: TensorHeader


def listed(names: list[str]) -> str:
    """A count of tensors and the first one's name, as problems tell them."""
    first = f"first {shown(names[0])}" if len(names) > 1 else shown(names[0])
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({first})"


def gather(reader: CheckpointReader, inspection: Inspection, looks_like_mtp: re.Pattern[str]) -> dict[str, Stored]:
    """Read the header of every shard, and report where index and shards contradict each other.

    Args:
        reader: of the checkpoint.
        inspection: gets the problems.
        looks_like_mtp: found in the name of a tensor that must not lie in a file which nobody reads.

    Returns:
        name -> where and what, of all tensors in files that the index names (or in the one file).

    Raises:
        UsageError: a shard cannot be read.
    """
    stored: dict[str, Stored] = {}
    for shard in reader.shards:
        for name, header in reader.headers(shard).items():
            before = stored.get(name)
            stored[name] = Stored(name, (*before.files, shard) if before else (shard,), header)
    if reader.index is not None:
        _compare_with_index(reader, inspection, stored)
        _look_at_unlisted_files(reader, inspection, looks_like_mtp)
    return stored


def _compare_with_index(reader: CheckpointReader, inspection: Inspection, stored: dict[str, Stored]) -> None:
    assert reader.index is not None
    named = reader.tensor_names
    if absent := sorted(named - stored.keys()):
        inspection.report(
            "index_names_absent_tensor",
            f"{INDEX} names {listed(absent)} that no shard holds",
            f"copy the shards again; or {_RESAVE}",
            absent,
        )
    if misplaced := sorted(n for n in named & stored.keys() if reader.file_of(n) not in stored[n].files):
        inspection.report(
            "index_names_wrong_shard",
            f"{INDEX} looks for {listed(misplaced)} in a shard other than the one that holds it",
            _RESAVE,
            misplaced,
        )
    if unlisted := sorted(stored.keys() - named):
        inspection.report(
            "tensor_not_in_index",
            f"the shards hold {listed(unlisted)} that {INDEX} does not name: most loaders never see it",
            _RESAVE,
            unlisted,
        )
    metadata = reader.index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None:
        return
    actual = sum(_bytes(s.header) * len(s.files) for s in stored.values())
    if isinstance(total, bool) or not isinstance(total, int | float) or total != actual:
        inspection.report(
            "index_total_size",
            f"{INDEX} says total_size={shown(total)}, the shards hold {actual} bytes: tensors were lost or added later",
            f"{_RESAVE}; where nothing else is wrong, correct the number",
        )


def _bytes(header: TensorHeader) -> int:
    elements = 1
    for size in header.shape:
        elements *= size
    return (elements * _BITS.get(header.dtype, 0) + 7) // 8


def _look_at_unlisted_files(reader: CheckpointReader, inspection: Inspection, looks_like_mtp: re.Pattern[str]) -> None:
    """Files beside the indexed ones: leftovers of another save that some loaders prefer, or a head nobody reads."""
    shards = set(reader.shards)
    for file in sorted(name for name in os.listdir(reader.path) if name.endswith(SUFFIX) and name not in shards):
        if file == SINGLE:
            inspection.report(
                "two_layouts",
                f"{SINGLE} lies beside {INDEX}, which does not name it: transformers reads the one, others the other",
                "remove the one that is left over from an earlier save",
            )
            continue
        try:
            names = sorted(name for name in reader.headers(file) if looks_like_mtp.search(name))
        except UsageError as error:
            inspection.notes.append(f"a file that {INDEX} does not name cannot be read: {error}")
            continue
        if names:
            inspection.report(
                "file_not_in_index",
                f"{shown(file)} holds MTP tensors, {listed(names)}, and {INDEX} does not name it",
                f"add its tensors to {INDEX}; or {_RESAVE}",
                names,
            )
        elif WEIGHTS.fullmatch(file):
            inspection.report(
                "file_not_in_index",
                f"{shown(file)} is named like a shard, and {INDEX} does not name it: it is left over or was forgotten",
                f"remove it, or {_RESAVE}",
            )
