"""The section `algorithm` of an RL run: the policy-gradient estimator, under verl's names (docs/algorithms.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from forerun.algorithms.advantages import AdvEstimator
from forerun.algorithms.aggregation import LossAggMode
from forerun.algorithms.importance import ImportanceLevel
from forerun.algorithms.kl import KLEstimator, KLLossType
from forerun.algorithms.rejection import Bounds, parse_criteria, parse_range
from forerun.config_check import bounded
from forerun.errors import UsageError


@dataclass
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups with nothing to learn from are dropped and further prompts drawn in their place.

    A step trains on `train_batch_size` groups; what was sampled beyond that is dropped too.
    """

    enable: bool = False
    # What must differ within a group: "reward" (the overlong penalty included, KL not), "acc" (the reward's own score),
    # or a numeric field of the dict that the reward function returns.
    metric: str = "reward"
    # Generation batches for one step; 0 sets no limit. With fewer groups by then the step trains on those.
    max_num_gen_batches: int = bounded(10, ge=0)


@dataclass
class KLControlConfig:
    """The coefficient of the KL penalty in the reward; fixed."""

    kl_coef: float = bounded(0.001, gt=0)


@dataclass
class RolloutCorrectionConfig:
    """The gap between the rollout's and the trainer's log-probs: weights, rejection, or neither (verl's names)."""

    rollout_is: ImportanceLevel | None = None
    # The largest weight; a range, "0.5_5.0", gives weights outside it 0 (quote it in YAML).
    rollout_is_threshold: str = "2.0"
    # Criteria separated by commas (`forerun.algorithms.rejection`), and one threshold for all or one for each.
    rollout_rs: str | None = None
    rollout_rs_threshold: str | None = None
    # Take the rollout's log-probs for the old policy's: the clipped ratio then covers the gap, and saves a forward.
    # null is true in asynchronous training on older weights' samples, if nothing above corrects for these; else false.
    bypass_mode: bool | None = None

    def validate(self, prefix: str) -> None:
        upper, _ = self.importance_bounds(prefix)
        if upper < 1:
            raise UsageError(
                f"{prefix}rollout_is_threshold={self.rollout_is_threshold} must be at least 1, or a range such as "
                "'0.5_5.0', in quotes: without them YAML reads 0.5_5 as 0.55"
            )
        if (self.rollout_rs is None) != (self.rollout_rs_threshold is None):
            raise UsageError(f"{prefix}rollout_rs and {prefix}rollout_rs_threshold go together: set both or neither")
        self.criteria(prefix)
        if self.bypass_mode and (self.rollout_is is not None or self.rollout_rs is not None):
            raise UsageError(
                f"{prefix}bypass_mode=true leaves rollout_is and rollout_rs nothing to correct: the old policy is the "
                "rollout's own; unset one or the other"
            )

    def importance_bounds(self, prefix: str = "") -> tuple[float, float | None]:
        """(upper, lower) of `importance_weights`."""
        try:
            lower, upper = parse_range(self.rollout_is_threshold)
        except ValueError as error:
            raise UsageError(f"{prefix}rollout_is_threshold: {error}") from None
        return upper, lower

    def criteria(self, prefix: str = "") -> dict[str, Bounds]:
        """The criteria of `rejection_mask`; none where nothing is rejected."""
        if self.rollout_rs is None or self.rollout_rs_threshold is None:
            return {}
        try:
            return parse_criteria(self.rollout_rs, self.rollout_rs_threshold)
        except ValueError as error:
            raise UsageError(f"{prefix}rollout_rs with {prefix}rollout_rs_threshold: {error}") from None


@dataclass
class AlgorithmConfig:
    """The policy-gradient estimator (docs/algorithms.md). Clip ratios of 0.2 and 0.2 are PPO's, 0.2 and 0.28 DAPO's."""

    adv_estimator: AdvEstimator = "grpo"
    # false is Dr. GRPO's, with loss_agg_mode=seq-mean-token-sum-norm.
    norm_adv_by_std_in_grpo: bool = True
    # gspo: one ratio for each sequence; it has no dual clip and leaves clip_ratio_c alone.
    loss_mode: Literal["vanilla", "gspo"] = "vanilla"
    clip_ratio_low: float = bounded(0.2, gt=0, lt=1)
    clip_ratio_high: float = bounded(0.2, gt=0)
    # Dual clip: no loss at a negative advantage is larger than -clip_ratio_c times it; null switches it off.
    clip_ratio_c: float | None = bounded(3.0, gt=1)
    loss_agg_mode: LossAggMode = "token-mean"
    # Of seq-mean-token-sum-norm; null takes rollout.max_response_length.
    loss_scale_factor: float | None = bounded(None, gt=0)
    # Responses that the length limit cut off teach nothing but the MTP block: they leave loss and counts. Their rewards
    # count in their groups' advantages.
    mask_truncated_completions: bool = False
    # The loss less this times the policy's entropy, aggregated likewise; below 0 it is a penalty.
    entropy_coeff: float = 0.0
    # KL against the policy that the run started from, which is kept beside the model (its memory once more): as a
    # penalty in the reward (kl_penalty, kl_ctrl), or as a term of the loss.
    use_kl_in_reward: bool = False
    kl_penalty: KLEstimator = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    use_kl_loss: bool = False
    kl_loss_coef: float = bounded(0.001, gt=0)
    kl_loss_type: KLLossType = "low_var_kl"
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def validate(self, prefix: str) -> None:
        if self.loss_scale_factor is not None and self.loss_agg_mode != "seq-mean-token-sum-norm":
            raise UsageError(
                f"{prefix}loss_scale_factor is of {prefix}loss_agg_mode=seq-mean-token-sum-norm, not of "
                f"{self.loss_agg_mode}: unset it, or change the mode"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the policy that the run started from must be kept."""
        return self.use_kl_in_reward or self.use_kl_loss
