"""Asynchronous RL: rollout workers generate while the trainer trains (docs/async.md).

`AsyncRLTrainer(config).train()` is the whole run of `forerun rl` with `async_training.enable`. The trainer knows its
workers by their protocol: threads of this process, or processes elsewhere. Of several ranks the first has the workers,
the account and the reward; each step it hands all ranks the same groups, and they train on them together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from forerun.config import RLConfig
from forerun.config_async import with_sound_correction
from forerun.data.prompts import Prompt
from forerun.engines.protocol import ReferencePolicy, TrainingEngine
from forerun.errors import ForerunError, UsageError
from forerun.rewards.protocol import RewardResult
from forerun.rollout.local_worker import LocalWorker
from forerun.rollout.pool import WorkerPool
from forerun.rollout.protocol import Completion, Request
from forerun.rollout.sync import digest
from forerun.rollout.workers import RolloutWorker
from forerun.trainers.asynchronous.figures import staleness_figures
from forerun.trainers.asynchronous.ledger import Group, Ledger
from forerun.trainers.asynchronous.ranks import FirstRank
from forerun.trainers.asynchronous.rollouts import Rollouts, Supply
from forerun.trainers.experience import Sample, informative_samples, rollout_figures, set_advantages, shape_rewards
from forerun.trainers.judging import Scorer, check_rewards, response_text, reward_request
from forerun.trainers.rl_run import Metrics, RLRun, SharedClock, timed
from forerun.trainers.rollout_engines import make_rollout_engine


class AsyncRLTrainer(RLRun):
    """One asynchronous RL run; see `RLRun` for what is not said here.

    Args:
        workers: rollout workers in place of `async_training.num_workers` threads with the engine that `rollout.engine`
            names. Their weights are replaced by the training engine's before the first rollout. They are closed at the
            end. Rank 0's; the other ranks give none.
        replace_worker: makes a worker in the place of the lost one that it names, at the next weight update; without it
            the run goes on with those that are left. Rank 0's.

    Attributes:
        ledger: which groups are open, ready, or due; rank 0's alone, like the next two.
        pool: the workers.
        rollouts: what keeps them busy.
    """

    ledger: Ledger
    pool: WorkerPool
    rollouts: Rollouts

    def __init__(
        self,
        config: RLConfig,
        *,
        prompts: Sequence[Prompt] | None = None,
        eval_prompts: Sequence[Prompt] | None = None,
        engine: TrainingEngine | None = None,
        workers: Sequence[RolloutWorker] | None = None,
        replace_worker: Callable[[str], RolloutWorker] | None = None,
        reward: Scorer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reference: ReferencePolicy | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if not config.async_training.enable:
            raise UsageError("async_training.enable=false: set it, or use RLTrainer")
        super().__init__(
            replace(config, algorithm=with_sound_correction(config.async_training, config.algorithm)),
            prompts=prompts,
            eval_prompts=eval_prompts,
            engine=engine,
            reward=reward,
            tokenizer=tokenizer,
            reference=reference,
            mesh=mesh,
        )
        self.first = FirstRank(self.ranks, self.engine)
        self._in_sync = self._running = False
        self._failed_groups = 0
        self._judge_clock = SharedClock()
        self._judge_s_before = self._idle_s_before = 0.0
        if self.ranks.rank == 0:
            self._start_rollouts(self._local_workers() if workers is None else workers, replace_worker)

    def _start_rollouts(
        self, workers: Sequence[RolloutWorker], replace_worker: Callable[[str], RolloutWorker] | None
    ) -> None:
        config, settings = self.config, self.config.async_training
        filtering = config.algorithm.filter_groups
        limit = filtering.max_num_gen_batches * config.train_batch_size if filtering.enable else 0
        self.ledger = Ledger(config.train_batch_size, config.rollout.n, settings.max_staleness)
        self.pool = WorkerPool(workers, replace_worker)
        self.rollouts = Rollouts(
            self.ledger,
            self.pool,
            Supply(self._draw_one, self._group_requests, self._judge_group, self._is_useless),
            self.tokenizer,
            partial=settings.partial_rollout,
            in_batches=config.rollout.deterministic,
            most_dropped=limit or None,
            num_judges=config.reward.num_workers,
        )
        self._owned.callback(self.rollouts.close)

    # ---- the steps, on every rank

    def turn(self, pause: bool) -> Metrics:
        """See `RLRun.turn`: take a step's groups, train; update the workers' weights where that is due."""
        self.ensure_sync()
        self._resume()
        times: dict[str, float] = {}
        with timed(times, "time/step"):
            with timed(times, "time/trainer_idle"):
                groups, dropped, queue_depth = self._next_step(times)
            self.samples = self._samples(groups)
            sampled = [*self._samples(dropped, first=len(groups)), *self.samples]
            check_rewards(sampled, self.rl_step + 1)
            set_advantages(self.samples, self.config.algorithm)
            age = staleness_figures([sample.completion for sample in self.samples], self.rl_step)
            with timed(times, "time/train"):
                trained = self.update(self.samples)
            self.rl_step += 1  # before the sync, which names the new weights after it
            due = self.rl_step % self.config.async_training.trigger_parameter_sync_step == 0
            in_sync = self._update_workers(times) if due or pause else None
            if not pause:
                self._resume()
        rolled_out = self.first.does(partial(self._rollout_figures, times["time/step"]))
        metrics: Metrics = {**rollout_figures(sampled), **trained, **age, **times, **rolled_out}
        if self.config.algorithm.filter_groups.enable:
            metrics["num_gen_batches"] = (len(groups) + len(dropped)) / len(groups)
            metrics["kept_groups"] = len(groups) / (len(groups) + len(dropped))
        metrics["queue_depth"] = float(queue_depth)
        metrics["drafter_in_sync"] = None if in_sync is None else float(in_sync)
        new_tokens = sum(len(sample.completion.token_ids) for sample in sampled)
        all_tokens = new_tokens + sum(len(sample.completion.prompt_token_ids) for sample in sampled)
        metrics["rollout_tokens_per_second"] = new_tokens / times["time/step"]
        metrics["tokens_per_second"] = all_tokens / times["time/step"]
        self._raise_alarms(metrics)
        return metrics

    def _next_step(self, times: dict[str, float]) -> tuple[list[Group], list[Group], int]:
        """Groups to train on, groups dropped before them, and how many more are ready."""
        while (found := self.first.does(self._take_step)) is None:
            # Every worker is lost. The trainer waits and its weights stand still: those that take their place get them.
            self._update_workers(times)
            self._resume()
        return found

    def generate(
        self, prompts: Sequence[Prompt], n: int | None = None, held_out: bool = False, first: int = 0
    ) -> list[Completion]:
        """See `RLRun.generate`."""
        # Rank 0's, kept when every worker is lost: the next ones that answer nothing new were replaced in vain.
        answers: dict[str, Completion] = {}
        work = partial(self._answer, answers, prompts, n, held_out, first)
        while (found := self.first.does(work)) is None:
            self._update_workers({})  # as above
        return found

    def ensure_sync(self) -> None:
        """See `RLRun.ensure_sync`."""
        if not self._in_sync:
            self._update_workers({})

    def _update_workers(self, times: dict[str, float]) -> bool | None:
        """Pause, and hand the trained weights, drafter included, to every worker.

        Returns whether their drafters are the trainer's; None where they cannot know.
        """
        with timed(times, "time/drain"):
            self.first.does(self._pause)
        with timed(times, "time/sync"):
            digests = self.first.does(self._hand_over_weights)
            self._in_sync = True
            found = [self.alarms.drafter_digest(self.rl_step, trained, own) for trained, own in digests]
            return None if None in found else all(found)

    # ---- what rank 0 does of them

    def _resume(self) -> None:
        if self.ranks.rank == 0 and not self._running:
            self._running = True
            self.rollouts.resume()

    def _pause(self) -> None:
        if self._running:
            self.rollouts.pause()
            self._running = False

    def _take_step(self) -> tuple[list[Group], list[Group], int] | None:
        found = self.rollouts.next_step()
        return None if found is None else (*found, self.rollouts.num_ready())

    def _answer(
        self, answers: dict[str, Completion], prompts: Sequence[Prompt], n: int | None, held_out: bool, first: int
    ) -> list[Completion] | None:
        self._pause()
        return self.rollouts.generate(self.requests.batch(prompts, self.rl_step, first, n, held_out), answers)

    def _hand_over_weights(self) -> list[tuple[str, str | None]]:
        """Give them to every worker; returns the digests of the trained drafter and of each worker's, if they draft."""
        self.pool.update_weights(self.first.named_weights, self.rl_step)
        self.ledger.updated(self.rl_step)
        if not self.drafts:
            return []
        trained: dict[Any, str] = {}
        digests = []
        for worker, own in self.pool.drafters():
            if worker.dtype not in trained:
                trained[worker.dtype] = digest(self.first.drafter_weights(), worker.dtype)
            digests.append((trained[worker.dtype], own))
        return digests

    def _rollout_figures(self, step_s: float) -> dict[str, float]:
        """What was measured of the rollouts since the last call."""
        idle, judge = self.pool.idle_seconds(), self._judge_clock.seconds
        idle_s = min(max(0.0, idle - self._idle_s_before), step_s)
        figures = {
            "time/rollout_idle": idle_s,
            "time/rollout": step_s - idle_s,
            "time/reward": judge - self._judge_s_before,
            "rollout_workers": float(len(self.pool.workers)),
            "requests_reissued": float(self.pool.num_reissued),
        }
        self._idle_s_before, self._judge_s_before = idle, judge
        return figures

    # ---- what the rollouts ask for

    def _draw_one(self) -> int:
        return self.order.take(1)[0]

    def _group_requests(self, group: Group) -> list[Request]:
        size = self.config.train_batch_size
        return self.requests.requests(
            self.prompts[group.item], group.number // size, group.number % size, self.config.rollout.n
        )

    def _judge_group(self, group: Group) -> list[RewardResult]:
        with self._judge_clock:
            texts = [response_text(self.tokenizer, completion) for completion in group.answers()]
            return self.reward.score_alone([reward_request(self.prompts[group.item], text) for text in texts])

    def _is_useless(self, group: Group, rewards: list[RewardResult]) -> bool:
        """Whether dynamic sampling drops it."""
        filtering = self.config.algorithm.filter_groups
        if not filtering.enable:
            return False
        samples = self._samples([replace(group, rewards=rewards)])
        if all(reward.event is not None for reward in rewards):
            self._failed_groups += 1
            if self._failed_groups == self.config.train_batch_size:
                check_rewards(samples, group.number // self.config.train_batch_size + 1)
            return True
        self._failed_groups = 0
        return not informative_samples(samples, filtering.metric)

    def _samples(self, groups: Sequence[Group], first: int = 0) -> list[Sample]:
        """The responses of judged groups, which get numbers from `first` on."""
        samples = [
            Sample(self.prompts[group.item], place, completion, response_text(self.tokenizer, completion), reward)
            for place, group in enumerate(groups, start=first)
            for completion, reward in zip(group.answers(), group.rewards or [], strict=True)
        ]
        shape_rewards(samples, self.config.reward.overlong_buffer, self.config.rollout.max_response_length)
        return samples

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """See `RLRun.state_dict`; the rollouts are paused. Rank 0's, which is the one that is written: the others know
        nothing of the account."""
        if self.ranks.rank != 0:
            return {}
        if self._running:
            raise ForerunError("an asynchronous run is saved while its rollouts are paused: see turn(pause=True)")
        return {**super().state_dict(), "rollouts": self.rollouts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `RLRun.load_state_dict`."""
        if "rollouts" not in state:
            raise ForerunError(
                "the checkpoint is of a synchronous run: give another trainer.output_dir, or set "
                "async_training.enable=false and leave the other async_training keys out"
            )
        super().load_state_dict(state)
        self.first.does(lambda: self.rollouts.load_state_dict(state["rollouts"]))

    def _local_workers(self) -> list[RolloutWorker]:
        made: list[RolloutWorker] = []
        try:
            for number in range(self.config.async_training.num_workers):
                engine = make_rollout_engine(self.config, self.engine, self.tokenizer)
                made.append(LocalWorker(engine, self.config.rollout.max_num_seqs, f"local-{number}"))
        except BaseException:
            for worker in made:
                worker.close()
            raise
        return made
