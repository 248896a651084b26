"""Several rollout workers as one: shares requests out, collects answers, goes on without the workers that are lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from forerun.errors import ForerunError
from forerun.rollout.dispatch import Dispatch
from forerun.rollout.protocol import Completion, NamedTensors, Request
from forerun.rollout.workers import RolloutWorker, WorkerLostError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_ROUND_S = 0.05
# So often every worker is replaced before one request is answered; then no further one would do better.
_MOST_IN_VAIN = 3


class WorkerPool:
    """The workers of a run. For one thread at a time.

    Args:
        workers: with different names; `close` closes them.
        replace: makes a worker in the place of the lost one that it names; called before the next weight update, until
            so many were lost in a row that none can do the work. None goes on with fewer.

    Attributes:
        workers: those that are there.
    """

    def __init__(self, workers: Sequence[RolloutWorker], replace: Callable[[str], RolloutWorker] | None = None) -> None:
        self.workers = list(workers)
        self._replace = replace
        self._lost: list[str] = []
        self._num_replaced = 0  # since the last answer
        self._max_replaced = _MOST_IN_VAIN * len(self.workers)
        self._cause = ""
        self._clocks = {worker.name: _IdleClock() for worker in workers}
        self._reissued = 0

    @property
    def num_reissued(self) -> int:
        """Requests so far that a lost worker held, and that another one got."""
        return self._reissued

    @property
    def can_recover(self) -> bool:
        """Whether there are workers, or will be after the next weight update."""
        return bool(self.workers) or self._maker is not None

    @property
    def _maker(self) -> Callable[[str], RolloutWorker] | None:
        """What makes another worker, as long as one is to be made."""
        return self._replace if self._num_replaced < self._max_replaced else None

    def idle_seconds(self) -> float:
        """Time so far in which a worker had no request: the mean of those that are there."""
        now = time.perf_counter()
        idle = [self._clocks[worker.name].idle(now) for worker in self.workers]
        return sum(idle) / len(idle) if idle else 0.0

    def serve(
        self, dispatch: Dispatch, *, give: bool = True, at_once: bool = False, abort: bool = False
    ) -> list[Completion]:
        """One round: hand out, collect what has ended. Returns the answers that there are now.

        Waits a moment where nothing happens.

        Args:
            give: hand out requests that wait.
            at_once: all of them, whatever the workers' capacity.
            abort: end those that run; they wait then, with what is written.

        Raises:
            UsageError: a request that no worker can run.
        """
        if give:
            self._share_out(dispatch, at_once)
        answers = []
        for worker in list(self.workers):
            held = dispatch.held(worker.name)
            if abort and held:
                self._try(worker, dispatch, partial(worker.abort, held))
        patience = _ROUND_S / max(1, len(self.workers))
        for worker in list(self.workers):
            for completion in self._try(worker, dispatch, partial(worker.collect, patience)) or []:
                if (answer := dispatch.take_back(worker.name, completion)) is not None:
                    answers.append(answer)
            self._note(worker, dispatch)
        if answers:
            self._num_replaced = 0
        if not self.workers:
            time.sleep(patience)
        return answers

    def generate(
        self, requests: Sequence[Request], dispatch: Dispatch, answers: dict[str, Completion] | None = None
    ) -> list[Completion] | None:
        """Complete these, with nothing else under way; in the requests' order. None: every worker is lost, and the next
        weight update may bring others.

        Args:
            requests: with different ids.
            dispatch: a new one.
            answers: those that are there, by request id; what is answered now is added. With the same ones the next
                call asks for the rest only.

        Raises:
            ForerunError: no worker is left, and none comes.
        """
        answers = {} if answers is None else answers
        for request in requests:
            if request.request_id not in answers:
                dispatch.add(request)
        while len(answers) < len(requests):
            if not self.can_recover:
                raise self.all_lost()
            if not self.workers:
                return None
            answers.update({answer.request_id: answer for answer in self.serve(dispatch, at_once=True)})
        return [answers[request.request_id] for request in requests]

    def update_weights(self, weights: Callable[[], NamedTensors], version: int) -> None:
        """Give every worker the weights, those too that take a lost one's place.

        Args:
            weights: called for each worker.
            version: of the weights.

        Raises:
            ForerunError: no worker is left, and none comes; or one refused them.
        """
        while True:
            self._replace_lost()
            if not self.workers:
                raise self.all_lost()
            for worker in list(self.workers):
                self._try(worker, None, partial(worker.update_weights, weights(), version))
            if self.workers:
                return

    def drafters(self) -> list[tuple[RolloutWorker, str | None]]:
        """Each worker's drafter digest."""
        found = []
        for worker in list(self.workers):
            digest = self._try(worker, None, worker.drafter_digest)
            if worker in self.workers:
                found.append((worker, digest))
        return found

    def all_lost(self) -> ForerunError:
        """What to raise when no worker is left."""
        cause = f": {self._cause}" if self._cause else ""
        return ForerunError(f"every rollout worker is lost{cause}; the same command goes on from the last checkpoint")

    def close(self) -> None:
        """Close the workers."""
        for worker in self.workers:
            with suppress(WorkerLostError):
                worker.close()
        self.workers = []

    def _share_out(self, dispatch: Dispatch, at_once: bool) -> None:
        """To each an equal part, in order, but no more than it has room for; those with the most room come first."""
        room = {worker.name: worker.capacity - len(dispatch.held(worker.name)) for worker in self.workers}
        # Sorting is stable: with equal room they come in their order.
        ordered = sorted(self.workers, key=lambda worker: -room[worker.name])
        for place, worker in enumerate(ordered):
            part = -(-dispatch.num_waiting // (len(ordered) - place))
            requests = dispatch.hand_out(worker.name, part if at_once else min(part, max(0, room[worker.name])))
            if requests:
                self._try(worker, dispatch, partial(worker.submit, requests))
                self._note(worker, dispatch)

    def _try(self, worker: RolloutWorker, dispatch: Dispatch | None, call: Callable[[], Result]) -> Result | None:
        """Call a method of a worker; None where it is lost, which is noted."""
        try:
            return call()
        except WorkerLostError as error:
            self._cause = str(error)
            self.workers.remove(worker)
            self._lost.append(worker.name)
            count = 0 if dispatch is None else dispatch.lose(worker.name)
            self._reissued += count
            logger.warning("%s: %d requests go to others", error, count)
            with suppress(ForerunError):
                worker.close()
            return None

    def _replace_lost(self) -> None:
        if (make := self._maker) is None:
            return
        while self._lost:
            try:
                worker = make(self._lost[0])
            except ForerunError as error:
                # Nor would a further one find its place now, and everything waits meanwhile.
                logger.warning("no rollout worker takes the place of %s: %s", self._lost[0], error)
                return
            del self._lost[0]
            self.workers.append(worker)
            self._num_replaced += 1
            self._clocks.setdefault(worker.name, _IdleClock())

    def _note(self, worker: RolloutWorker, dispatch: Dispatch) -> None:
        self._clocks[worker.name].set(bool(dispatch.held(worker.name)))


class _IdleClock:
    """Counts the seconds in which a worker has nothing to do."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = time.perf_counter()

    def set(self, busy: bool) -> None:
        now = time.perf_counter()
        if busy and self._since is not None:
            self._total, self._since = self._total + now - self._since, None
        elif not busy and self._since is None:
            self._since = now

    def idle(self, now: float) -> float:
        return self._total + (0.0 if self._since is None else now - self._since)
