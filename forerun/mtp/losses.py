"""Losses over vocabulary logits that are never held for more than one chunk of positions.

A chunk's logits are made, turned into a loss and differentiated at once (Liger Kernel's way of fusing projection and
cross-entropy), so forward keeps only the gradient with respect to the hiddens [N, d] and, where they are trained, the
projection's parameters. The gradient with respect to the logits is written down rather than left to autograd, and
overwrites the probabilities: peak extra memory is three times chunk x vocabulary, twice where no teacher is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

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


class Vocabulary:
    """The tokens that the columns of logits stand for: here all of them.

    Where ranks hold them in parts (`forerun.engines.megatron.vocabulary`) all of this is over the ranks.
    """

    def sum(self, x: Tensor) -> Tensor:
        """What sums over the columns come to."""
        return x

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[n, V] -> (the largest logit, its token), both [n, 1]."""
        return logits.max(dim=-1, keepdim=True)

    def columns(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, long [n] -> (their columns, and 1 where the column is a token's own, else 0), both [n, 1]."""
        return tokens.unsqueeze(-1), torch.ones_like(tokens).unsqueeze(-1)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """[n, V] -> [n, V]."""
        return F.log_softmax(logits, dim=-1)


WHOLE = Vocabulary()


@torch.no_grad()
def _judge(
    logits: Tensor, labels: Tensor, teacher: Tensor | None, spec: LossSpec, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Sum of the positions' losses, its gradient, the likeliest tokens, and the expected acceptance.

    With q = softmax(z / T) of the logits z and p the teacher's distribution (its top k, renormalised):

        ce       -log softmax(z)[label]       gradient  softmax(z) - onehot(label)
        soft_ce  -sum_j p_j log q_j           gradient  (q - p) / T
        tv       1 - sum_j min(p_j, q_j)      gradient  q (sum_j w_j q_j - w) / T, w = 1 where q < p, 1/2 where equal

    Args:
        logits: [n, V] of the drafting depth.
        labels: long [n], the data tokens.
        teacher: [n, V], the trunk's probabilities for the same predicted token at spec.temperature. Overwritten. Needed
            unless kind is "ce", and then only the expected acceptance uses it.

    Returns:
        (loss, 0-dim; its gradient with respect to the logits [n, V]; the logits' likeliest tokens, long [n]; sum of the
        positions' sum_j min(p_j, q_j) over the whole vocabulary at spec.temperature, 0-dim, None without a teacher).
        float32 (float64 for float64 logits).
    """
    if teacher is None and spec.kind != "ce":
        raise ValueError(f"loss {spec.kind!r} needs the trunk's logits")
    top_k = None
    if teacher is not None and spec.kind != "ce" and spec.top_k is not None and spec.top_k < teacher.shape[-1]:
        top_k = teacher.topk(spec.top_k, dim=-1)
    logits = at_least_float32(logits)
    q, log_z, best = softmax(logits, spec.temperature, vocabulary)
    cross = distance = overlap = None
    if teacher is not None:
        if spec.kind == "soft_ce" and top_k is None:
            cross = vocabulary.sum(_row_dot(teacher, logits))
        teacher.sub_(q)  # p - q from here on
        distance = vocabulary.sum(torch.linalg.vector_norm(teacher, 1, dim=-1).sum()) / 2
        overlap = len(labels) - distance

    if spec.kind == "ce":
        if spec.temperature != 1.0:
            del q
            q, log_z, _ = softmax(logits, 1.0, vocabulary)
        column, own = vocabulary.columns(labels)
        loss = (log_z - vocabulary.sum(logits.gather(-1, column) * own)).sum()
        return loss, q.scatter_add_(-1, column, -own.to(q.dtype)), best, overlap

    assert teacher is not None and distance is not None
    if top_k is None:
        if cross is not None:
            loss = (log_z - cross / spec.temperature).sum()
            return loss, teacher.div_(-spec.temperature), best, overlap
        below = teacher.sign_().add_(1.0).div_(2.0)
        mean = vocabulary.sum(_row_dot(below, q))
        return distance, q.mul_(below.neg_().add_(mean)).div_(spec.temperature), best, overlap

    p, kept = top_k
    p /= p.sum(dim=-1, keepdim=True)
    if spec.kind == "soft_ce":
        loss = (log_z - _row_dot(p, logits.gather(-1, kept)) / spec.temperature).sum()
        return loss, q.scatter_add_(-1, kept, -p).div_(spec.temperature), best, overlap
    q_kept = q.gather(-1, kept)
    loss = len(labels) - torch.minimum(p, q_kept).sum()
    below_q = (p - q_kept).sign_().add_(1.0).div_(2.0).mul_(q_kept)
    q.mul_(below_q.sum(dim=-1, keepdim=True)).scatter_add_(-1, kept, -below_q)
    return loss, q.div_(spec.temperature), best, overlap


@torch.no_grad()
def softmax(logits: Tensor, temperature: float, vocabulary: Vocabulary = WHOLE) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(logits / temperature) [n, V], the logarithm of its denominator [n, 1], and the likeliest token [n].

    Makes no other tensor of the logits' size. float32 (float64 for float64 logits).
    """
    logits = at_least_float32(logits)
    largest, token = vocabulary.largest(logits)
    probabilities = torch.sub(logits, largest)
    if temperature != 1.0:
        probabilities.div_(temperature)
    total = vocabulary.sum(probabilities.exp_().sum(dim=-1, keepdim=True))
    return probabilities.div_(total), largest / temperature + total.log(), token.squeeze(-1)


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """[n, m], [n, m] -> [n, 1], without their product."""
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).squeeze(2)


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _LinearIntoSum(torch.autograd.Function):
    """x @ weight.T, whose backward adds the weight's gradient to a sum, in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, weight_sum: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight_sum = weight_sum
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.weight_sum.addmm_(grad.T, x)
        return grad @ weight, None, None


class _SumInPlace(TorchFunctionMode):
    """Within it, a linear layer adds the gradient of its weight to that weight's sum in place.

    Autograd would make a gradient of the LM head's size, [V, d], for every chunk, only to add it. Parameters used in
    any other way, and layers under autocast, are left to autograd.

    Args:
        sums: id of a weight -> its sum.
    """

    def __init__(self, sums: dict[int, Tensor]) -> None:
        super().__init__()
        self.sums = sums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and id(args[1]) in self.sums:
            x, weight, bias = (*args, None)[:3]
            if x.dim() == 2 and x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type):
                out = _LinearIntoSum.apply(x, weight.detach(), self.sums[id(weight)])
                return out if bias is None else out.add_(bias)
        return func(*args, **(kwargs or {}))


def _saved_as_they_are() -> AbstractContextManager[None]:
    """A chunk's graph is used up at once: an activation checkpoint or offloading around it has no business in it."""
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


@dataclass
class ChunkResult:
    """Sums over the positions, all 0-dim; `agrees` is per position."""

    loss: Tensor  # differentiable
    label_hits: Tensor
    trunk_hits: Tensor | None = None
    overlap: Tensor | None = None
    agrees: Tensor | None = None  # bool [N], top-1 equals the trunk's


# A chunk's hiddens and its place -> (logits, loss, the loss's gradient with respect to the logits).
ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor, Tensor]]


class _FusedLoss(torch.autograd.Function):
    """Sum of position losses over chunks, differentiated chunk by chunk in forward."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, chunk_loss: ChunkLoss, chunk_size: int, *params: Tensor) -> Tensor:
        needs_hidden = ctx.needs_input_grad[0]
        trained = [p for p, needed in zip(params, ctx.needs_input_grad[3:], strict=True) if needed]
        grad_hidden = torch.zeros_like(hidden_states) if needs_hidden else None
        grad_params = [torch.zeros_like(p) for p in trained]
        sum_in_place = _SumInPlace({id(p): summed for p, summed in zip(trained, grad_params, strict=True)})
        total = hidden_states.new_zeros((), dtype=at_least_float32(hidden_states[:0]).dtype)
        for start in range(0, hidden_states.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            if not needs_hidden and not trained:
                total += chunk_loss(hidden_states[part], part)[1]
                continue
            chunk = hidden_states[part].detach().requires_grad_()
            with torch.enable_grad(), _saved_as_they_are(), sum_in_place:
                logits, loss, gradient = chunk_loss(chunk, part)
            total += loss
            grads = torch.autograd.grad(logits, [chunk, *trained], gradient.to(logits.dtype), allow_unused=True)
            del logits, gradient  # before the next chunk's are made
            if grad_hidden is not None:
                grad_hidden[part] = grads[0]
            for summed, grad in zip(grad_params, grads[1:], strict=True):
                if grad is not None:  # None: already added in place
                    summed += grad
        ctx.save_for_backward(*([grad_hidden] if grad_hidden is not None else []), *grad_params)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        # As autograd's own donated buffers: where the graph is not kept, nobody will read them again.
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        grads: list[Tensor | None] = []
        for index, needed in enumerate(ctx.needs_input_grad):
            if index in (1, 2) or not needed:
                grads.append(None)
            else:
                grads.append(saved.pop(0) * grad if kept else saved.pop(0).mul_(grad))
        return tuple(grads)


def default_chunk_size(device_type: str) -> int:
    """Positions whose logits exist at once, where nobody says.

    On a CPU so few that their logits are no matter of memory. A GPU reads the LM head once for each chunk, which takes
    longer than to compute with it unless some hundred positions share that.
    """
    return 1024 if device_type == "cuda" else 64


def fused_loss(
    hidden_states: Tensor,
    labels: Tensor,
    project: Project,
    spec: LossSpec,
    *,
    chunk_size: int | None = None,
    teacher_hidden: Tensor | None = None,
    projection_parameters: Sequence[Tensor] = (),
    compare_with_trunk: bool = False,
    vocabulary: Vocabulary = WHOLE,
) -> ChunkResult:
    """Sum of the losses of N positions, with agreement counts, one chunk of logits at a time.

    Args:
        hidden_states: [N, d], the depth's hiddens at its valid positions.
        labels: long [N], tokens of the vocabulary.
        project: hiddens [n, d] -> logits [n, V].
        spec: the loss.
        chunk_size: positions whose logits exist at once; None: `default_chunk_size`.
        teacher_hidden: [N, d], the trunk's hiddens that predict the same tokens. Never receives a gradient.
        projection_parameters: tensors used inside `project` that the loss trains. Those left out get no gradient,
            which is how the LM head is isolated.
        compare_with_trunk: also count agreement with the trunk (one more projection for kind "ce").
        vocabulary: what the columns of `project`'s logits stand for. `spec.top_k` needs them whole.
    """
    with_teacher = teacher_hidden is not None and (compare_with_trunk or spec.kind != "ce")
    label_hits = hidden_states.new_zeros((), dtype=torch.long)
    overlaps = hidden_states.new_zeros((), dtype=torch.float64)
    agrees = torch.zeros(hidden_states.shape[0], dtype=torch.bool, device=hidden_states.device)

    def chunk_loss(chunk: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal label_hits, overlaps
        teacher = trunk_best = None
        if with_teacher:
            assert teacher_hidden is not None
            with torch.no_grad():  # first, so that its logits are gone before the others are made
                teacher, _, trunk_best = softmax(project(teacher_hidden[part]), spec.temperature, vocabulary)
        logits = project(chunk)
        loss, gradient, best, overlap = _judge(logits, labels[part], teacher, spec, vocabulary)
        label_hits = label_hits + (best == labels[part]).sum()
        if overlap is not None:
            agrees[part] = best == trunk_best
            overlaps = overlaps + overlap
        return logits, loss, gradient

    if not torch.is_grad_enabled():
        hidden_states, projection_parameters = hidden_states.detach(), [p.detach() for p in projection_parameters]
    size = chunk_size or default_chunk_size(hidden_states.device.type)
    loss = _FusedLoss.apply(hidden_states, chunk_loss, size, *projection_parameters)
    if not with_teacher:
        return ChunkResult(loss, label_hits)
    return ChunkResult(loss, label_hits, agrees.sum(), overlaps, agrees)
