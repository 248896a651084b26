"""The block's tensors as its family's files hold them: other names, experts apart, copies of embedding and LM head."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.families import FamilyRecord


@dataclass(frozen=True)
class Layout:
    """Where files of a family differ among themselves. A save does as the file did from which the block came.

    Attributes:
        split_experts: experts lie apart, where the record has pieces for them.
        duplicates: (name, "embedding" or "head") of the copies that the file holds.
    """

    split_experts: bool = True
    duplicates: tuple[tuple[str, str], ...] = ()


def new_layout(family: FamilyRecord, depth: int, trunk_layers: int) -> Layout:
    """The layout of a newly attached block of `depth` layers."""
    copies = (
        (family.duplicate_name(duplicate, k, trunk_layers), duplicate.of)
        for k in range(depth)
        for duplicate in family.duplicates
        if duplicate.written
    )
    return Layout(duplicates=tuple(dict.fromkeys(copies)))


def found_layout(
    family: FamilyRecord, depth: int, trunk_layers: int, stored: Collection[str], tensor_names: Collection[str]
) -> Layout:
    """The layout of a file.

    Args:
        stored: the block's names in it, stacked.
        tensor_names: all names in it.
    """
    copies = (
        (family.duplicate_name(duplicate, k, trunk_layers), duplicate.of)
        for k in range(depth)
        for duplicate in family.duplicates
    )
    return Layout(
        split_experts=not any(name in tensor_names for name in stored if family.piece_names(name, 0) is not None),
        duplicates=tuple(pair for pair in dict.fromkeys(copies) if pair[0] in tensor_names),
    )


def split(name: str, tensor: Tensor, family: FamilyRecord) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each part in which files hold stacked experts, as views; any other tensor as it is."""
    pieces = family.piece_names(name, len(tensor)) if tensor.dim() == 3 else None
    if pieces is None:
        yield name, tensor
        return
    for expert, parts in zip(tensor, pieces, strict=True):
        yield from zip(parts, expert.chunk(len(parts)), strict=True)


def file_tensors(family: FamilyRecord, layout: Layout, stored: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as the file holds them, of the block's tensors under their stacked names. Parts are views."""
    for name, tensor in stored.items():
        if layout.split_experts:
            yield from split(name, tensor, family)
        else:
            yield name, tensor


@torch.no_grad()
def fill(
    family: FamilyRecord, stored_name: str, target: Tensor, names: Collection[str], get: Callable[[str], Tensor]
) -> list[str]:
    """Copy a stored tensor into `target`, in place, from its stacked form or from its pieces.

    Args:
        names: what there is.
        get: gives a tensor by its name.

    Returns:
        the names that were read.

    Raises:
        ForerunError: a tensor is of another shape than its place, or quantised.
    """
    pieces = family.piece_names(stored_name, len(target)) if target.dim() else None
    if stored_name in names or pieces is None:
        _copy(stored_name, get(stored_name), target)
        return [stored_name]
    for expert, parts in zip(target, pieces, strict=True):
        for name, part in zip(parts, expert.chunk(len(parts)), strict=True):
            _copy(name, get(name), part)
    return [name for parts in pieces for name in parts]


def _copy(name: str, tensor: Tensor, place: Tensor) -> None:
    if tensor.shape != place.shape:
        raise ForerunError(
            f"{name} has shape {tuple(tensor.shape)}, the block needs {tuple(place.shape)}: config.json and weights do "
            "not belong together"
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ForerunError(f"{name} is quantised ({tensor.dtype}): load a checkpoint whose MTP tensors are not")
    place.copy_(tensor)
