"""The policy-gradient loss as a training engine's loss function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from forerun.algorithms.aggregation import LossCounts, aggregate_loss, count_targets, sequence_lengths
from forerun.algorithms.importance import LogProbGap, truncated_importance_weights
from forerun.algorithms.policy_loss import PolicyStats, policy_loss
from forerun.config import AlgorithmConfig
from forerun.data.batch import Batch
from forerun.engines.protocol import predicted_mask


class PolicyObjective:
    """The clipped surrogate of one optimizer step, normalised over all its micro-batches.

    Args:
        batches: every micro-batch of the step; extras advantages and rollout_log_probs, and old_log_probs unless the
            step is the first on its samples (then the old policy is the current one).
        algorithm: clipping, aggregation, and the cap of truncated importance weights.
        max_response_length: the constant of seq-mean-token-sum-norm.

    Attributes:
        stats, gap: sums over the micro-batches seen.
    """

    def __init__(self, batches: Sequence[Batch], algorithm: AlgorithmConfig, max_response_length: int) -> None:
        self.algorithm = algorithm
        self.max_response_length = max_response_length
        self.counts = LossCounts()
        for batch in batches:
            self.counts += count_targets(predicted_mask(batch), batch.document_ids)
        self.stats = PolicyStats()
        self.gap = LogProbGap()

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        mask = predicted_mask(batch)
        old = batch.extras.get("old_log_probs", log_probs.detach())
        rollout = batch.extras["rollout_log_probs"]
        weights = None
        if (cap := self.algorithm.tis_imp_ratio_cap) is not None:
            weights = truncated_importance_weights(old, rollout, mask, cap)
        result = policy_loss(
            log_probs,
            old,
            batch.extras["advantages"],
            mask,
            self.algorithm.clip_ratio_low,
            self.algorithm.clip_ratio_high,
            importance_weights=weights,
        )
        self.stats += result.stats
        self.gap += LogProbGap.measure(old, rollout, mask)
        loss = aggregate_loss(
            result.losses,
            mask,
            self.algorithm.loss_agg_mode,
            self.counts,
            sequence_lengths(mask, batch.document_ids),
            self.max_response_length,
        )
        return loss, {}

    def figures(self) -> dict[str, float | None]:
        """pg_clipfrac, ppo_kl, ..., log_prob_gap_mean, log_prob_gap_max, rollout_kl."""
        return {**self.stats.compute(), **self.gap.compute()}
