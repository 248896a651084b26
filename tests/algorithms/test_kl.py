"""KL estimates against one token at a time, and against the divergence itself."""

import math
from typing import get_args

import pytest
import torch

from forerun.algorithms import kl_estimate
from forerun.algorithms.kl import KLLossType

SLOW = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: min(math.exp(-d) - 1 + d, 10.0),
}
NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
GRADIENT = {
    "k1": lambda d: 1.0,
    "abs": lambda d: math.copysign(1.0, d),
    "k2": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d) if math.exp(-d) - 1 + d < 10 else 0.0,
}


@pytest.mark.parametrize("kind", get_args(KLLossType))
def test_value_and_gradient_of_each_token(kind):
    policy, reference = (-3 * torch.rand(2, 5, 7, generator=torch.manual_seed(0), dtype=torch.float64)).unbind(0)
    reference[0, 0] -= 5  # d < -10 is where k3 is held
    policy[0, 1] -= 9
    mask = torch.rand(5, 7) < 0.7
    mask[0, :2] = True
    policy = torch.where(mask, policy, float("nan")).requires_grad_()
    out = kl_estimate(policy, reference, mask, kind)
    out.sum().backward()
    base = kind.rstrip("+")
    base = NAMES.get(base, base)
    for i in range(5):
        for j in range(7):
            d = float(policy[i, j] - reference[i, j]) if mask[i, j] else 0.0
            assert float(out[i, j]) == pytest.approx(SLOW[base](d), abs=1e-12)
            slope = GRADIENT["k2" if kind.endswith("+") else base](d) if mask[i, j] else 0.0
            assert float(policy.grad[i, j]) == pytest.approx(slope, abs=1e-12)


def test_expectations_are_the_divergence_and_the_k2_gradient_is_its_gradient():
    """Exact expectations over a distribution of four tokens."""
    logits = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.0, 0.2, 0.3], dtype=torch.float64).log_softmax(0)

    def divergence():
        log_p = logits.log_softmax(0)
        return (log_p.exp() * (log_p - reference)).sum()

    (exact_gradient,) = torch.autograd.grad(divergence(), logits)
    everywhere = torch.ones(4, dtype=torch.bool)
    for kind in ("k1", "k3", "k1+", "k3+"):
        log_p = logits.log_softmax(0)
        estimate = (log_p.exp().detach() * kl_estimate(log_p, reference, everywhere, kind)).sum()
        assert float(estimate) == pytest.approx(float(divergence()))
        (gradient,) = torch.autograd.grad(estimate, logits)
        assert torch.allclose(gradient, exact_gradient, rtol=1e-6) == kind.endswith("+"), kind


def test_an_unknown_kind():
    x = torch.zeros(1)
    with pytest.raises(ValueError, match="'full' is not one of kl, k1, abs"):
        kl_estimate(x, x, x.bool(), "full")
