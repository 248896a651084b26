"""Reinforcement learning on verifiable rewards, synchronous: rollout and training take turns.

`RLTrainer(config).train()` is the whole run of `forerun rl`; `step(prompts)` is one turn of the loop, with whatever
engines and reward the caller brings. The trainer knows neither engine beyond its protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from forerun.config import RLConfig
from forerun.data.prompts import Prompt
from forerun.engines.protocol import ReferencePolicy, TrainingEngine
from forerun.errors import ForerunError, UsageError
from forerun.rollout.protocol import Completion, RolloutEngine
from forerun.rollout.sync import digest
from forerun.trainers.experience import Sample, informative_samples, rollout_figures, set_advantages, shape_rewards
from forerun.trainers.judging import Scorer
from forerun.trainers.rl_run import Metrics, RLRun, timed
from forerun.trainers.rollout_engines import make_rollout_engine

logger = logging.getLogger(__name__)


class RLTrainer(RLRun):
    """One synchronous RL run; see `RLRun` for what is not said here.

    Args:
        rollout: rollout engine in place of the one that `rollout.engine` names. Its weights are replaced by the
            training engine's before the first rollout and after every update.
    """

    def __init__(
        self,
        config: RLConfig,
        *,
        prompts: Sequence[Prompt] | None = None,
        eval_prompts: Sequence[Prompt] | None = None,
        engine: TrainingEngine | None = None,
        rollout: RolloutEngine | None = None,
        reward: Scorer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reference: ReferencePolicy | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if config.async_training.enable:
            raise UsageError("async_training.enable=true: set it to false, or use AsyncRLTrainer")
        super().__init__(
            config,
            prompts=prompts,
            eval_prompts=eval_prompts,
            engine=engine,
            reward=reward,
            tokenizer=tokenizer,
            reference=reference,
            mesh=mesh,
        )
        if rollout is None:
            rollout = make_rollout_engine(config, self.engine, self.tokenizer, self.ranks)
            self._owned.callback(rollout.close)
        self.rollout = rollout
        self._in_sync = False

    def turn(self, pause: bool) -> Metrics:
        """See `RLRun.turn`; every step ends so."""
        return self.step(self._draw())

    def step(self, prompts: Sequence[Prompt]) -> Metrics:
        """One turn: roll out, judge, train, sync. Returns the step's metrics, None for what cannot be known here."""
        self.ensure_sync()
        times: dict[str, float] = {}
        with timed(times, "time/step"):
            sampled, sampling = self._experience(prompts, times)
            set_advantages(self.samples, self.config.algorithm)
            with timed(times, "time/train"):
                trained = self.update(self.samples)
            self.rl_step += 1  # before the sync, which names the new weights after it
            with timed(times, "time/sync"):
                in_sync = self.sync()
        metrics: Metrics = {**rollout_figures(sampled), **sampling, **trained, **times}
        metrics["drafter_in_sync"] = None if in_sync is None else float(in_sync)
        new_tokens = sum(len(sample.completion.token_ids) for sample in sampled)
        all_tokens = new_tokens + sum(len(sample.completion.prompt_token_ids) for sample in sampled)
        metrics["rollout_tokens_per_second"] = new_tokens / times["time/rollout"]
        metrics["tokens_per_second"] = all_tokens / times["time/step"]
        self._raise_alarms(metrics)
        return metrics

    def _experience(self, prompts: Sequence[Prompt], times: dict[str, float]) -> tuple[list[Sample], Metrics]:
        """Roll out and judge into `samples`; under filter_groups further prompts too, until enough groups differ.

        Returns:
            every response, those that are not trained on too, and the figures of dynamic sampling.

        Raises:
            ForerunError: not one group is informative within the limit of generation batches.
        """
        config, filtering = self.config, self.config.algorithm.filter_groups
        sampled: list[Sample] = []
        kept: list[Sample] = []
        num_batches, num_prompts = 0, 0
        while True:
            with timed(times, "time/rollout"):
                completions = self.generate(prompts, first=num_prompts)
            with timed(times, "time/reward"):
                judged = self.judge(prompts, completions, first=num_prompts)
                shape_rewards(judged, config.reward.overlong_buffer, config.rollout.max_response_length)
            sampled += judged
            if not filtering.enable:
                self.samples = sampled
                return sampled, {}
            kept += informative_samples(judged, filtering.metric)
            num_batches, num_prompts = num_batches + 1, num_prompts + len(prompts)
            groups = sorted({sample.group for sample in kept})
            if len(groups) >= config.train_batch_size or num_batches == filtering.max_num_gen_batches:
                break
            prompts = self._draw()
        if not groups:
            raise ForerunError(
                f"step {self.rl_step + 1}: in {num_batches} generation batches no group had different values of "
                f"{filtering.metric}: the task is solved or out of reach; give other prompts, or raise rollout.n or "
                "algorithm.filter_groups.max_num_gen_batches"
            )
        if len(groups) < config.train_batch_size:
            logger.warning(
                "step %d: training on %d of %d groups: max_num_gen_batches=%d is reached",
                self.rl_step + 1,
                len(groups),
                config.train_batch_size,
                num_batches,
            )
        wanted = set(groups[: config.train_batch_size])
        self.samples = [sample for sample in kept if sample.group in wanted]
        return sampled, {"num_gen_batches": float(num_batches), "kept_groups": len(groups) / num_prompts}

    def generate(
        self, prompts: Sequence[Prompt], n: int | None = None, held_out: bool = False, first: int = 0
    ) -> list[Completion]:
        """See `RLRun.generate`."""
        requests = self.requests.batch(prompts, self.rl_step, first, n, held_out)
        if not self.config.rollout.free_cache_engine:
            return self.rollout.generate(requests)
        self._release_cached()
        self.rollout.wake()
        try:
            return self.rollout.generate(requests)
        finally:
            self.rollout.sleep()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `RLRun.load_state_dict`."""
        if "rollouts" in state:  # groups that the data order is past and no step has trained on
            raise ForerunError(
                "the checkpoint is of an asynchronous run: give another trainer.output_dir, or "
                "async_training.enable=true"
            )
        super().load_state_dict(state)

    def ensure_sync(self) -> None:
        """See `RLRun.ensure_sync`."""
        if not self._in_sync:
            self.sync()

    def sync(self) -> bool | None:
        """Hand the trained weights, drafter included, to the rollout engine.

        Returns whether its drafter is the trainer's; None where it cannot know.
        """
        self._release_cached()
        self.rollout.update_weights(self.engine.named_weights(), self.rl_step)
        self._in_sync = True
        if not self.drafts:
            return True
        return self.alarms.drafter_digest(self.rl_step, self._trained_digest(), self.rollout.drafter_digest())

    def _trained_digest(self) -> str:
        """Of the trained drafter in the rollout engine's dtype. Rank 0 alone hashes what all gather."""
        found: list[str] = []
        self.ranks.first_takes(
            self.engine.drafter_weights(), lambda weights: found.append(digest(weights, self.rollout.dtype))
        )
        return self.ranks.agree(found[0] if found else "")

    def _release_cached(self) -> None:
        """Before an engine wakes, which may need on the same device what torch keeps for itself."""
        if self.config.rollout.engine != "native":
            torch.cuda.empty_cache()

    def _draw(self) -> list[Prompt]:
        """The prompts of the next generation batch."""
        size = self.config.data.gen_batch_size or self.config.train_batch_size
        return [self.prompts[index] for index in self.order.take(size)]
