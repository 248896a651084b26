"""The graft against adding the loss by hand, under everything a trainer does to its loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forerun.mtp.graft import graft


def gradients(build, scale_loss: float = 1.0) -> list[Tensor]:
    """Gradients of a two-layer net whose hidden carries an auxiliary loss."""
    torch.manual_seed(0)
    first, second, aux = (nn.Linear(6, 6).double() for _ in range(3))
    x = torch.randn(4, 6, dtype=torch.float64)
    build(first, second, aux, x, scale_loss)
    return [p.grad for module in (first, second, aux) for p in module.parameters()]


def by_hand(first, second, aux, x, scale) -> None:
    hidden = first(x)
    ((second(hidden).pow(2).sum() + 0.3 * aux(hidden).pow(2).mean()) * scale).backward()


def grafted(first, second, aux, x, scale) -> None:
    hidden = first(x)
    hidden = graft(hidden, 0.3 * aux(hidden).pow(2).mean(), scale)
    (second(hidden).pow(2).sum() * scale).backward()


def grafted_lazily(first, second, aux, x, scale) -> None:
    settings = {"scale": 1e9}
    hidden = first(x)
    hidden = graft(hidden, 0.3 * aux(hidden).pow(2).mean(), lambda: torch.tensor(settings["scale"]))
    settings["scale"] = scale
    (second(hidden).pow(2).sum() * scale).backward()


def grafted_under_recompute(first, second, aux, x, scale, reentrant=False) -> None:
    x = x.requires_grad_()  # a reentrant checkpoint cuts the graph where no input has a gradient
    hidden = checkpoint(first, x, use_reentrant=reentrant)
    loss = checkpoint(lambda h: 0.3 * aux(h).pow(2).mean(), hidden, use_reentrant=reentrant)
    (checkpoint(second, graft(hidden, loss, scale), use_reentrant=reentrant).pow(2).sum() * scale).backward()


def grafted_under_reentrant_recompute(first, second, aux, x, scale) -> None:
    grafted_under_recompute(first, second, aux, x, scale, reentrant=True)


def grafted_inside_recompute(first, second, aux, x, scale, reentrant=False) -> None:
    """The graft itself is made again in backward."""

    def both(x: Tensor) -> Tensor:
        hidden = first(x)
        return second(graft(hidden, 0.3 * aux(hidden).pow(2).mean(), scale))

    (checkpoint(both, x.requires_grad_(), use_reentrant=reentrant).pow(2).sum() * scale).backward()


def grafted_inside_reentrant_recompute(first, second, aux, x, scale) -> None:
    grafted_inside_recompute(first, second, aux, x, scale, reentrant=True)


def grafted_in_micro_batches(first, second, aux, x, scale) -> None:
    """Rows one by one; each hands on its share of the mean."""
    for row in x.split(1):
        hidden = first(row)
        hidden = graft(hidden, 0.3 * aux(hidden).pow(2).mean() / len(x), scale)
        (second(hidden).pow(2).sum() * scale).backward()


@pytest.mark.parametrize(
    "build",
    [
        grafted,
        grafted_lazily,
        grafted_under_recompute,
        grafted_under_reentrant_recompute,
        grafted_inside_recompute,
        grafted_inside_reentrant_recompute,
        grafted_in_micro_batches,
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.25, 1024.0])
def test_gradients_equal_adding_the_loss(build, scale: float) -> None:
    for ours, reference in zip(gradients(build, scale), gradients(by_hand, scale), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_two_grafts_in_one_graph_keep_their_own_scales() -> None:
    a, b = (torch.ones((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    graft(graft(x, a * 1, 2.0), b * 1, 5.0).sum().backward()
    assert (a.grad, b.grad) == (2.0, 5.0)
    assert x.grad is not None and x.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_carrier_without_a_graph_still_trains_the_loss() -> None:
    weight = torch.ones((), requires_grad=True)
    head = nn.Linear(3, 1)
    head(graft(torch.ones(1, 3), weight * 2)).sum().backward()
    assert weight.grad == 2.0


def test_grad_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    weight = torch.ones((), requires_grad=True)
    x = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight, x], lr=1.0)
    scaler.scale(graft(x, weight * 3, scaler.get_scale).sum()).backward()
    scaler.unscale_(optimizer)
    assert weight.grad == 3.0
    assert x.grad is not None and x.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("build", [grafted, grafted_under_recompute])
def test_autocast_gives_the_bits_of_adding_the_loss(build) -> None:
    """A bfloat16 carrier with a float32 loss: `mean` of a bfloat16 tensor's square is one under autocast."""
    found = []
    for how in (by_hand, build):
        torch.manual_seed(0)
        modules = [nn.Linear(6, 6) for _ in range(3)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            how(*modules, torch.randn(4, 6), 0.3)
        found.append([p.grad for module in modules for p in module.parameters()])
    for reference, ours in zip(*found, strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, reference)


def test_the_scale_keeps_the_precision_of_the_loss() -> None:
    weight = torch.ones((), requires_grad=True)
    graft(torch.ones(2, dtype=torch.bfloat16, requires_grad=True), weight * 1, 0.3).sum().backward()
    assert torch.equal(weight.grad, torch.tensor(0.3))


def test_the_value_is_unchanged_and_a_vector_loss_is_refused() -> None:
    x = torch.randn(2, 3)
    assert graft(x, torch.zeros((), requires_grad=True)).equal(x)
    with pytest.raises(ValueError, match="scalar"):
        graft(x, torch.zeros(2, requires_grad=True))
