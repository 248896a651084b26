"""Advantages, policy losses and their aggregation: pure functions on tensors, no model and no trainer in sight.

docs/algorithms.md has the formulas with verl's names and the tests that judge them.
"""

from forerun.algorithms.advantages import advantages, grpo_advantages, rloo_advantages
from forerun.algorithms.aggregation import LossCounts, aggregate_loss, count_targets
from forerun.algorithms.filtering import informative_groups
from forerun.algorithms.importance import LogProbGap, importance_weights
from forerun.algorithms.kl import kl_estimate
from forerun.algorithms.policy_loss import PolicyLoss, PolicyStats, gspo_log_ratio, policy_loss
from forerun.algorithms.rejection import rejection_mask
from forerun.algorithms.sequences import sequence_lengths

__all__ = [
    "LogProbGap",
    "LossCounts",
    "PolicyLoss",
    "PolicyStats",
    "advantages",
    "aggregate_loss",
    "count_targets",
    "grpo_advantages",
    "gspo_log_ratio",
    "importance_weights",
    "informative_groups",
    "kl_estimate",
    "policy_loss",
    "rejection_mask",
    "rloo_advantages",
    "sequence_lengths",
]
