"""Losses over logits whose vocabulary lies in parts on tensor-parallel ranks, a chunk of positions at a time.

The formulas are those of `forerun.mtp.losses`; a sum or a maximum over the vocabulary is one over the ranks too. Rows
by which a vocabulary was padded to divide evenly are no tokens: they get a logit of -inf. (Megatron-core's own
cross-entropy gives them probability.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forerun.mtp.losses import ChunkResult, LossSpec, fused_chunks


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


class _LogSoftmax(torch.autograd.Function):
    """Log-probabilities of this rank's part of the vocabulary, [n, v]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        log_p = logits - _log_normaliser(logits, group)
        ctx.save_for_backward(log_p)
        ctx.group = group
        return log_p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (log_p,) = ctx.saved_tensors
        total = _sum(grad.sum(dim=-1, keepdim=True), ctx.group)
        return grad - log_p.exp() * total, None


class _Sum(torch.autograd.Function):
    """The sum over ranks; its gradient is the same on each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """In place."""
    if group.size() > 1:
        dist.all_reduce(x, group=group)
    return x


def _log_normaliser(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """log sum exp over the whole vocabulary, [n, 1]."""
    largest = logits.max(dim=-1, keepdim=True).values
    if group.size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest + _sum((logits - largest).exp().sum(dim=-1, keepdim=True), group).log()


@dataclass(frozen=True)
class VocabularyShard:
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
            padding = torch.arange(logits.shape[-1], device=logits.device) >= tokens
            logits = logits.masked_fill(padding, float("-inf"))
        return logits

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids -> (their rows here, 0 where they are elsewhere; whether they are here)."""
        here = (tokens >= self.first) & (tokens < self.first + self.weight.shape[0])
        return torch.where(here, tokens - self.first, 0), here

    def pick(self, values: Tensor, tokens: Tensor) -> Tensor:
        """[n, v], one value for each token of the whole vocabulary -> those of `tokens` (long [n]), [n]."""
        rows, here = self.local(tokens)
        found = values.gather(-1, rows.unsqueeze(-1)).squeeze(-1)
        return _Sum.apply(torch.where(here, found, 0.0), self.group)

    @torch.no_grad()
    def argmax(self, logits: Tensor) -> Tensor:
        """The likeliest token, long [n]; the first of equals."""
        best, row = logits.max(dim=-1)
        token = row + self.first
        if self.group.size() == 1:
            return token
        largest = best.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        token = torch.where(best == largest, token, torch.iinfo(torch.long).max)
        dist.all_reduce(token, dist.ReduceOp.MIN, group=self.group)
        return token

    def log_probs(
        self, hidden_states: Tensor, targets: Tensor, chunk_size: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """`forerun.mtp.losses.chunked_log_probs`: (log-probabilities [N], entropies [N] without a gradient)."""

        def one(chunk: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
            log_p = _LogSoftmax.apply(self.logits(chunk) / temperature, self.group)
            with torch.no_grad():
                p = log_p.exp()
                entropy = _sum(-torch.where(p > 0, p * log_p, 0.0).sum(dim=-1), self.group)
            return self.pick(log_p, wanted), entropy

        if hidden_states.shape[0] == 0:
            empty = hidden_states.float().sum(dim=-1)
            return empty, empty.detach()
        parts = [
            checkpoint(one, h, t, use_reentrant=False) if torch.is_grad_enabled() else one(h, t)
            for h, t in zip(hidden_states.split(chunk_size), targets.split(chunk_size), strict=True)
        ]
        log_probs, entropies = zip(*parts, strict=True)
        return torch.cat(log_probs), torch.cat(entropies)

    def depth_loss(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        spec: LossSpec,
        chunk_size: int,
        teacher_hidden: Tensor | None,
        compare_with_trunk: bool,
        trained: Sequence[Tensor],
    ) -> ChunkResult:
        """`forerun.mtp.losses.fused_loss` of a depth.

        Args:
            hidden_states: [N, d] out of `enter`.
            labels: long [N].
            teacher_hidden: [N, d], the trunk's hiddens that predict the same tokens; for the soft losses and the
                comparison with the trunk.
            trained: the LM head's weight, where the loss trains it.
        """
        with_teacher = compare_with_trunk or spec.kind != "ce"
        label_hits = torch.zeros((), dtype=torch.long, device=labels.device)
        overlaps = torch.zeros((), dtype=torch.float64, device=labels.device)
        agrees = torch.zeros(labels.shape[0], dtype=torch.bool, device=labels.device)

        def chunk_loss(chunk: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
            nonlocal label_hits, overlaps
            teacher = trunk_best = None
            if with_teacher:
                assert teacher_hidden is not None
                with torch.no_grad():
                    trunk = self.logits(teacher_hidden[part])
                    trunk_best = self.argmax(trunk)
                    teacher = self._softmax(trunk, spec.temperature)[0]
            logits = self.logits(chunk)
            best = self.argmax(logits.detach())
            label_hits = label_hits + (best == labels[part]).sum()
            loss, gradient, overlap = self.loss_and_gradient(logits.detach(), labels[part], teacher, spec)
            if overlap is not None:
                agrees[part] = best == trunk_best
                overlaps = overlaps + overlap
            return logits, loss, gradient

        loss = fused_chunks(hidden_states, chunk_loss, chunk_size, trained)
        if not with_teacher:
            return ChunkResult(loss, label_hits)
        return ChunkResult(loss, label_hits, agrees.sum(), overlaps, agrees)

    def _softmax(self, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """(probabilities [n, v], logarithm of their denominator [n, 1])."""
        log_z = _log_normaliser(logits / temperature, self.group)
        return (logits / temperature - log_z).exp(), log_z

    @torch.no_grad()
    def loss_and_gradient(
        self, logits: Tensor, labels: Tensor, teacher: Tensor | None, spec: LossSpec
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`forerun.mtp.losses.loss_and_gradient`, with logits, gradient and teacher [n, v] of this rank's tokens.

        Loss and expected acceptance are those of the whole vocabulary.
        """
        q, log_z = self._softmax(logits, spec.temperature)
        overlap = None if teacher is None else _sum(torch.minimum(teacher, q).double().sum(), self.group)
        if spec.kind == "ce":
            if spec.temperature != 1.0:
                q, log_z = self._softmax(logits, 1.0)
            rows, here = self.local(labels)
            loss = (log_z.squeeze(-1) - self.pick(logits, labels)).sum()
            return loss, q.scatter_add(-1, rows.unsqueeze(-1), -here.unsqueeze(-1).to(q.dtype)), overlap
        assert teacher is not None and overlap is not None
        if spec.kind == "soft_ce":
            scaled = torch.where(teacher > 0, teacher * (logits / spec.temperature - log_z), 0.0)
            return -_sum(scaled.sum(), self.group), (q - teacher) / spec.temperature, overlap
        below = ((teacher - q).sign() + 1.0) / 2.0
        mean = _sum((below * q).sum(dim=-1, keepdim=True), self.group)
        return (len(labels) - overlap).to(q.dtype), q * (mean - below) / spec.temperature, overlap
