"""A micro-batch as it runs through the model: as it is, or laid out as its attention or several ranks need it.

Ranks that share long rows hold some of each row's tokens, in the layout of `forerun.mtp.context_parallel`. A packed row
is cut as one document, for attention gathers the keys and values of whole rows (as Llama 3 was trained: The Llama 3
Herd of Models, section 3.3.2), so any mask is exact.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from forerun.data.batch import Batch
from forerun.mtp.context_parallel import ZigZagShard
from forerun.mtp.shift import LookAhead, look_ahead_in_rows


class Rows:
    """Whole rows.

    Attributes:
        batch: what runs through the model here.
        look_ahead: what follows a position.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.look_ahead: LookAhead = look_ahead_in_rows

    def take(self, x: Tensor) -> Tensor:
        """Of whole rows [B, S, ...] what runs here."""
        return x

    def whole(self, x: Tensor) -> Tensor:
        """The rows [B, S, ...] of which every rank of the group gives its part, on each of them the same.

        The gradient is that of a loss that every one of them computes in full and counts once.
        """
        return x

    def visible(self) -> Tensor:
        """bool [B, 1, S here, S]: what a position attends to, itself and those before it in its document.

        Columns are in the order in which `gather` gives the ranks' parts. Padding is one more document of its row.
        """
        documents = self.batch.document_ids
        return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]

    @cached_property
    def attention_mask(self) -> Tensor | None:
        """`visible`, for a trunk of transformers; None: it knows by position_ids."""
        return None


class JoinedRows(Rows):
    """All rows as one, for attention that tells documents apart by position_ids in a single row alone.

    That is flash attention in transformers: of several rows it takes each for one document.
    """

    def __init__(self, batch: Batch) -> None:
        documents = batch.document_ids
        # What follows a row's last token is another document's, whatever the rows number theirs.
        rows = torch.arange(len(documents), device=documents.device)[:, None]
        own = torch.where(documents >= 0, documents + rows * (documents.max() + 1), documents)
        self._shape = documents.shape
        super().__init__(replace(batch, document_ids=own).map(self.take))

    def take(self, x: Tensor) -> Tensor:
        return x.reshape(1, -1, *x.shape[2:])

    def whole(self, x: Tensor) -> Tensor:
        return x.view(*self._shape, *x.shape[2:])


class RowParts(Rows):
    """Some tokens of each row.

    Args:
        batch: the same on every rank of the group, which all make one.
        group: the ranks that share it.
    """

    def __init__(self, batch: Batch, group: dist.ProcessGroup) -> None:
        rows, self._length = batch.input_ids.shape
        chunks = 2 * group.size()
        padded = batch.padded(rows, -(-self._length // chunks) * chunks)
        self._group, self._documents = group, padded.document_ids
        self._shard = ZigZagShard([padded.input_ids.shape[1]], group, batch.input_ids.device)
        self.batch = padded.map(self._shard.take)
        self.look_ahead = self._shard.look_ahead

    def take(self, x: Tensor) -> Tensor:
        return self._shard.take(F.pad(x, (0, self._documents.shape[1] - self._length)))

    def whole(self, x: Tensor) -> Tensor:
        return _Whole.apply(x, self._group, self._shard)[:, : self._length]

    def visible(self) -> Tensor:
        order, own = self._shard.order, self._shard.indices
        same = self._documents[:, own, None] == self._documents[:, None, order]
        return (same & (order <= own[:, None]))[:, None]

    @cached_property
    def attention_mask(self) -> Tensor | None:
        return self.visible()


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, shard: ZigZagShard) -> Tensor:
        ctx.shard = shard
        whole = _gathered(x.transpose(0, 1), group).transpose(0, 1)
        return whole.index_select(1, shard.order.argsort())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shard.take(grad), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = list(grad.contiguous().chunk(ctx.group.size()))
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[S here, ...] of every rank, one after the other: [S, ...]. Each rank adds to the gradient of every part."""
    return _Gather.apply(x, group)


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts)
