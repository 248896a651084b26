"""What every RL run has, however rollouts are organised: model, data, reward, alarms, checkpoints, held-out prompts.

`trainers.rl` runs rollout and training in turn.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase, set_seed

from forerun.config import RLConfig
from forerun.data.chat import stop_token_ids
from forerun.data.order import DataOrder
from forerun.data.prompts import Prompt
from forerun.engines.protocol import ReferencePolicy, TrainingEngine
from forerun.engines.ranks import RankGroup
from forerun.engines.torch_engine import TorchEngine
from forerun.errors import UsageError
from forerun.report.atomic import failures
from forerun.report.progress import ProgressBar
from forerun.rewards.runner import RewardRunner
from forerun.rollout.protocol import Completion
from forerun.trainers.alarms import Alarms
from forerun.trainers.checks import check_config, check_ranks, warn_of_float32
from forerun.trainers.experience import Sample, best_of_groups, rollout_figures, text_table
from forerun.trainers.judging import Scorer, check_rewards, judged_samples
from forerun.trainers.megatron_setup import make_megatron_engine
from forerun.trainers.policy_update import PolicyUpdate
from forerun.trainers.prompt_files import check_ground_truth, read_files, usable_prompts
from forerun.trainers.ranked import RankedScorer
from forerun.trainers.rollout_requests import RequestMaker
from forerun.trainers.setup import (
    SAMPLES_FILE,
    RunDirectory,
    engine_config,
    load_model,
    load_tokenizer,
    optimizer_config,
    resolve_device,
)

Metrics = dict[str, float | None]


class RLRun(ABC):
    """One RL run.

    Args:
        config: checked before anything is loaded.
        prompts: training prompts in place of `data.train_files`.
        eval_prompts: held-out prompts in place of `data.val_files`; answered as `rollout.val_kwargs` says.
        engine: training engine in place of one for the model at `model.path`.
        reward: in place of the function that `reward.function` names.
        tokenizer: in place of the one at `model.path`.
        reference: for the KL terms, in place of a frozen copy of the model as the run starts.
        mesh: ranks that share the run (see `TorchEngine`), of which every one makes such a trainer and takes every
            step; for the engine and the reference that are built. Rank 0 alone scores and writes.

    Attributes:
        rl_step: steps that were trained; also the version of the trainer's weights.
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
        reward: Scorer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reference: ReferencePolicy | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        check_config(config, has_data=prompts is not None, has_model=engine is not None)
        check_ranks(config, None if mesh is None else mesh.size())
        if config.mtp.enable_rollout and config.mtp.acceptance == "greedy":
            raise UsageError("mtp.acceptance=greedy is lossless without a temperature only: use rejection or match")
        self.config = config
        self.ranks = RankGroup(mesh)
        set_seed(config.trainer.seed)
        device = resolve_device(config.engine)
        if engine is None and self.ranks.rank == 0:
            warn_of_float32(config, self.ranks.size, device)
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(config.model)
        # Data and reward before the model: what is wrong with them is found in a second.
        data = config.data
        if prompts is None:
            prompts = read_files(data.train_files, data.train_max_samples, data)
        if eval_prompts is None:
            eval_prompts = read_files(data.val_files, data.val_max_samples, data)
        self.prompts = self._usable(prompts)
        self.eval_prompts = self._usable(eval_prompts) if eval_prompts else []
        self.order = DataOrder(len(self.prompts), config.trainer.seed, data.shuffle)
        self._owned = ExitStack()
        if reward is None:
            check_ground_truth([*self.prompts, *self.eval_prompts], config.reward.function)
        own_reward = reward is None
        if own_reward and self.ranks.rank == 0:
            reward = self._owned.enter_context(
                RewardRunner(
                    config.reward.function,
                    config.reward.time_limit_s,
                    config.reward.num_workers,
                    config.reward.kwargs,
                )
            )
        self.reward = RankedScorer(self.ranks, reward, several_at_once=own_reward)

        updates = config.ppo_epochs * config.train_batch_size // config.ppo_mini_batch_size

        total_updates = config.trainer.total_steps * updates

        def built() -> TrainingEngine:
            if config.engine.strategy == "megatron":
                return make_megatron_engine(config, optimizer_config(config.optim, total_updates))
            # Shards move to the device as they are cut, which need not hold the whole model.
            place = device if mesh is None else torch.device("cpu")
            return TorchEngine(
                load_model(config.model, config.mtp, place, config.trainer.seed, ranks=self.ranks),
                engine_config(config.engine, config.optim, config.mtp, total_updates),
                mesh=mesh,
            )

        if engine is None:
            engine = built()
        self.engine = engine
        if config.algorithm.needs_reference and reference is None:
            # Before a resume, so of the weights that every run starts from.
            copied = mesh is None and config.engine.strategy == "torch"
            reference = engine.frozen_copy() if copied else built()
        self.update = PolicyUpdate(config, engine, reference)
        self.drafts = config.mtp.enable_rollout
        self.alarms = Alarms(
            config.trainer.on_alarm,
            len(self.tokenizer),
            config.mtp.loss,
            warmup_steps=max(20, config.optim.num_warmup_steps(total_updates)),
        )
        generation_config = None if engine.model is None else engine.model.generation_config
        self.requests = RequestMaker(config, self.tokenizer, stop_token_ids(self.tokenizer, generation_config))
        self.rl_step = 0
        self.samples: list[Sample] = []

    # ---- what a kind of run adds

    @abstractmethod
    def turn(self, pause: bool) -> Metrics:
        """One step of the run; returns its metrics.

        Args:
            pause: it is followed by `evaluate` or a checkpoint: end with nothing under way, and the rollout engine in
                possession of the new weights.
        """

    @abstractmethod
    def ensure_sync(self) -> None:
        """Hand the rollout engine the trainer's weights unless it has them."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], n: int | None = None, held_out: bool = False, first: int = 0
    ) -> list[Completion]:
        """n responses per prompt (default `rollout.n`), those of one prompt next to each other; see `RequestMaker`.

        `first` is the place of the first prompt within the step.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the engine's state, as JSON values."""
        return {"order": self.order.state_dict(), "rl_step": self.rl_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.order.load_state_dict(state["order"])
        self.rl_step = int(state["rl_step"])

    # ---- the run

    def train(self) -> Metrics:
        """Train to the end, with checkpoints on the way, and export the model.

        Returns:
            the last step's metrics; none where a resumed run had no step left to do.

        Raises:
            ForerunError: see the engines, the alarms and the writers; checkpoints written before stay.
        """
        config = self.config.trainer
        run = RunDirectory(self.config, config, self.ranks)
        metrics: Metrics = {}
        self.alarms.record = run.log_alarm
        with run.writers, self._owned, run.saving(self.engine):
            resumed = run.resume(self.engine)
            if resumed is not None:
                self.load_state_dict(resumed)
            run.rewind(None if resumed is None else self.rl_step)
            run.write_config()
            if resumed is None and config.val_before_train and (metrics := self.evaluate()):
                run.writers.log(0, metrics)
            done = min(self.rl_step, config.total_steps)
            with ProgressBar("rl", config.total_steps, "steps", done=done) as progress:
                while self.rl_step < config.total_steps:
                    step = self.rl_step + 1
                    last = step == config.total_steps
                    test = last or run.is_due(config.test_freq, step)
                    save = last or run.is_due(config.save_freq, step)
                    metrics = self.turn(pause=test or save)
                    if test:
                        metrics.update(self.evaluate())
                    run.writers.log(self.rl_step, metrics)
                    if run.is_writer:
                        self._write_samples(run.path)
                    if save:
                        run.save(self.engine, self.state_dict())
                    progress.advance(1, _note(metrics))
            run.export(self.engine, self.tokenizer)
        return metrics

    def close(self) -> None:
        """End what the run started, as `train` does at its end. For whoever calls `turn` himself."""
        self._owned.close()

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Completion], first: int = 0) -> list[Sample]:
        """Decode and score; completions are in `generate`'s order, and `first` is its.

        Raises:
            ForerunError: the reward failed on every response; nothing could be learned from that.
        """
        samples = judged_samples(self.reward, self.tokenizer, prompts, completions, first)
        check_rewards(samples, self.rl_step + 1)
        return samples

    def evaluate(self) -> Metrics:
        """Answers to the held-out prompts (`rollout.val_kwargs`): `val/reward_mean`, `val/acceptance_length`, ..."""
        if not self.eval_prompts:
            return {}
        self.ensure_sync()
        n = self.config.rollout.val_kwargs.n
        samples = self.judge(self.eval_prompts, self.generate(self.eval_prompts, n, held_out=True))
        figures = rollout_figures(samples)
        if n > 1:
            figures["reward_best"] = best_of_groups(samples)
        return {f"val/{name}": value for name, value in figures.items()}

    def _raise_alarms(self, metrics: Metrics) -> None:
        self.alarms.mtp_loss(self.rl_step, metrics)
        if self.drafts:
            self.alarms.acceptance(self.rl_step, metrics["spec_num_draft_tokens"], metrics["spec_num_accepted_tokens"])

    def _usable(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return usable_prompts(prompts, self.tokenizer, self.config.rollout.max_prompt_length, self.config.data)

    def _write_samples(self, run_dir: Path) -> None:
        path = run_dir / SAMPLES_FILE
        with failures(path), path.open("a", encoding="utf-8") as file:
            for row in text_table(self.samples, self.tokenizer, limit=8):
                file.write(json.dumps({"step": self.rl_step, **row}) + "\n")


class SharedClock:
    """How long at least one of several threads was in it: `with clock: ...`, `clock.seconds`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._inside = 0
        self._since = 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._since = time.perf_counter()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._seconds += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """Until now."""
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since if self._inside else 0.0)


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Add the block's seconds to `times[name]`."""
    started = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - started


def _note(metrics: Metrics) -> str:
    shown = [("reward_mean", "reward"), ("acceptance_length", "acceptance"), ("mtp/depth_1/loss", "mtp")]
    return "  ".join(f"{label} {metrics[name]:.3f}" for name, label in shown if metrics.get(name) is not None)
