"""Losses over vocabulary logits that are never held for more than one chunk of positions.

A chunk's logits are made, turned into a loss and differentiated at once (Liger Kernel's way of fusing projection and
cross-entropy), so forward keeps only the gradient with respect to the hiddens [N, d] and, where they are trained, the
projection's parameters. Peak extra memory is one chunk x vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forerun.mtp.config import LossKind

Project = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossSpec:
    """What a depth is trained on.

    Attributes:
        kind: "ce" against the data token; "soft_ce" cross-entropy to the trunk's distribution; "tv" total variation to
            it, 1 - sum(min(p, q)), which is 1 - the expected acceptance under full rejection sampling.
        temperature: of both distributions, for the two soft kinds and for the expected acceptance.
        top_k: keep the trunk's k likeliest tokens, renormalised, in soft_ce and tv. None keeps all.
    """

    kind: LossKind = "ce"
    temperature: float = 1.0
    top_k: int | None = None


def position_losses(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None, spec: LossSpec) -> Tensor:
    """Loss of each position, float32 (float64 for float64 logits) [N].

    Args:
        logits: [N, V] of the drafting depth.
        labels: long [N], the data tokens.
        teacher_logits: [N, V] of the trunk for the same predicted token; needed unless kind is "ce".
    """
    logits = _at_least_float32(logits)
    if spec.kind == "ce":
        return F.cross_entropy(logits, labels, reduction="none")
    if teacher_logits is None:
        raise ValueError(f"loss {spec.kind!r} needs the trunk's logits")
    teacher = _at_least_float32(teacher_logits).detach() / spec.temperature
    log_q = F.log_softmax(logits / spec.temperature, dim=-1)
    if spec.top_k is not None and spec.top_k < teacher.shape[-1]:
        teacher, kept = teacher.topk(spec.top_k, dim=-1)
        log_q = log_q.gather(-1, kept)
    p = teacher.softmax(dim=-1)
    if spec.kind == "soft_ce":
        return -(p * log_q).sum(dim=-1)
    return 1.0 - torch.minimum(p, log_q.exp()).sum(dim=-1)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@dataclass
class ChunkResult:
    """Sums over the positions, all 0-dim; `agrees` is per position."""

    loss: Tensor  # differentiable
    label_hits: Tensor
    trunk_hits: Tensor | None = None
    overlap: Tensor | None = None
    agrees: Tensor | None = None  # bool [N], top-1 equals the trunk's


def _as_it_is(x: Tensor) -> Tensor:
    return x


class _FusedLoss(torch.autograd.Function):
    """Sum of position losses over chunks, differentiated chunk by chunk in forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden_states: Tensor, chunk_loss: Callable[[Tensor, slice], Tensor], chunk_size: int, *params: Tensor
    ) -> Tensor:
        needs_hidden = ctx.needs_input_grad[0]
        trained = [p for p, needed in zip(params, ctx.needs_input_grad[3:], strict=True) if needed]
        grad_hidden = torch.zeros_like(hidden_states) if needs_hidden else None
        grad_params = [torch.zeros_like(p) for p in trained]
        total = hidden_states.new_zeros((), dtype=_at_least_float32(hidden_states[:0]).dtype)
        for start in range(0, hidden_states.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            if not needs_hidden and not trained:
                total += chunk_loss(hidden_states[part], part)
                continue
            # The chunk's graph lives and dies here: whoever watches what is saved for backward (torch.utils.checkpoint,
            # save_on_cpu) must not see it.
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
                chunk = hidden_states[part].detach().requires_grad_(needs_hidden)
                loss = chunk_loss(chunk, part)
                wanted = ([chunk] if needs_hidden else []) + trained
                grads = list(torch.autograd.grad(loss, wanted))
            total += loss.detach()
            if grad_hidden is not None:
                grad_hidden[part] = grads.pop(0)
            for accumulated, grad in zip(grad_params, grads, strict=True):
                accumulated += grad
        ctx.save_for_backward(*([grad_hidden] if grad_hidden is not None else []), *grad_params)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        grads: list[Tensor | None] = []
        for index, needed in enumerate(ctx.needs_input_grad):
            grads.append(None if index in (1, 2) or not needed else saved.pop(0) * grad)
        return tuple(grads)


def fused_loss(
    hidden_states: Tensor,
    labels: Tensor,
    project: Project,
    spec: LossSpec,
    *,
    chunk_size: int,
    teacher_hidden: Tensor | None = None,
    projection_parameters: Sequence[Tensor] = (),
    compare_with_trunk: bool = False,
) -> ChunkResult:
    """Sum of the losses of N positions, with agreement counts, one chunk of logits at a time.

    Args:
        hidden_states: [N, d], the depth's hiddens at its valid positions.
        labels: long [N], indices into the projection's vocabulary.
        project: hiddens [n, d] -> logits [n, V].
        spec: the loss.
        chunk_size: positions whose logits exist at once.
        teacher_hidden: [N, d], the trunk's hiddens that predict the same tokens. Never receives a gradient.
        projection_parameters: tensors used inside `project` that the loss trains. Those left out get no gradient,
            which is how the LM head is isolated.
        compare_with_trunk: also count agreement with the trunk (one more projection for kind "ce").
    """
    with_teacher = teacher_hidden is not None and (compare_with_trunk or spec.kind != "ce")
    label_hits = hidden_states.new_zeros((), dtype=torch.long)
    overlap = hidden_states.new_zeros((), dtype=torch.float64)
    agrees = torch.zeros(hidden_states.shape[0], dtype=torch.bool, device=hidden_states.device)

    def chunk_loss(chunk: Tensor, part: slice) -> Tensor:
        nonlocal label_hits, overlap
        logits = project(chunk)
        teacher_logits = None
        with torch.no_grad():
            best = logits.argmax(dim=-1)
            label_hits = label_hits + (best == labels[part]).sum()
            if with_teacher:
                assert teacher_hidden is not None
                teacher_logits = project(teacher_hidden[part])
                agrees[part] = best == teacher_logits.argmax(dim=-1)
                p = (_at_least_float32(teacher_logits) / spec.temperature).softmax(dim=-1)
                q = (_at_least_float32(logits) / spec.temperature).softmax(dim=-1)
                overlap = overlap + torch.minimum(p, q).sum()
        return position_losses(logits, labels[part], teacher_logits, spec).sum()

    loss = _FusedLoss.apply(hidden_states, chunk_loss, chunk_size, *projection_parameters)
    if not with_teacher:
        return ChunkResult(loss, label_hits)
    return ChunkResult(loss, label_hits, agrees.sum(), overlap, agrees)


def chunked_log_probs(
    hidden_states: Tensor, targets: Tensor, project: Project, chunk_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the entropy of its distribution, one chunk of logits at a time.

    Logits are made again in backward, so none are kept.

    Args:
        hidden_states: [N, d].
        targets: long [N].
        project: hiddens [n, d] -> logits [n, V].
        temperature: divides the logits.

    Returns:
        (log_probs [N], differentiable; entropy [N] in nats, without a gradient), float32 (float64 for float64 hiddens).
    """

    def one(chunk: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        log_p = F.log_softmax(_at_least_float32(project(chunk)) / temperature, dim=-1)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(dim=-1)
        return log_p.gather(-1, wanted.unsqueeze(-1)).squeeze(-1), entropy

    if hidden_states.shape[0] == 0:
        empty = _at_least_float32(hidden_states).sum(dim=-1)
        return empty, empty.detach()
    differentiable = torch.is_grad_enabled()
    parts = [
        checkpoint(one, h, t, use_reentrant=False) if differentiable else one(h, t)
        for h, t in zip(hidden_states.split(chunk_size), targets.split(chunk_size), strict=True)
    ]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)
