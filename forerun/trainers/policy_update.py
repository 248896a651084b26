"""From scored responses to optimizer steps: micro-batches, log-probs of old and reference policy, KL, the objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.algorithms.kl import kl_estimate
from forerun.config import RLConfig
from forerun.data.batch import Batch
from forerun.engines.accumulation import predicted_mask
from forerun.engines.protocol import ReferencePolicy, TrainingEngine
from forerun.trainers.experience import Figures, Sample, sample_batches, set_advantages
from forerun.trainers.policy_objective import PolicyObjective


class PolicyUpdate:
    """The training half of an RL step.

    Args:
        config: the run's.
        engine: is trained.
        reference: for the KL terms; None where `algorithm` has none.
    """

    def __init__(self, config: RLConfig, engine: TrainingEngine, reference: ReferencePolicy | None) -> None:
        self.config = config
        self.engine = engine
        self.reference = reference

    def __call__(self, samples: Sequence[Sample]) -> Figures:
        """`ppo_epochs` passes over the samples, `ppo_mini_batch_size` prompts for each optimizer step.

        A KL penalty in the reward changes the samples' advantages. Returns the figures of the steps, merged.
        """
        config = self.config
        temperature = config.rollout.temperature
        groups = sorted({sample.group for sample in samples})
        size = config.ppo_mini_batch_size
        steps: list[list[Batch]] = []
        penalties: list[float] = []
        for start in range(0, len(groups), size):
            wanted = set(groups[start : start + size])
            part = [sample for sample in samples if sample.group in wanted]
            batches = sample_batches(part, config.micro_batch_size, temperature, config.max_row_length)
            batches = self._with_log_probs(batches, num_updates=-(-len(groups) // size) * config.ppo_epochs)
            if config.algorithm.use_kl_in_reward:
                batches, found = self._penalised(part, batches)
                penalties += found
            steps.append(batches)
        reports: list[Figures] = []
        for _ in range(config.ppo_epochs):
            for batches in steps:
                objective = PolicyObjective(batches, config.algorithm, config.rollout.max_response_length)
                metrics = self.engine.forward_backward(batches, objective, temperature, objective.entropy_loss_fn)
                reports.append({**objective.figures(metrics), **metrics, **self.engine.step()})
        figures = _merged(reports)
        if penalties:
            figures["reward_kl_penalty"] = sum(penalties) / len(penalties)
        return figures

    def _with_log_probs(self, batches: list[Batch], num_updates: int) -> list[Batch]:
        """The batches with those extras old_log_probs and ref_log_probs that this run needs."""
        algorithm = self.config.algorithm
        correction = algorithm.rollout_correction
        if correction.bypass_mode:
            batches = [_with_extra(b, "old_log_probs", b.extras["rollout_log_probs"]) for b in batches]
        # From the second update on the policy is no longer the one that sampled.
        elif num_updates > 1 or algorithm.use_kl_in_reward or correction.rollout_rs is not None:
            batches = self._with_log_probs_of(self.engine, batches, "old_log_probs")
        if algorithm.needs_reference:
            assert self.reference is not None
            batches = self._with_log_probs_of(self.reference, batches, "ref_log_probs")
        return batches

    def _with_log_probs_of(self, policy: ReferencePolicy, batches: list[Batch], name: str) -> list[Batch]:
        found = policy.log_probs(batches, self.config.rollout.temperature)
        return [
            _with_extra(batch, name, log_probs.to(batch.input_ids.device))
            for batch, (log_probs, _) in zip(batches, found, strict=True)
        ]

    def _penalised(self, samples: Sequence[Sample], batches: list[Batch]) -> tuple[list[Batch], list[float]]:
        """The batches with advantages of the rewards less kl_coef x KL, and each sample's mean KL per token.

        verl adds -kl_coef x KL to the reward of each token, and its group estimators sum a response's rewards.
        """
        algorithm = self.config.algorithm
        sums = torch.zeros(len(samples), dtype=torch.float64)
        for batch in batches:
            mask = predicted_mask(batch)
            kl = kl_estimate(batch.extras["old_log_probs"], batch.extras["ref_log_probs"], mask, algorithm.kl_penalty)
            sums.index_add_(0, batch.extras["sample"][mask].cpu(), kl[mask].double().cpu())
        set_advantages(samples, algorithm, (algorithm.kl_ctrl.kl_coef * sums).tolist())
        advantages = torch.tensor([sample.advantage for sample in samples])
        batches = [_with_extra(b, "advantages", advantages[b.extras["sample"]] * b.loss_mask) for b in batches]
        lengths = torch.tensor([len(sample.completion.token_ids) for sample in samples])
        return batches, (sums / lengths.clamp(min=1)).tolist()


def _with_extra(batch: Batch, name: str, values: Tensor) -> Batch:
    return replace(batch, extras={**batch.extras, name: values})


def _merged(reports: Sequence[Figures]) -> Figures:
    """Figures of several optimizer steps as one: means, except what is a count or a maximum."""
    merged: Figures = {}
    for name in dict.fromkeys(key for report in reports for key in report):
        values = [value for report in reports if (value := report.get(name)) is not None]
        if not values:
            merged[name] = None
        elif name.endswith("_max"):
            merged[name] = max(values)
        elif name in ("entropy_sum", "target_count", "skipped"):
            merged[name] = sum(values)
        else:
            merged[name] = sum(values) / len(values)
    entropy, targets = merged.pop("entropy_sum", None), merged.get("target_count")
    merged["entropy"] = entropy / targets if entropy is not None and targets else None
    return merged
