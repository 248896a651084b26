"""Rank 0's weights handed to ranks that built the model without any, so that one copy of it in memory does for all.

The other ranks' model lies on the meta device (`forerun.load(path, meta=True)`): its tensors have shapes and nothing
else. They get what rank 0 has, a part of the model at a time: parameters, and all buffers, as files do not hold every
one (rotary frequencies, for instance).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forerun.engines.ranks import RankGroup
from forerun.engines.same_settings import agree_on_settings
from forerun.errors import UsageError

Layout = dict[str, tuple[torch.Size, torch.dtype]]


def agree_on_weights(model: nn.Module, ranks: RankGroup) -> bool:
    """Whether any rank's model is without weights; its tensors then get the dtypes of rank 0's. Every rank calls it.

    Raises:
        UsageError: on every rank: another rank's config.json is not rank 0's, rank 0's model is without weights, or
            another rank has built another model.
    """
    config: Any = getattr(model, "config", None)
    agree_on_settings({} if config is None else config.to_dict(), ranks)
    tensors = _named(model)
    lacking = ranks.collect(ranks.size, [any(tensor.is_meta for tensor in tensors.values())])
    if not any(lacking):
        return False
    if lacking[0]:
        raise UsageError("the model has no weights: load it without meta=true (with several ranks, at least on rank 0)")
    first: Layout = ranks.agree({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    ranks.fail_together(_difference(tensors, first))
    for name, tensor in tensors.items():
        if tensor.is_meta:
            _replace(tensor, torch.empty_like(tensor, dtype=first[name][1]))
    return True


@torch.no_grad()
def hand_out(tensors: Iterable[Tensor], ranks: RankGroup, device: torch.device) -> None:
    """Give parameters or buffers of a model rank 0's values, on `device`; what lies in shards already is passed over.

    Every rank calls it with the same ones of its own model. They change in place, so what is tied stays tied.
    """
    for tensor in list(tensors):
        if isinstance(tensor, DTensor):
            continue
        if ranks.rank == 0:
            whole = tensor.detach().to(device).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        ranks.broadcast(whole)
        _replace(tensor, whole)


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _difference(own: Mapping[str, Tensor], first: Layout) -> UsageError | None:
    """What to say of a model that is not rank 0's."""
    for name in sorted(own.keys() | first.keys()):
        here = (own[name].shape, first[name][1] if own[name].is_meta else own[name].dtype) if name in own else None
        if here != first.get(name):
            return UsageError(
                f"this rank's model is not rank 0's, first at {name}: load it from the same checkpoint with the same "
                "settings"
            )
    return None


def _replace(tensor: Tensor, by: Tensor) -> None:
    """Make a tensor another one wherever it is held."""
    if not tensor.is_meta:
        tensor.data = by
    elif isinstance(tensor, nn.Parameter):
        torch.utils.swap_tensors(tensor, nn.Parameter(by, requires_grad=tensor.requires_grad))
    else:
        torch.utils.swap_tensors(tensor, by)
