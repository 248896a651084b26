"""Weights that are made one by one as they are read. What they will be is known before any is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from forerun.errors import ForerunError

Named = tuple[str, Tensor]


class WeightStream(Iterator[Named]):
    """Whole weights under their names, each made (gathered over ranks, put together) when it is its turn.

    Args:
        described: what comes, in this order; shapes and dtypes are looked at alone.
        made: the weights themselves; read once, and none is held here.

    Attributes:
        described: (name, tensor on the meta device) of all of them. It takes no memory.

    Raises:
        ForerunError: from reading it, if what was made is not what was described.
    """

    def __init__(self, described: Iterable[Named], made: Iterable[Named]) -> None:
        self.described = [(name, tensor if tensor.is_meta else _like(tensor)) for name, tensor in described]
        self._left = iter(self.described)
        self._made = iter(made)

    @classmethod
    def of(cls, named_tensors: Iterable[Named]) -> WeightStream:
        """The same weights as a stream. What is none is read, and held as a whole: live tensors cost nothing so."""
        if isinstance(named_tensors, cls):
            return named_tensors
        given = list(named_tensors)
        return cls(given, given)

    def __next__(self) -> Named:
        expected = next(self._left, None)
        found = next(self._made, None)
        if expected is None and found is None:
            raise StopIteration
        if expected is None or found is None or not _same(expected, found):
            said, came = ("nothing" if pair is None else _about(*pair) for pair in (expected, found))
            raise ForerunError(f"weights were to come as {said} and came as {came}: report this as a bug")
        return found


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _same(expected: Named, found: Named) -> bool:
    (name, tensor), (found_name, whole) = expected, found
    return name == found_name and tensor.shape == whole.shape and tensor.dtype == whole.dtype


def _about(name: str, tensor: Tensor) -> str:
    return f"{name} {tuple(tensor.shape)} {tensor.dtype}"
