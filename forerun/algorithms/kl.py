"""Estimates of the KL divergence from a reference policy, token by token, under verl's names."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

KLEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
# "+" gives an estimate the gradient of k2, which is that of the KL divergence in expectation; k1's and k3's are not.
KLLossType = Literal[KLEstimator, "kl+", "k1+", "abs+", "low_var_kl+", "k3+"]


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: KLLossType) -> Tensor:
    """KL(policy || reference) at each token that the policy sampled (Schulman 2020, joschu.net/blog/kl-approx.html).

    With d = log_prob - ref_log_prob:

        kl, k1           d                        unbiased, any sign
        abs              |d|
        mse, k2          d^2 / 2
        low_var_kl, k3   exp(-d) - 1 + d          unbiased, not negative; held at 10 (GRPO, arXiv 2402.03300, eq. 4)
        ...+             the value of that one, the gradient of k2

    Args:
        log_probs: float [...], of the sampled tokens under the policy; may have a graph.
        ref_log_probs: float, same shape, under the reference.
        mask: bool, same shape; the estimate is 0 elsewhere, whatever stands there.
        kind: which estimate.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in get_args(KLLossType):
        raise ValueError(f"KL estimate {kind!r} is not one of {', '.join(get_args(KLLossType))}")
    difference = torch.where(mask, log_probs - ref_log_probs, 0.0)
    if kind.endswith("+"):
        surrogate = 0.5 * difference.square()
        return surrogate - surrogate.detach() + _value(difference.detach(), kind[:-1])
    return _value(difference, kind)


def _value(difference: Tensor, kind: str) -> Tensor:
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("mse", "k2"):
        return 0.5 * difference.square()
    bounded = difference.clamp(-20.0, 20.0)
    return ((-bounded).exp() - 1 + bounded).clamp(max=10.0)
