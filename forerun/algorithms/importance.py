"""The gap between the rollout engine's log-probs and the trainer's: measured, and corrected by truncated weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forerun.algorithms.sequences import over_sequences

# exp of more than this is no weight any more.
LOG_RATIO_BOUND = 20.0
ImportanceLevel = Literal["token", "sequence"]


def importance_weights(
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    document_ids: Tensor,
    level: ImportanceLevel = "token",
    upper: float = 2.0,
    lower: float | None = None,
) -> Tensor:
    """pi_trainer / pi_rollout per token or per sequence, truncated: a constant factor for the policy loss.

    Corrects for tokens having been sampled by another implementation (or another version) of the policy than the one
    that the trainer differentiates. With `upper` alone min(ratio, upper), truncated importance sampling (Ionides 2008);
    with `lower` too, ratios outside [lower, upper] weigh 0 (IcePop). verl's `rollout_correction.rollout_is` and
    `rollout_is_threshold`.

    Args:
        trainer_log_probs: float [B, S], the old policy as the trainer computes it.
        rollout_log_probs: float, same shape, as the rollout engine reported them.
        mask: bool, same shape; other tokens get weight 0.
        document_ids: long, same shape; documents must be whole for level "sequence".
        level: "token": a token's own ratio (biased, little variance); "sequence": the product of its sequence's ratios
            (unbiased, more variance).
        upper: the largest weight.
        lower: the least weight that counts; None keeps all.

    Returns:
        [B, S], the log-probs' dtype, without a graph.

    Raises:
        ValueError: bounds that are not positive or not in order.
    """
    if upper <= 0 or (lower is not None and not 0 < lower <= upper):
        raise ValueError(f"importance weights are bounded by 0 < lower <= upper, not lower={lower}, upper={upper}")
    log_ratio = torch.where(mask, trainer_log_probs - rollout_log_probs, 0.0).detach()
    if level == "sequence":
        log_ratio = over_sequences(log_ratio, mask, document_ids, "sum")
    weights = torch.where(mask, log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(), 0.0)
    if lower is None:
        return weights.clamp(max=upper)
    return torch.where((weights >= lower) & (weights <= upper), weights, 0.0)


@dataclass
class LogProbGap:
    """How far the rollout's log-probs are from the trainer's: sums over tokens, and one maximum.

    Those of a batch's parts add up to the batch's (`abs_max`: the largest of them).
    """

    num_tokens: float = 0
    sum_abs: float = 0.0
    abs_max: float = 0.0
    sum_kl: float = 0.0

    @classmethod
    def measure(cls, trainer_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> LogProbGap:
        """Arguments: float, float, bool, all of one shape [...]."""
        difference = (trainer_log_probs - rollout_log_probs).detach().double()[mask]
        if not difference.numel():
            return cls()
        # k3 estimator of KL(rollout || trainer): the tokens were sampled by the rollout (Schulman 2020).
        kl = difference.exp() - 1 - difference
        return cls(difference.numel(), float(difference.abs().sum()), float(difference.abs().max()), float(kl.sum()))

    def compute(self) -> dict[str, float | None]:
        """Mean and largest absolute difference in nats, and the KL estimate; None where no token was measured."""
        if not self.num_tokens:
            return {"log_prob_gap_mean": None, "log_prob_gap_max": None, "rollout_kl": None}
        return {
            "log_prob_gap_mean": self.sum_abs / self.num_tokens,
            "log_prob_gap_max": self.abs_max,
            "rollout_kl": self.sum_kl / self.num_tokens,
        }
