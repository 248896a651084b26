"""Weights on their way from the trainer to a rollout engine: a digest, and a check that all are there."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.carrier import check_names
from forerun.models.weight_stream import Named, WeightStream


class Digest:
    """SHA-256 over names, dtypes, shapes and bytes of tensors as they come by; their order does not matter.

    Args:
        dtype: cast to it first. A trainer in float32 gives the engine's dtype to compare with a bfloat16 engine.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._parts: list[tuple[str, bytes]] = []

    @torch.no_grad()
    def add(self, name: str, tensor: Tensor) -> None:
        """One that is there now, on any device."""
        tensor = tensor.detach().to("cpu", self._dtype or tensor.dtype).contiguous()
        part = hashlib.sha256(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        part.update(tensor.flatten().view(torch.uint8).numpy().data)
        self._parts.append((name, part.digest()))

    def hexdigest(self) -> str:
        return hashlib.sha256(b"".join(part for _, part in sorted(self._parts))).hexdigest()


def digesting(stream: WeightStream, names: Container[str], into: Digest) -> WeightStream:
    """The same stream, of which `into` gets those of these names as they come by."""

    def seen(named: Named) -> Named:
        if named[0] in names:
            into.add(*named)
        return named

    return WeightStream(stream.described, map(seen, stream))


def digest(named_tensors: Iterable[Named], dtype: torch.dtype | None = None) -> str:
    """`Digest` of all of these; they are brought to the CPU one at a time."""
    whole = Digest(dtype)
    for name, tensor in named_tensors:
        whole.add(name, tensor)
        del tensor  # or it would be there while the next one is made
    return whole.hexdigest()


def check_complete(own: Mapping[str, Tensor], given: Sequence[Named], drafter_names: Sequence[str] = ()) -> None:
    """Check an update as a whole, before any of it is applied.

    Args:
        own: the engine's weights by name.
        given: the update; only names, shapes and dtypes are looked at.
        drafter_names: which of them are the drafter's; their absence is reported as such.

    Raises:
        ForerunError: a weight is missing, sent twice, unknown, of another shape, or not of a floating dtype.
    """
    names = [name for name, _ in given]
    sent = set(names)
    if len(sent) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ForerunError(f"weight update: {twice} was sent twice; nothing was changed")
    missing = [name for name in drafter_names if name not in sent]
    if missing:
        raise ForerunError(
            f"weight update: {len(missing)} of the drafter's {len(drafter_names)} weights are missing, first "
            f"{missing[0]}; nothing was changed: send the MTP block's weights with the trunk's"
        )
    try:
        check_names(own, dict(given))
    except ForerunError as error:
        raise ForerunError(f"weight update: {error}; nothing was changed") from None
    for name, tensor in given:
        if not tensor.is_floating_point():
            raise ForerunError(f"weight update: {name} is {tensor.dtype}, not a floating dtype; nothing was changed")
