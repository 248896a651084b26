"""Fused, chunked losses against the whole logits in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.mtp.log_probs import chunked_log_probs
from forerun.mtp.losses import LossSpec, fused_loss

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
@pytest.mark.parametrize("layer", [True, False], ids=["linear", "matmul"])
def test_loss_and_gradients(
    inputs: dict[str, Tensor], spec: LossSpec, chunk_size: int, soft_cap: float | None, layer: bool
) -> None:
    def run(fused: bool) -> tuple[Tensor, list[Tensor]]:
        hidden, weight, bias = (inputs[k].clone().requires_grad_() for k in ("hidden", "weight", "bias"))

        def project(h: Tensor) -> Tensor:
            logits = F.linear(h, weight, bias) if layer else h @ weight.T + bias
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


@pytest.mark.parametrize("trains_hidden", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_weight_used_twice_gets_both_gradients(
    inputs: dict[str, Tensor], trains_hidden: bool, autocast: bool
) -> None:
    """Once by a linear layer, whose gradient is added in place, and once by hand, whose gradient is autograd's."""

    def run(fused: bool) -> list[Tensor | None]:
        hidden, weight = inputs["hidden"].float(), inputs["weight"].float().requires_grad_()
        hidden.requires_grad_(trains_hidden)

        def project(h: Tensor) -> Tensor:
            return F.linear(h, weight) + 0.5 * (h @ weight.T).square()

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if fused:
                spec, parameters = LossSpec("ce"), (weight,)
                loss = fused_loss(
                    hidden, inputs["labels"], project, spec, chunk_size=4, projection_parameters=parameters
                ).loss
            else:
                loss = F.cross_entropy(project(hidden).float(), inputs["labels"], reduction="sum")
        loss.backward()
        return [weight.grad, hidden.grad]

    tolerance = {"rtol": 0.05, "atol": 0.5} if autocast else {"rtol": 1e-5, "atol": 1e-5}
    for grad, expected in zip(run(True), run(False), strict=True):
        assert (grad is None) == (expected is None)
        if grad is not None:
            torch.testing.assert_close(grad, expected, **tolerance)


def test_a_second_backward_over_a_kept_graph_gives_the_same(inputs: dict[str, Tensor]) -> None:
    """The first must not scale in place what the second reads; the last may."""
    hidden, weight = inputs["hidden"].clone().requires_grad_(), inputs["weight"].clone().requires_grad_()
    loss = fused_loss(
        hidden, inputs["labels"], lambda h: F.linear(h, weight), LossSpec("ce"), chunk_size=7,
        projection_parameters=(weight,),
    ).loss  # fmt: skip
    once = torch.autograd.grad(2.0 * loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(2.0 * loss, (hidden, weight))
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a, b)


def test_without_a_graph_nothing_is_differentiated(inputs: dict[str, Tensor]) -> None:
    hidden, weight = inputs["hidden"], inputs["weight"].clone().requires_grad_()
    seen = []

    def project(h: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return h @ weight.T

    arguments = hidden, inputs["labels"], project, LossSpec("ce")
    with torch.no_grad():
        loss = fused_loss(*arguments, chunk_size=7, projection_parameters=(weight,)).loss
    assert not any(seen) and not loss.requires_grad
    torch.testing.assert_close(
        loss, fused_loss(*arguments, chunk_size=7, projection_parameters=(weight,)).loss.detach()
    )


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
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("of", ["log_probs", "entropy", "both"])
def test_chunked_log_probs(inputs: dict[str, Tensor], of: str, temperature: float, chunk_size: int) -> None:
    grads = []
    for chunked in (True, False):
        hidden, weight = inputs["hidden"].clone().requires_grad_(), inputs["weight"].clone().requires_grad_()
        if chunked:
            log_probs, entropy = chunked_log_probs(
                hidden,
                inputs["labels"],
                lambda h, weight=weight: h @ weight.T,
                chunk_size,
                temperature,
            )
        else:
            p = (hidden @ weight.T / temperature).softmax(-1)
            log_probs, entropy = p.log()[range(N), inputs["labels"]], -(p * p.log()).sum(-1)
        terms = {"log_probs": (log_probs * torch.arange(N)).sum(), "entropy": (entropy * (5 - torch.arange(N))).sum()}
        (sum(terms.values()) if of == "both" else terms[of]).backward()
        grads.append((log_probs.detach(), entropy.detach(), hidden.grad, weight.grad))
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)
