"""Long rows over several ranks: each holds some of a row's tokens and gathers the others' keys and values.

Torch's own context parallelism has kernels for CUDA alone and takes no mask, so no packed rows. Here an attention
function of transformers' interface gathers keys and values of the whole row and calls scaled-dot-product attention with
the rank's rows of the mask: exact for any mask, and what is kept for the backward pass, attention's keys and values
aside, is a rank's share. The layout is `forerun.mtp.context_parallel`'s; a row is cut as one document.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from forerun.data.batch import Batch
from forerun.engines.ranks import RankGroup
from forerun.errors import UsageError
from forerun.models.trunk import base_model
from forerun.mtp.context_parallel import ZigZagShard
from forerun.mtp.shift import PADDING, LookAhead, document_ids, look_ahead_in_rows

_numbers = itertools.count()


class Rows:
    """A micro-batch as a rank holds it: whole.

    Attributes:
        batch: what runs through the model here.
        attention_mask: bool [B, 1, S here, S], for a trunk that cannot derive it from position_ids; None: it can.
        look_ahead: what follows a position.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.attention_mask: Tensor | None = None
        self.look_ahead: LookAhead = look_ahead_in_rows

    def take(self, x: Tensor) -> Tensor:
        """This rank's part of whole rows [B, S, ...]."""
        return x

    def whole(self, x: Tensor) -> Tensor:
        """The rows of this rank's part, on every rank of the group the same.

        The gradient is that of a loss that every one of them computes in full and counts once.
        """
        return x


class RowParts(Rows):
    """A micro-batch of which this rank holds some of each row's tokens.

    Args:
        batch: the same on every rank of the group, which all make one.
        ranks: the group.
    """

    def __init__(self, batch: Batch, ranks: RankGroup) -> None:
        assert ranks.group is not None
        self.length = batch.input_ids.shape[1]
        more = -self.length % (2 * ranks.size)
        shard = ZigZagShard([self.length + more], ranks.group, batch.input_ids.device)
        # Places of the row in the order in which gathering the ranks' parts gives them.
        places = torch.arange(self.length + more, device=batch.input_ids.device)
        chunks = places.chunk(2 * ranks.size)
        self._order = torch.cat([c for r in range(ranks.size) for c in (chunks[r], chunks[-1 - r])])
        self._more, self._ranks, self._shard = more, ranks, shard
        # Padding attends to itself alone, as in `Batch`.
        positions = torch.cat([batch.position_ids, places[:more].expand(len(batch.position_ids), -1)], dim=1)
        segments = document_ids(positions)
        self.batch = Batch(
            self.take(batch.input_ids),
            shard.take(positions),
            shard.take(pad(batch.document_ids, (0, more), value=PADDING)),
            self.take(batch.loss_mask),
            {},
        )
        same = shard.take(segments)[:, :, None] == segments[:, None, self._order]
        self.attention_mask = (same & (self._order <= shard.indices[:, None]))[:, None]
        self.look_ahead = shard.look_ahead

    def take(self, x: Tensor) -> Tensor:
        return self._shard.take(pad(x, (0, self._more)))

    def whole(self, x: Tensor) -> Tensor:
        return _Whole.apply(x, self._ranks, self._order, self._shard)[:, : self.length]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: RankGroup, order: Tensor, shard: ZigZagShard) -> Tensor:
        ctx.shard = shard
        return _gathered(x, 1, ranks).index_select(1, order.argsort())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.shard.take(gradients[0]), None, None, None


class _EveryRank(torch.autograd.Function):
    """Parts of all ranks along a dimension; each adds to the gradient of every part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: RankGroup) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return _gathered(x, dim, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        parts = [part.contiguous() for part in gradients[0].chunk(ctx.ranks.size, ctx.dim)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.ranks.group)
        return own, None, None


def _gathered(x: Tensor, dim: int, ranks: RankGroup) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(ranks.size)]
    dist.all_gather(parts, x, group=ranks.group)
    return torch.cat(parts, dim)


def _attend(
    ranks: RankGroup, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers' interface: query, key, value [B, heads, S here, d]."""
    width = key.shape[-1]
    both = _EveryRank.apply(torch.cat([key, value], dim=-1), 2, ranks)
    key, value = both[..., :width], both[..., width:]
    return sdpa_attention_forward(module, query, key, value, mask, **more)


def gather_in_attention(model: PreTrainedModel, ranks: RankGroup) -> Callable[[Batch], Rows]:
    """Have a model's attention gather keys and values over a group, and give what cuts its rows.

    Raises:
        UsageError: the trunk mixes tokens otherwise than by full attention behind transformers' attention interface.
    """
    config: Any = base_model(model).config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if getattr(config, "sliding_window", None) is not None:
        kinds.add("sliding_attention")
    name = f"forerun_context_parallel_{next(_numbers)}"
    check_attention_kinds(type(model).__name__, kinds)
    if model._supports_sdpa:
        AttentionInterface.register(name, partial(_attend, ranks))
        model.set_attn_implementation(name)
    if config._attn_implementation != name:
        raise _uncovered(type(model).__name__, "an attention function of its own")
    return partial(RowParts, ranks=ranks)


def check_attention_kinds(model: str, kinds: Iterable[str]) -> None:
    """Refuse a trunk with layers that mix tokens otherwise than by full attention.

    Args:
        model: its name, for people.
        kinds: transformers' names of those layers, such as "linear_attention".

    Raises:
        UsageError
    """
    if kinds := sorted(kinds):
        raise _uncovered(model, f"layers of {', '.join(kinds)}")


def _uncovered(model: str, why: str) -> UsageError:
    return UsageError(
        f"{model} has {why}, which context parallelism does not cover: set engine.context_parallel_size=1"
    )
