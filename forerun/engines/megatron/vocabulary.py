"""An LM head whose rows lie in parts on tensor-parallel ranks, for the losses of `forerun.mtp.losses`.

Rows by which a vocabulary was padded to divide evenly are no tokens and get no probability. (Megatron-core's own
cross-entropy gives them some.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from forerun.mtp.losses import Vocabulary, softmax

# Far below any logit, and finite: a probability of 0 times its logarithm is 0 then, and not NaN.
_NO_TOKEN = -1e30


class _Copy(torch.autograd.Function):
    """The tensor itself; in backward the sum over ranks.

    Megatron-core's own leaves a gradient that is not contiguous as it is, unsummed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


@dataclass(frozen=True)
class VocabularyShard(Vocabulary):
    """This rank's rows of an LM head.

    Attributes:
        weight: [v, d].
        vocab_size: tokens of the whole vocabulary, without padding rows.
        group: tensor-parallel ranks; rank r's first row is token r·v.
    """

    weight: Tensor
    vocab_size: int
    group: dist.ProcessGroup

    @property
    def first(self) -> int:
        return self.group.rank() * self.weight.shape[0]

    def enter(self, hidden_states: Tensor) -> Tensor:
        """Hiddens that every rank holds alike, to be multiplied with parts of the vocabulary."""
        return hidden_states if self.group.size() == 1 else _Copy.apply(hidden_states, self.group)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Hiddens [n, d] out of `enter` -> float32 [n, v]."""
        logits = F.linear(hidden_states, self.weight).float()
        if (tokens := self.vocab_size - self.first) < logits.shape[-1]:
            logits = logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) >= tokens, _NO_TOKEN)
        return logits

    def sum(self, x: Tensor) -> Tensor:
        if self.group.size() == 1:
            return x
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total

    @torch.no_grad()
    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The first token of equals."""
        own, row = logits.max(dim=-1, keepdim=True)
        token = row + self.first
        if self.group.size() == 1:
            return own, token
        largest = own.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        token = torch.where(own == largest, token, torch.iinfo(torch.long).max)
        dist.all_reduce(token, dist.ReduceOp.MIN, group=self.group)
        return largest, token

    def columns(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        own = (tokens >= self.first) & (tokens < self.first + self.weight.shape[0])
        return torch.where(own, tokens - self.first, 0).unsqueeze(-1), own.long().unsqueeze(-1)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return logits - softmax(logits, 1.0, self)[1]
