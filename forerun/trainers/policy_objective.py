"""The policy-gradient loss as a training engine's loss function."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from torch import Tensor

from forerun.algorithms.aggregation import LossCounts, aggregate_loss, count_targets
from forerun.algorithms.importance import LogProbGap, importance_weights
from forerun.algorithms.kl import kl_estimate
from forerun.algorithms.policy_loss import PolicyStats, gspo_log_ratio, policy_loss
from forerun.algorithms.rejection import rejection_mask
from forerun.algorithms.sequences import sequence_lengths
from forerun.config_algorithm import AlgorithmConfig
from forerun.data.batch import Batch
from forerun.engines.accumulation import LossFn, predicted_mask

# Sums that go through the engine's metrics, which add up over micro-batches and ranks.
_POLICY = "policy_stats/"
_GAP = "log_prob_gap/"


class PolicyObjective:
    """The clipped surrogate of one optimizer step, its KL term and its entropy, normalised over all its micro-batches.

    Args:
        batches: every micro-batch of the step; extras advantages and rollout_log_probs; old_log_probs unless the step
            is the first on its samples (then the old policy is the current one), and always where samples are
            rejected; ref_log_probs for a KL loss; truncated where such responses are masked.
        algorithm: see docs/algorithms.md.
        max_response_length: the constant of seq-mean-token-sum-norm where `loss_scale_factor` is not set.
    """

    def __init__(self, batches: Sequence[Batch], algorithm: AlgorithmConfig, max_response_length: int) -> None:
        self.algorithm = algorithm
        self.loss_scale_factor = algorithm.loss_scale_factor or max_response_length
        self.criteria = algorithm.rollout_correction.criteria()
        self.counts = LossCounts()
        self.wanted_tokens = 0
        for batch in batches:
            # Rejected tokens are gone from the denominators too.
            self.counts += count_targets(self._mask(batch), batch.document_ids)
            self.wanted_tokens += int(self._wanted(batch).sum())

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """A `LossFn`. Its metrics are for `figures`."""
        algorithm, mask, ids = self.algorithm, self._mask(batch), batch.document_ids
        old = batch.extras.get("old_log_probs", log_probs.detach())
        sequence_ratio = algorithm.loss_mode == "gspo"
        result = policy_loss(
            log_probs,
            old,
            batch.extras["advantages"],
            mask,
            algorithm.clip_ratio_low,
            algorithm.clip_ratio_high,
            None if sequence_ratio else algorithm.clip_ratio_c,
            importance_weights=self._weights(old, mask, batch),
            log_ratio=gspo_log_ratio(log_probs, old, mask, ids) if sequence_ratio else None,
        )
        trainers = log_probs if algorithm.rollout_correction.bypass_mode else old
        gap = LogProbGap.measure(trainers, batch.extras["rollout_log_probs"], predicted_mask(batch))
        sums = _tagged(_POLICY, result.stats) | _tagged(_GAP, gap)
        loss = self._aggregate(result.losses, mask, ids)
        if algorithm.use_kl_loss or algorithm.entropy_coeff:
            sums["pg_loss"] = loss.detach()
        if not algorithm.use_kl_loss:
            return loss, sums
        kl = self._aggregate(
            kl_estimate(log_probs, batch.extras["ref_log_probs"], mask, algorithm.kl_loss_type), mask, ids
        )
        return loss + algorithm.kl_loss_coef * kl, {**sums, "kl_loss": kl.detach()}

    @property
    def entropy_loss_fn(self) -> LossFn | None:
        """The term of the entropies, for the engine's `forward_backward`; None where it has no weight."""
        return self._entropy_loss if self.algorithm.entropy_coeff else None

    def _entropy_loss(self, entropies: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        entropy = self._aggregate(entropies, self._mask(batch), batch.document_ids)
        return -self.algorithm.entropy_coeff * entropy, {"entropy_loss": entropy.detach()}

    def figures(self, metrics: MutableMapping[str, float]) -> dict[str, float | None]:
        """pg_clipfrac, ppo_kl, ..., log_prob_gap_mean, log_prob_gap_max, rollout_kl; rollout_rs_masked_fraction.

        The sums that they come from are taken out of the step's `metrics`.
        """
        figures = PolicyStats(**_taken(_POLICY, metrics)).compute() | LogProbGap(**_taken(_GAP, metrics)).compute()
        if self.criteria:
            kept = self.counts.tokens / self.wanted_tokens if self.wanted_tokens else 1.0
            figures["rollout_rs_masked_fraction"] = 1 - kept
        return figures

    def _mask(self, batch: Batch) -> Tensor:
        """bool [B, S]: the tokens that are learned from."""
        mask = self._wanted(batch)
        if not self.criteria:
            return mask
        old, rollout = batch.extras["old_log_probs"], batch.extras["rollout_log_probs"]
        return rejection_mask(old, rollout, mask, batch.document_ids, self.criteria)

    def _wanted(self, batch: Batch) -> Tensor:
        """bool [B, S]: the tokens that are learned from unless they are rejected."""
        mask = predicted_mask(batch)
        return mask & (batch.extras["truncated"] == 0) if self.algorithm.mask_truncated_completions else mask

    def _weights(self, old: Tensor, mask: Tensor, batch: Batch) -> Tensor | None:
        correction = self.algorithm.rollout_correction
        if correction.rollout_is is None:
            return None
        upper, lower = correction.importance_bounds()
        # Of the whole sequence, rejected tokens included: they were sampled.
        return importance_weights(
            old,
            batch.extras["rollout_log_probs"],
            predicted_mask(batch),
            batch.document_ids,
            correction.rollout_is,
            upper,
            lower,
        )

    def _aggregate(self, losses: Tensor, mask: Tensor, document_ids: Tensor) -> Tensor:
        return aggregate_loss(
            losses,
            mask,
            self.algorithm.loss_agg_mode,
            self.counts,
            sequence_lengths(mask, document_ids),
            self.loss_scale_factor,
        )


def _tagged(tag: str, sums: PolicyStats | LogProbGap) -> dict[str, Tensor | float]:
    return {tag + name: value for name, value in vars(sums).items()}


def _taken(tag: str, metrics: MutableMapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(tag): metrics.pop(name) for name in list(metrics) if name.startswith(tag)}
