"""What the values of an MTP block's tensors say: none finite, none but zero, none ever trained, a copy that is none.

Tensors are read one at a time, and only the block's and what it copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.checkpoint.contents import Stored, listed
from forerun.checkpoint.files import shown
from forerun.checkpoint.inspect import Examined
from forerun.checkpoint.tied import MEND
from forerun.checkpoint.trunk import FLOATS

_READABLE = FLOATS | {"F8_E4M3", "F8_E5M2"}
_ELEMENTS_AT_ONCE = 1 << 22

_EXPORT_AGAIN = "export the head again from the trained model, or train it (forerun sft)"


@dataclass(frozen=True)
class Statistics:
    """Of one tensor. Mean, standard deviation, smallest and largest are those of its finite elements."""

    elements: int
    dimensions: int
    finite: bool
    mean: float
    std: float
    smallest: float
    largest: float


def statistics(tensor: Tensor) -> Statistics:
    """One pass in float64 over pieces, so that a large tensor is never held twice."""
    total = squares = 0.0
    smallest, largest, count = math.inf, -math.inf, 0
    for piece in _pieces(tensor):
        kept = piece[piece.isfinite()]
        count += kept.numel()
        if kept.numel():
            total += float(kept.sum())
            squares += float(kept.square().sum())
            smallest, largest = min(smallest, float(kept.min())), max(largest, float(kept.max()))
    mean = total / max(count, 1)
    std = max(squares / max(count, 1) - mean * mean, 0.0) ** 0.5
    return Statistics(tensor.numel(), tensor.dim(), count == tensor.numel(), mean, std, smallest, largest)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    for piece in tensor.flatten().split(_ELEMENTS_AT_ONCE):
        yield piece.double()


def look_at_values(found: Examined) -> None:
    """Read the block's tensors and report what their values give away.

    Raises:
        UsageError: a shard cannot be read.
    """
    inspection = found.inspection
    inspection.checked.append("values")
    by_depth: dict[int, dict[str, Statistics]] = {}
    zero, broken = [], []
    for name, stored in found.stored.items():
        if stored.header.dtype not in _READABLE or 0 in stored.header.shape:
            continue
        tensor = found.reader.tensor(stored.name, stored.files[0])
        seen = statistics(tensor)
        row = inspection.tensors[name]
        if not seen.finite:
            row.mark("non_finite")
            broken.append(row.name)
        elif seen.smallest == seen.largest == 0 and _must_not_be_zero(found, name, seen):
            row.mark("all_zero")
            zero.append(row.name)
        if name not in found.copies:
            by_depth.setdefault(found.names.depth_of(name) or 0, {})[name] = seen
    if broken:
        inspection.report(
            "non_finite",
            f"{listed(broken)} of the MTP block hold NaN or infinity",
            f"the training diverged, or memory was saved that was never written: {_EXPORT_AGAIN}",
            broken,
        )
    if zero:
        inspection.report("all_zero", f"{listed(zero)} of the MTP block are all zeros", _EXPORT_AGAIN, zero)
    for k, tensors in sorted(by_depth.items()):
        _look_for_first_values(found, k, tensors)
    _compare_copies(found)
    _compare_tied_head(found)


def _must_not_be_zero(found: Examined, name: str, seen: Statistics) -> bool:
    """A matrix, or a norm that multiplies by its weight. A bias may be zero, and a zero-centred norm starts there."""
    return seen.dimensions > 1 or (name.endswith(".weight") and not found.family.zero_centred_norm)


def _look_for_first_values(found: Examined, k: int, tensors: dict[str, Statistics]) -> None:
    """Report a layer that is as an initialisation leaves it: random, or as `forerun.attach` starts it."""
    inspection = found.inspection
    projection = found.names.name(k, "proj.weight")
    final_norm = found.names.name(k, "final_norm.weight") if found.family.final_norm else None
    spread = _initializer_range(found)
    one = 0.0 if found.family.zero_centred_norm else 1.0
    matrices = {name: s for name, s in tensors.items() if s.dimensions > 1}
    norms = [s for name, s in tensors.items() if s.dimensions == 1 and name.endswith(".weight") and name != final_norm]
    drawn = bool(matrices) and all(_as_drawn(s, spread) for s in matrices.values())
    if drawn and all(s.smallest == s.largest == one for s in norms):
        for name in tensors:
            inspection.tensors[name].mark("untouched")
        inspection.report(
            "untouched",
            f"MTP layer {k} looks never trained: every matrix has mean 0 and standard deviation {spread:g} "
            "(initializer_range), every norm is its first value",
            _EXPORT_AGAIN,
            [inspection.tensors[name].name for name in tensors],
        )
    elif projection in found.stored and _passes_a_half_on(found, projection):
        row = inspection.tensors[projection]
        row.mark("untouched")
        inspection.report(
            "untouched",
            f"{shown(row.name)} passes one half of its input on as it is, as forerun.attach starts it: never trained",
            _EXPORT_AGAIN,
            [row.name],
        )


def _initializer_range(found: Examined) -> float:
    value = found.trunk.config.get("initializer_range")
    plausible = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 100
    return float(value) if value is not None and plausible else 0.02


def _as_drawn(seen: Statistics, spread: float) -> bool:
    """Whether a matrix could be fresh from N(0, spread²): mean and deviation within what chance and rounding allow."""
    chance = 4.0 / seen.elements**0.5
    return abs(seen.mean) < chance * spread and abs(seen.std / spread - 1.0) < 0.01 + chance / 2**0.5


def _passes_a_half_on(found: Examined, projection: str) -> bool:
    """Whether each half of the projection is an identity matrix or zero, as `forerun.attach` starts it."""
    stored = found.stored[projection]
    shape = stored.header.shape
    if stored.header.dtype not in _READABLE or len(shape) != 2 or shape[1] != 2 * shape[0] or shape[0] < 2:
        return False
    tensor = found.reader.tensor(stored.name, stored.files[0]).float()
    eye = torch.eye(shape[0])
    return all(torch.equal(half, eye) or not half.any() for half in tensor.chunk(2, dim=1)) and bool(tensor.any())


def _compare_copies(found: Examined) -> None:
    """Copies of the trunk's embedding and LM head must be copies: engines differ in which of the two they use."""
    for name, copy_of in found.copies.items():
        original = found.trunk.embedding if copy_of == "embedding" else found.trunk.head or found.trunk.embedding
        row = found.inspection.tensors[name]
        if original is None or row.shape != found.trunk_tensors[original].header.shape:
            continue
        if _equal(found, found.stored[name], found.trunk_tensors[original]):
            continue
        row.mark("differs")
        found.inspection.report(
            "copy_differs",
            f"{shown(row.name)} differs from {shown(original)}, of which it is a copy: engines use one or the other",
            "write the trunk's tensor over the copy, as saving with forerun does",
            [row.name],
        )


def _compare_tied_head(found: Examined) -> None:
    """Where config.json ties the LM head to the embedding, a head in the files must be the embedding."""
    config, trunk = found.reader.config, found.trunk
    tied = any(section.get("tie_word_embeddings") is True for section in (config, trunk.config))
    if not tied or trunk.head is None or trunk.embedding is None:
        return
    head, embedding = found.trunk_tensors[trunk.head], found.trunk_tensors[trunk.embedding]
    if head.header.shape == embedding.header.shape and _equal(found, head, embedding):
        return
    found.inspection.report(
        "tied_head_differs",
        f"config.json ties the LM head to the embedding, and {shown(trunk.head)} is another than "
        f"{shown(trunk.embedding)}: transformers uses the head in the files, engines the embedding",
        MEND,
        [trunk.head],
    )


def _equal(found: Examined, copy: Stored, trunk: Stored) -> bool:
    if not {copy.header.dtype, trunk.header.dtype} <= _READABLE:
        return True  # quantised: not to be compared by values
    ours, theirs = (found.reader.tensor(s.name, s.files[0]) for s in (copy, trunk))
    return all(torch.equal(a, b) for a, b in zip(_pieces(ours), _pieces(theirs), strict=True))
