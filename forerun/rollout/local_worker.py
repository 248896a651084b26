"""A rollout worker that is a thread of this process around any rollout engine."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from forerun.errors import ForerunError, UsageError, one_line
from forerun.rollout.protocol import Completion, NamedTensors, Request, RolloutEngine
from forerun.rollout.workers import WorkerLostError

# An abort that comes before the engine has begun is lost on it, so `close` sends it again until all have ended.
_ABORT_AGAIN_S = 0.05


class LocalWorker:
    """A `RolloutWorker`; the engine is its own from now on, and `close` closes it.

    Requests join those that run where the engine lets them; elsewhere they wait until these have ended. The worker is
    lost if its engine raises a ForerunError or runs out of a device's memory; anything else is an error of the program,
    and is raised as it is.

    Args:
        engine: awake, and not generating.
        capacity: requests that it runs at once.
        name: of the worker and its thread.
    """

    def __init__(self, engine: RolloutEngine, capacity: int, name: str = "local-0") -> None:
        self.name = name
        self.capacity = capacity
        self.engine = engine
        self.dtype: torch.dtype | None = engine.dtype
        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._held: set[str] = set()
        self._done: list[Completion] = []
        self._generating = False
        self._closing = False
        # What ended it. Of a lost one in words: a traceback would hold on to the memory that its engine used.
        self._lost: str | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"rollout {name}", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """See `RolloutWorker.submit`."""
        with self._changed:
            self._check()
            self._held.update(request.request_id for request in requests)
            self._inbox += requests
            self._changed.notify_all()
            self._join_running()

    def collect(self, timeout_s: float) -> list[Completion]:
        """See `RolloutWorker.collect`."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._has_ended(), timeout_s)
            done, self._done = self._done, []
            if not done:  # what ended before the failure is good
                self._check()
            return done

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `RolloutWorker.abort`. One that the engine is about to begin is not met: ask again."""
        wanted = set(request_ids)
        with self._changed:
            self._check()
            waiting = [request for request in self._inbox if request.request_id in wanted]
            self._inbox = [request for request in self._inbox if request.request_id not in wanted]
            for request in waiting:
                self._finish(_untouched(request))
        try:
            self.engine.abort(wanted)
        except ForerunError as error:  # of one whose process has just gone: its thread will hear of that as well
            with self._changed:
                self._end(error)
                self._check()

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """See `RolloutWorker.update_weights`."""
        with self.at_rest():
            self.engine.update_weights(named_tensors, version)

    def drafter_digest(self) -> str | None:
        """See `RolloutWorker.drafter_digest`."""
        with self.at_rest():
            return self.engine.drafter_digest()

    def close(self) -> None:
        """See `RolloutWorker.close`."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._inbox.clear()
            self._changed.notify_all()
        while self._thread.is_alive():
            with suppress(ForerunError):  # an engine that is gone has nothing to end
                self.engine.abort(list(self._held))
            self._thread.join(_ABORT_AGAIN_S)
        self.engine.close()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Holds the worker's lock, with the engine not generating.

        Raises:
            WorkerLostError: the block raised a ForerunError other than a UsageError, or ran out of a device's memory;
                the worker is lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._generating)
            self._check()
            try:
                yield
            except UsageError:
                raise
            except (ForerunError, torch.OutOfMemoryError) as error:
                self._end(error)
                self._check()

    # ---- the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._closing)
                if self._closing:
                    return
                requests, self._inbox = self._inbox, []
                self._generating = True
            try:
                self.engine.generate(requests, self._on_finish)
            except BaseException as error:
                with self._changed:
                    self._end(error)
                return
            with self._changed:
                if (left := len(self._held) - len(self._inbox)) and not self._closing:
                    return self._end(ForerunError(f"the engine returned and left {left} requests unanswered"))
                self._generating = False
                self._changed.notify_all()

    def _on_finish(self, completion: Completion) -> None:
        with self._changed:
            self._finish(completion)
            self._join_running()

    # ---- with the lock held

    def _finish(self, completion: Completion) -> None:
        self._held.discard(completion.request_id)
        self._done.append(completion)
        self._changed.notify_all()

    def _join_running(self) -> None:
        """Give what waits to the call of `generate` that runs, if it takes it; else it waits for the next."""
        if not self._inbox or not self._generating or self._closing:
            return
        try:
            self.engine.add(self._inbox)
        except UsageError:
            raise
        except ForerunError:
            return
        self._inbox = []

    def _end(self, error: BaseException) -> None:
        if isinstance(error, ForerunError | torch.OutOfMemoryError) and not isinstance(error, UsageError):
            self._lost = f"{one_line(error):.300}"
        else:
            self._error = error
        self._generating = False
        self._changed.notify_all()

    def _has_ended(self) -> bool:
        return self._lost is not None or self._error is not None

    def _check(self) -> None:
        """Raise what ended the worker."""
        if self._closing:
            raise WorkerLostError(f"rollout worker {self.name} is closed")
        if self._lost is not None:
            raise WorkerLostError(f"rollout worker {self.name}: {self._lost}")
        if self._error is not None:
            raise self._error


def _untouched(request: Request) -> Completion:
    """Of a request that was aborted before it began."""
    return Completion(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        token_ids=[],
        log_probs=[],
        raw_log_probs=[],
        finish_reason="abort",
        weight_versions=[],
        spec_num_draft_tokens=0,
        spec_num_accepted_tokens=0,
        spec_num_verify_steps=0,
        drafted_per_depth=[],
        accepted_per_depth=[],
        accepted_draft=[],
    )
