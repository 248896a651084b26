"""Weights on their way from the trainer to a rollout engine: a digest, and a check that all are there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.carrier import check_names

Named = tuple[str, Tensor]


@torch.no_grad()
def digest(named_tensors: Iterable[Named], dtype: torch.dtype | None = None) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and bytes; the order of the tensors does not matter.

    Args:
        named_tensors: on any device; brought to the CPU one at a time.
        dtype: cast to it first. A trainer in float32 gives the engine's dtype to compare with a bfloat16 engine.
    """
    parts = []
    for name, tensor in named_tensors:
        tensor = tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        head = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode()
        part = hashlib.sha256(head)
        part.update(tensor.flatten().view(torch.uint8).numpy().data)
        parts.append((name, part.digest()))
    whole = hashlib.sha256()
    for _, part_digest in sorted(parts):
        whole.update(part_digest)
    return whole.hexdigest()


def check_complete(own: Mapping[str, Tensor], given: Sequence[Named], drafter_names: Sequence[str] = ()) -> None:
    """Check an update as a whole, before any of it is applied.

    Args:
        own: the engine's weights by name.
        given: the update.
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
