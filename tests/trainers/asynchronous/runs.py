"""Asynchronous trainers on the tiny task, with the native engine in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.config import RLConfig
from forerun.engines.torch_engine import TorchEngine
from forerun.models.attach import attach
from forerun.rollout.local_worker import LocalWorker
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Completion, Request
from forerun.trainers.asynchronous.trainer import AsyncRLTrainer
from forerun.trainers.experience import Figures, Sample
from forerun.trainers.rl import RLTrainer
from forerun.trainers.setup import engine_config
from tests.trainers.tiny import make_model, make_tokenizer
from tests.trainers.tiny_rl import MTP, PROMPTS, ShareOfWord, settings

ASYNC = ["async_training.enable=true"]
# Nothing is left to time: such a run repeats to the bit.
REPEATABLE = [*ASYNC, "async_training.partial_rollout=false", "rollout.deterministic=true"]
DRAFT = [*MTP, "mtp.enable_rollout=true", "mtp.num_speculative_tokens=2"]


def training_engine(config: RLConfig, seed: int = 0) -> TorchEngine:
    model: Any = make_model(seed)
    if config.mtp.enable:
        model = attach(model, config.mtp, init="plain", seed=seed)
    return TorchEngine(model, engine_config(config.engine, config.optim, config.mtp, config.trainer.total_steps))


def synchronous(tmp_path: Path, *more: str, **objects: Any) -> RLTrainer:
    config = settings(tmp_path, *more)
    objects = {"prompts": PROMPTS, "engine": training_engine(config), "reward": ShareOfWord(), **objects}
    return RLTrainer(config, tokenizer=make_tokenizer(), **objects)


def asynchronous(tmp_path: Path, *more: str, **objects: Any) -> AsyncRLTrainer:
    config = settings(tmp_path, *more)
    objects = {"prompts": PROMPTS, "engine": training_engine(config), "reward": ShareOfWord(), **objects}
    return AsyncRLTrainer(config, tokenizer=make_tokenizer(), **objects)


@contextmanager
def closing(made: AsyncRLTrainer) -> Iterator[AsyncRLTrainer]:
    try:
        yield made
    finally:
        made.close()


class GatedEngine(NativeEngine):
    """Leaves nothing to time: once it has but `size` requests to run, of later steps than `needed`, and each of these
    has a few tokens, it stands still until it is asked to abort.
    """

    needed: Callable[[], int]
    size: int
    standing: threading.Event

    def generate(
        self, requests: Sequence[Request], on_finish: Callable[[Completion], None] | None = None, _: Any = None
    ) -> list[Completion]:
        self.asked = threading.Event()
        return super().generate(requests, on_finish, self._gate)

    def _gate(self, name: str, tokens: list[int]) -> None:
        assert self._call is not None
        later = all(int(running.split("-")[0]) > self.needed() for running in self._call.unfinished)
        rows = self._call.run.scheduler.decoding
        if later and len(rows) == self.size and all(len(row.token_ids) > 2 for row in rows):
            self.standing.set()
            assert self.asked.wait(60), "nobody asked for an abort"
            self.standing.clear()

    def abort(self, request_ids: Any) -> None:
        super().abort(request_ids)
        self.asked.set()


def gated(tmp_path: Path, *more: str) -> AsyncRLTrainer:
    """A trainer whose updates meet every response of the next step when it has some of its 24 tokens."""
    options = [*ASYNC, *DRAFT, "rollout.max_response_length=24", "rollout.n=3", *more]
    config = settings(tmp_path, *options)
    engine = training_engine(config)
    size = config.train_batch_size * config.rollout.n
    # It is given two steps' requests at once. The first step's run together, and the later ones behind them.
    rollout = GatedEngine(engine.model, num_speculative_tokens=2, products="linear", max_num_seqs=size)
    assert isinstance(rollout, GatedEngine)
    made = asynchronous(tmp_path, *options, engine=engine, workers=[LocalWorker(rollout, 2 * size, "gated")])
    rollout.needed, rollout.size, rollout.standing = lambda: made.rl_step, size, threading.Event()
    made.requests = replace(made.requests, stop_token_ids=())
    update = made.update

    def behind_it(samples: Sequence[Sample]) -> Figures:
        """An update that ends when the engine stands still."""
        trained = update(samples)
        assert rollout.standing.wait(60), "the engine has not come to stand"
        return trained

    made.update = behind_it  # type: ignore[method-assign]
    return made
