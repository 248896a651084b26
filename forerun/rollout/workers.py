"""What asynchronous training asks of a rollout worker: an engine that generates on its own while the trainer trains.

`rollout.local_worker.LocalWorker` makes one of any `RolloutEngine` with a thread of this process. Whoever drives it
calls every method from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch

from forerun.errors import ForerunError
from forerun.rollout.protocol import Completion, NamedTensors, Request


class WorkerLostError(ForerunError):
    """A rollout worker is gone, and with it every request that it held; its caller gives them to another one.

    Any method of a worker may raise it, and from then on every one but `close` does.
    """


@runtime_checkable
class RolloutWorker(Protocol):
    """A rollout engine that works by itself: requests go in at any time, completions come out as they end.

    Attributes:
        name: for people and for the log; different for each worker of a run.
        capacity: requests that it runs at once. More may be submitted; they wait in the worker.
        dtype: what the engine holds its weights in, which `drafter_digest` is of; None: in what `update_weights`
            brings.
    """

    name: str
    capacity: int
    dtype: torch.dtype | None

    def submit(self, requests: Sequence[Request]) -> None:
        """Take these in and return at once. Ids differ from those of all requests that have not been collected.

        Raises:
            UsageError: a request that no worker of this kind can run (see `RolloutEngine.generate`); it may be raised
                by the next `collect` instead.
            WorkerLostError: see there; the requests are not with the worker.
        """
        ...

    def collect(self, timeout_s: float) -> list[Completion]:
        """The requests that ended since the last call, aborted ones among them, each exactly once.

        Returns as soon as there is one, and after `timeout_s` with none. 0 looks only.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these as soon as can be, those too that wait in the worker. Each is collected as ever: with what it has
        and finish_reason "abort", or as it ended just before. Ids that the worker does not hold are passed over.
        """
        ...

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """See `RolloutEngine.update_weights`; returns when the worker generates with them.

        Called only when every request was collected. `named_tensors` is read once, before this returns: they may be
        the trainer's live ones.
        """
        ...

    def drafter_digest(self) -> str | None:
        """See `RolloutEngine.drafter_digest`."""
        ...

    def close(self) -> None:
        """End the worker, its requests and its engine. May be called twice, and when it is lost."""
        ...
