"""Fused, chunked losses against the whole logits in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from forerun.mtp.losses import LossSpec, chunked_log_probs, fused_loss

N, D, V = 23, 8, 31


def naive(logits: Tensor, labels: Tensor, teacher: Tensor, spec: LossSpec) -> Tensor:
    """Position by position, from the definitions."""
    total = logits.new_zeros(())
    for row, label, teacher_row in zip(logits, labels, teacher, strict=True):
        if spec.kind == "ce":
            total = total - torch.log(row.exp() / row.exp().sum())[label]
            continue
        q = (row / spec.temperature).exp() / (row / spec.temperature).exp().sum()
        p = (teacher_row / spec.temperature).exp() / (teacher_row / spec.temperature).exp().sum()
        if spec.top_k is not None:
            kept = p.argsort(descending=True)[: spec.top_k]
            p, q = p[kept] / p[kept].sum(), q[kept]
        total = total + (-(p * q.log()).sum() if spec.kind == "soft_ce" else 1 - torch.minimum(p, q).sum())
    return total


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(N, D, generator=g, dtype=torch.float64),
        "teacher": torch.randn(N, D, generator=g, dtype=torch.float64),
        "weight": torch.randn(V, D, generator=g, dtype=torch.float64),
        "bias": torch.randn(V, generator=g, dtype=torch.float64),
        "labels": torch.randint(0, V, (N,), generator=g),
    }


SPECS = [
    LossSpec("ce"),
    LossSpec("soft_ce"),
    LossSpec("soft_ce", temperature=0.7, top_k=5),
    LossSpec("tv"),
    LossSpec("tv", temperature=1.3),
    LossSpec("tv", top_k=4),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 5, N, 100])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_loss_and_gradients(inputs: dict[str, Tensor], spec: LossSpec, chunk_size: int, soft_cap: float | None) -> None:
    def run(fused: bool) -> tuple[Tensor, list[Tensor]]:
        hidden, weight, bias = (inputs[k].clone().requires_grad_() for k in ("hidden", "weight", "bias"))

        def project(h: Tensor) -> Tensor:
            logits = h @ weight.T + bias
            return logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap

        if fused:
            loss = fused_loss(
                hidden,
                inputs["labels"],
                project,
                spec,
                chunk_size=chunk_size,
                teacher_hidden=inputs["teacher"],
                projection_parameters=(weight, bias),
            ).loss
        else:
            loss = naive(project(hidden), inputs["labels"], project(inputs["teacher"]).detach(), spec)
        (3.0 * loss).backward()
        return loss.detach(), [hidden.grad, weight.grad, bias.grad]

    loss, grads = run(fused=True)
    expected_loss, expected_grads = run(fused=False)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    for grad, expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)


def test_parameters_left_out_get_no_gradient(inputs: dict[str, Tensor]) -> None:
    head = nn.Linear(D, V).double()
    hidden = inputs["hidden"].clone().requires_grad_()
    fused_loss(hidden, inputs["labels"], head, LossSpec("ce"), chunk_size=7).loss.backward()
    assert head.weight.grad is None
    assert head.bias.grad is None
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0


def test_the_scale_of_the_loss_is_not_rounded_to_the_hiddens_dtype(inputs: dict[str, Tensor]) -> None:
    hidden = inputs["hidden"].bfloat16().requires_grad_()
    weight = inputs["weight"].bfloat16()
    loss = fused_loss(hidden, inputs["labels"], lambda h: h @ weight.T, LossSpec("ce"), chunk_size=7).loss
    (unscaled,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * 0.1 / 7, hidden)
    assert scaled.dtype == torch.bfloat16 and torch.equal(scaled, (unscaled.float() * (0.1 / 7)).bfloat16())


def test_counts_equal_the_definitions(inputs: dict[str, Tensor]) -> None:
    def project(h: Tensor) -> Tensor:
        return h @ inputs["weight"].T

    result = fused_loss(
        inputs["hidden"],
        inputs["labels"],
        project,
        LossSpec("ce", temperature=0.8),
        chunk_size=4,
        teacher_hidden=inputs["teacher"],
        compare_with_trunk=True,
    )
    own, teacher = project(inputs["hidden"]), project(inputs["teacher"])
    p, q = (teacher / 0.8).softmax(-1), (own / 0.8).softmax(-1)
    assert result.label_hits == (own.argmax(-1) == inputs["labels"]).sum()
    assert result.agrees is not None and result.agrees.equal(own.argmax(-1) == teacher.argmax(-1))
    assert result.trunk_hits == result.agrees.sum()
    torch.testing.assert_close(result.overlap, torch.minimum(p, q).sum())


def test_the_tv_loss_is_one_minus_expected_acceptance(inputs: dict[str, Tensor]) -> None:
    result = fused_loss(
        inputs["hidden"],
        inputs["labels"],
        lambda h: h @ inputs["weight"].T,
        LossSpec("tv"),
        chunk_size=9,
        teacher_hidden=inputs["teacher"],
    )
    assert result.overlap is not None
    torch.testing.assert_close(result.loss, N - result.overlap)


def test_no_positions_give_a_zero_that_can_be_differentiated(inputs: dict[str, Tensor]) -> None:
    hidden = inputs["hidden"][:0].clone().requires_grad_()
    result = fused_loss(hidden, inputs["labels"][:0], lambda h: h @ inputs["weight"].T, LossSpec("ce"), chunk_size=4)
    result.loss.backward()
    assert result.loss == 0
    assert hidden.grad is not None


def test_soft_loss_without_a_teacher_is_an_error(inputs: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="trunk's logits"):
        fused_loss(inputs["hidden"], inputs["labels"], lambda h: h, LossSpec("tv"), chunk_size=4)


@pytest.mark.parametrize("chunk_size", [3, 64])
def test_chunked_log_probs(inputs: dict[str, Tensor], chunk_size: int) -> None:
    grads = []
    for chunked in (True, False):
        hidden, weight = inputs["hidden"].clone().requires_grad_(), inputs["weight"].clone().requires_grad_()
        if chunked:
            log_probs, entropy = chunked_log_probs(
                hidden,
                inputs["labels"],
                lambda h, weight=weight: h @ weight.T,
                chunk_size,
                temperature=0.6,
            )
        else:
            p = (hidden @ weight.T / 0.6).softmax(-1)
            log_probs, entropy = p.log()[range(N), inputs["labels"]], -(p * p.log()).sum(-1)
        (log_probs * torch.arange(N)).sum().backward()
        grads.append((log_probs.detach(), entropy.detach(), hidden.grad, weight.grad))
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)
