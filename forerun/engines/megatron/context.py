"""Rows of tokens that context-parallel ranks share in zig-zag: who holds which place, and what ranks tell one another.

A packed row is cut as one document as long as the row is: `attention.DocumentAttention` needs no more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forerun.mtp.context_parallel import ZigZagShard


def places(length: int, size: int, rank: int) -> Tensor:
    """long [length / size]: the places of a row that a rank holds, in its order. `length` is a multiple of 2·size."""
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


class _GatherPositions(torch.autograd.Function):
    """[B, S / size] of every rank in the whole rows' order, [B, S].

    Every rank goes on to compute the same from the whole, so each takes its own part of the gradient back, unsummed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        size = group.size()
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        order = torch.cat([places(x.shape[1] * size, size, rank) for rank in range(size)]).to(x.device)
        ctx.own = order.chunk(size)[group.rank()]
        return torch.empty_like(torch.cat(parts, dim=1)).index_copy(1, order, torch.cat(parts, dim=1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(1, ctx.own), None


def gather_positions(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of rows [B, S / size] -> whole rows [B, S]."""
    return x if group.size() == 1 else _GatherPositions.apply(x, group)


def ahead(hidden_states: Tensor, depth: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of rows [B, S / size, d], each position replaced by the one `depth` places behind it.

    Past a row's end it means nothing. Not differentiable.
    """
    if group.size() == 1:
        return hidden_states.roll(-depth, dims=1)
    length = hidden_states.shape[1] * group.size()
    shard = ZigZagShard([length], group, hidden_states.device)
    return shard.look_ahead(hidden_states.transpose(1, 2).contiguous(), depth)(depth).transpose(1, 2)
