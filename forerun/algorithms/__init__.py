"""Advantages, policy losses and their aggregation: pure functions on tensors, no model and no trainer in sight."""

from forerun.algorithms.advantages import grpo_advantages
from forerun.algorithms.aggregation import LossCounts, aggregate_loss, count_targets, sequence_lengths
from forerun.algorithms.importance import LogProbGap, truncated_importance_weights
from forerun.algorithms.policy_loss import PolicyLoss, PolicyStats, policy_loss

__all__ = [
    "LogProbGap",
    "LossCounts",
    "PolicyLoss",
    "PolicyStats",
    "aggregate_loss",
    "count_targets",
    "grpo_advantages",
    "policy_loss",
    "sequence_lengths",
    "truncated_importance_weights",
]
