"""Reinforcement learning on verifiable rewards, synchronous, in one process.

`RLTrainer(config).train()` is the whole run of `forerun rl`; `step(prompts)` is one turn of the loop, with whatever
engines and reward the caller brings. The trainer knows neither engine beyond its protocol.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase, set_seed

from forerun.config import RLConfig
from forerun.data.chat import encode_prompt, stop_token_ids
from forerun.data.order import DataOrder
from forerun.data.prompts import Prompt, read_prompts
from forerun.engines.protocol import TrainingEngine
from forerun.engines.ranks import RankGroup
from forerun.engines.torch_engine import TorchEngine
from forerun.errors import ForerunError, UsageError
from forerun.report.atomic import failures
from forerun.report.progress import ProgressBar
from forerun.rewards.protocol import RewardRequest, RewardResult
from forerun.rewards.runner import RewardRunner
from forerun.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams
from forerun.rollout.sync import digest
from forerun.trainers.alarms import Alarms
from forerun.trainers.experience import (
    Sample,
    informative_samples,
    rollout_figures,
    set_advantages,
    shape_rewards,
    text_table,
)
from forerun.trainers.policy_update import PolicyUpdate, ReferencePolicy, frozen_copy
from forerun.trainers.rollout_engines import make_rollout_engine
from forerun.trainers.setup import (
    SAMPLES_FILE,
    RunDirectory,
    check_config,
    engine_config,
    load_model,
    load_tokenizer,
    resolve_device,
)

logger = logging.getLogger(__name__)

Metrics = dict[str, float | None]


class Scorer(Protocol):
    """What judges responses: `rewards.runner.RewardRunner`, or anything alike."""

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]: ...


class RLTrainer:
    """One RL run.

    Args:
        config: checked before anything is loaded.
        prompts: training prompts in place of `data.train_files`.
        eval_prompts: held-out prompts in place of `data.val_files`; answered greedily, one response each.
        engine: training engine in place of one for the model at `model.path`.
        rollout: rollout engine in place of the one that `rollout.engine` names. Its weights are replaced by the
            training engine's before the first rollout and after every update.
        reward: in place of the function that `reward.function` names.
        tokenizer: in place of the one at `model.path`.
        reference: for the KL terms, in place of a frozen copy of the model as the run starts.

    Attributes:
        rl_step: rollouts that were trained on.
        samples: the responses that the last step trained on, with rewards and advantages.
        alarms: what was raised so far.

    Raises:
        UsageError: a configuration, data or reward that cannot be used.
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
    ) -> None:
        check_config(config, has_data=prompts is not None, has_model=engine is not None)
        if config.mtp.enable_rollout and config.mtp.acceptance == "greedy":
            raise UsageError("mtp.acceptance=greedy is lossless without a temperature only: use rejection or match")
        self.config = config
        set_seed(config.trainer.seed)
        device = resolve_device(config.engine)
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(config.model)
        # Data and reward before the model: what is wrong with them is found in a second.
        self.prompts = self._usable(self._read(config.data.train_files, config.data.train_max_samples, prompts))
        held_out = self._read(config.data.val_files, config.data.val_max_samples, eval_prompts)
        self.eval_prompts = self._usable(held_out) if held_out else []
        self.order = DataOrder(len(self.prompts), config.trainer.seed, config.data.shuffle)
        self._owned = ExitStack()
        if reward is None:
            reward = self._owned.enter_context(
                RewardRunner(
                    config.reward.function,
                    config.reward.time_limit_s,
                    config.reward.num_workers,
                    config.reward.kwargs,
                )
            )
        self.reward: Scorer = reward

        updates = config.ppo_epochs * config.train_batch_size // config.ppo_mini_batch_size
        if engine is None:
            engine = TorchEngine(
                load_model(config.model, config.mtp, device, config.trainer.seed),
                engine_config(config.engine, config.optim, config.mtp, config.trainer.total_steps * updates),
            )
        self.engine = engine
        if config.algorithm.needs_reference and reference is None:
            reference = frozen_copy(engine)  # before a resume, so of the weights that every run starts from
        self.update = PolicyUpdate(config, engine, reference)
        if rollout is None:
            rollout = make_rollout_engine(config, engine, self.tokenizer)
            self._owned.callback(rollout.close)
        self.rollout = rollout
        self.drafts = config.mtp.enable_rollout
        self.alarms = Alarms(
            config.trainer.on_alarm,
            len(self.tokenizer),
            config.mtp.loss,
            warmup_steps=max(20, config.optim.num_warmup_steps(config.trainer.total_steps * updates)),
        )
        generation_config = engine.model.generation_config if isinstance(engine, TorchEngine) else None
        self.stop_token_ids = stop_token_ids(self.tokenizer, generation_config)
        self.rl_step = 0
        self.samples: list[Sample] = []
        self._in_sync = False

    # ---- the run

    def train(self) -> Metrics:
        """Train to the end, with checkpoints on the way, and export the model.

        Returns:
            the last step's metrics; none where a resumed run had no step left to do.

        Raises:
            ForerunError: see the engines, the alarms and the writers; checkpoints written before stay.
        """
        config = self.config.trainer
        run = RunDirectory(self.config, config, RankGroup())
        metrics: Metrics = {}
        self.alarms.record = run.log_alarm
        with run.writers, self._owned:
            resumed = run.resume(self.engine)
            if resumed is not None:
                self.order.load_state_dict(resumed["order"])
                self.rl_step = int(resumed["rl_step"])
            run.rewind(None if resumed is None else self.rl_step)
            run.write_config()
            if resumed is None:
                metrics.update(self.evaluate())
                if metrics:
                    run.writers.log(0, metrics)
            done = min(self.rl_step, config.total_steps)
            with ProgressBar("rl", config.total_steps, "steps", done=done) as progress:
                while self.rl_step < config.total_steps:
                    metrics = self.step(self._draw())
                    last = self.rl_step == config.total_steps
                    if last or run.is_due(config.test_freq, self.rl_step):
                        metrics.update(self.evaluate())
                    run.writers.log(self.rl_step, metrics)
                    self._write_samples(run.path)
                    if last or run.is_due(config.save_freq, self.rl_step):
                        run.save(self.engine, {"order": self.order.state_dict(), "rl_step": self.rl_step})
                    progress.advance(1, _note(metrics))
            run.export(self.engine, self.tokenizer)
        return metrics

    def step(self, prompts: Sequence[Prompt]) -> Metrics:
        """One turn: roll out, judge, train, sync. Returns the step's metrics, None for what cannot be known here."""
        if not self._in_sync:
            self.sync()
        times: dict[str, float] = {}
        with _timed(times, "time/step"):
            sampled, sampling = self._experience(prompts, times)
            set_advantages(self.samples, self.config.algorithm)
            with _timed(times, "time/train"):
                trained = self.update(self.samples)
            self.rl_step += 1  # before the sync, which names the new weights after it
            with _timed(times, "time/sync"):
                in_sync = self.sync()
        metrics: Metrics = {**rollout_figures(sampled), **sampling, **trained, **times}
        metrics["drafter_in_sync"] = None if in_sync is None else float(in_sync)
        new_tokens = sum(len(sample.completion.token_ids) for sample in sampled)
        all_tokens = new_tokens + sum(len(sample.completion.prompt_token_ids) for sample in sampled)
        metrics["rollout_tokens_per_second"] = new_tokens / times["time/rollout"]
        metrics["tokens_per_second"] = all_tokens / times["time/step"]
        self.alarms.mtp_loss(self.rl_step, metrics)
        if self.drafts:
            self.alarms.acceptance(self.rl_step, metrics["spec_num_draft_tokens"], metrics["spec_num_accepted_tokens"])
        return metrics

    # ---- its parts

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
            with _timed(times, "time/rollout"):
                completions = self.generate(prompts, first=num_prompts)
            with _timed(times, "time/reward"):
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
        self, prompts: Sequence[Prompt], n: int | None = None, greedy: bool = False, first: int = 0
    ) -> list[Completion]:
        """n responses per prompt (default `rollout.n`), those of one prompt next to each other.

        Each request has a seed of its own, from the run's seed, the step and its place: a resumed run samples the same.
        `first` is the place of the first prompt within the step.
        """
        rollout, trainer = self.config.rollout, self.config.trainer
        n = rollout.n if n is None else n
        requests = []
        for i, prompt in enumerate(prompts, start=first):
            token_ids = encode_prompt(self.tokenizer, prompt.messages)
            for j in range(n):
                sampling = SamplingParams(
                    max_tokens=rollout.max_response_length,
                    temperature=0.0 if greedy else rollout.temperature,
                    top_p=1.0 if greedy else rollout.top_p,
                    top_k=0 if greedy else rollout.top_k,
                    seed=random.Random(f"{trainer.seed}/{self.rl_step}/{i}/{j}").getrandbits(31),
                    stop_token_ids=self.stop_token_ids,
                )
                requests.append(Request(f"{self.rl_step}-{i}-{j}", token_ids, sampling))
        self.rollout.wake()
        try:
            return self.rollout.generate(requests)
        finally:
            self.rollout.sleep()

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Completion], first: int = 0) -> list[Sample]:
        """Decode and score; completions are in `generate`'s order, and `first` is its.

        Raises:
            ForerunError: the reward failed on every response; nothing could be learned from that.
        """
        n = len(completions) // len(prompts)
        texts = [
            str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)) for completion in completions
        ]
        requests = [
            RewardRequest(
                prompt=prompts[i // n].messages,
                response=text,
                ground_truth=prompts[i // n].ground_truth,
                data_source=prompts[i // n].data_source,
                extra=prompts[i // n].extra_info,
            )
            for i, text in enumerate(texts)
        ]
        rewards = self.reward.score(requests)
        samples = [
            Sample(prompts[i // n], first + i // n, completion, text, reward)
            for i, (completion, text, reward) in enumerate(zip(completions, texts, rewards, strict=True))
        ]
        failed = {reward.event: reward for reward in rewards if reward.event is not None}
        if all(reward.event is not None for reward in rewards):
            example = next(iter(failed.values()))
            raise ForerunError(
                f"step {self.rl_step + 1}: the reward failed on all {len(rewards)} responses ({example.event}: "
                f"{example.detail}): mend reward.function; the same command goes on from the last checkpoint"
            )
        for event in failed.values():
            logger.warning("step %d: reward %s, counted as 0: %s", self.rl_step + 1, event.event, event.detail)
        return samples

    def sync(self) -> bool | None:
        """Hand the trained weights, drafter included, to the rollout engine.

        Returns whether its drafter is the trainer's; None where it cannot know.
        """
        self.rollout.update_weights(self.engine.named_weights(), self.rl_step)
        self._in_sync = True
        if not self.drafts:
            return True
        trained = digest(self.engine.drafter_weights(), self.rollout.dtype)
        return self.alarms.drafter_digest(self.rl_step, trained, self.rollout.drafter_digest())

    def evaluate(self) -> Metrics:
        """Greedy answers to the held-out prompts: `val/reward_mean`, `val/acceptance_length`, ..."""
        if not self.eval_prompts:
            return {}
        if not self._in_sync:
            self.sync()
        samples = self.judge(self.eval_prompts, self.generate(self.eval_prompts, n=1, greedy=True))
        return {f"val/{name}": value for name, value in rollout_figures(samples).items()}

    # ---- data

    def _draw(self) -> list[Prompt]:
        """The prompts of the next generation batch."""
        size = self.config.data.gen_batch_size or self.config.train_batch_size
        return [self.prompts[index] for index in self.order.take(size)]

    def _read(self, files: Sequence[str], limit: int | None, given: Sequence[Prompt] | None) -> list[Prompt]:
        if given is not None:
            return list(given)
        bad = self.config.data.on_bad_row
        return [prompt for file in files for prompt in read_prompts(file, bad, logger.warning)][:limit]

    def _usable(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts that fit `rollout.max_prompt_length`; a longer one stops the run or is left out."""
        limit = self.config.rollout.max_prompt_length
        usable = []
        for index, prompt in enumerate(prompts):
            length = len(encode_prompt(self.tokenizer, prompt.messages, name=f"prompt {index}"))
            if length <= limit:
                usable.append(prompt)
                continue
            message = f"prompt {index} has {length} tokens, more than rollout.max_prompt_length={limit}"
            if self.config.data.on_too_long == "error":
                raise UsageError(f"{message}: raise it, or set data.on_too_long=skip")
            logger.warning("left out: %s", message)
        if not usable:
            raise UsageError(f"no prompt fits rollout.max_prompt_length={limit}: raise it, or give other prompts")
        return usable

    def _write_samples(self, run_dir: Path, limit: int = 8) -> None:
        path = run_dir / SAMPLES_FILE
        with failures(path), path.open("a", encoding="utf-8") as file:
            for row in text_table(self.samples, self.tokenizer, limit):
                file.write(json.dumps({"step": self.rl_step, **row}) + "\n")


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - started


def _note(metrics: Metrics) -> str:
    shown = [("reward_mean", "reward"), ("acceptance_length", "acceptance"), ("mtp/depth_1/loss", "mtp")]
    return "  ".join(f"{label} {metrics[name]:.3f}" for name, label in shown if metrics.get(name) is not None)
