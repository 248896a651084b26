"""The gap between the rollout engine's log-probs and the trainer's: measured, and corrected by truncated weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def truncated_importance_weights(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, cap: float = 2.0
) -> Tensor:
    """min(pi_trainer / pi_rollout, cap) per token, a constant factor for the policy loss.

    Corrects for tokens having been sampled by another implementation (or another version) of the policy than the one
    that the trainer differentiates (truncated importance sampling; Ionides 2008; in verl `rollout_is=token`).

    Args:
        trainer_log_probs: float [...], the old policy as the trainer computes it.
        rollout_log_probs: float, same shape, as the rollout engine reported them.
        mask: bool, same shape; other tokens get weight 0.
        cap: the largest weight.

    Returns:
        float [...], without a graph.

    Raises:
        ValueError: cap is not positive.
    """
    if cap <= 0:
        raise ValueError(f"cap={cap} must be positive")
    difference = (trainer_log_probs - rollout_log_probs).detach().float()
    weights = difference.clamp(-20.0, 20.0).exp().clamp(max=cap)
    return torch.where(mask, weights, 0.0)


@dataclass
class LogProbGap:
    """How far the rollout's log-probs are from the trainer's; sums, so that parts of a batch can be merged."""

    num_tokens: int = 0
    sum_abs: float = 0.0
    max_abs: float = 0.0
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

    def __add__(self, other: LogProbGap) -> LogProbGap:
        return LogProbGap(
            self.num_tokens + other.num_tokens,
            self.sum_abs + other.sum_abs,
            max(self.max_abs, other.max_abs),
            self.sum_kl + other.sum_kl,
        )

    def compute(self) -> dict[str, float | None]:
        """Mean and largest absolute difference in nats, and the KL estimate; None where no token was measured."""
        if not self.num_tokens:
            return {"log_prob_gap_mean": None, "log_prob_gap_max": None, "rollout_kl": None}
        return {
            "log_prob_gap_mean": self.sum_abs / self.num_tokens,
            "log_prob_gap_max": self.max_abs,
            "rollout_kl": self.sum_kl / self.num_tokens,
        }
