"""A rollout worker that is a Ray actor: an engine in a process of its own, on this machine or another.

Weights travel through Ray's object store, one bucket at a time, and are read there without a copy.
"""

from __future__ import annotations

import functools
import os
import socket
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ForerunError, one_line
from forerun.models.weight_stream import Named
from forerun.rollout.local_worker import LocalWorker
from forerun.rollout.protocol import Completion, NamedTensors, Request, RolloutEngine, UpdatesInParts
from forerun.rollout.served import buckets
from forerun.rollout.workers import WorkerLostError

# A tensor in the object store: its name, dtype and shape, and its bytes.
_Stored = tuple[str, torch.dtype, tuple[int, ...], np.ndarray]


@dataclass(frozen=True)
class RayWorkerSettings:
    """What a worker needs.

    Attributes:
        capacity: requests that it runs at once.
        num_cpus: CPUs that Ray sets aside for it.
        num_gpus: GPUs that Ray sets aside for it and lets it see.
        bucket_bytes: of weights on their way, or one tensor that is larger.
        start_timeout_s: seconds until its engine must be there.
        timeout_s: seconds for an answer (to a bucket of weights, a digest, ...), after which it counts as lost.
    """

    capacity: int
    num_cpus: float = 1
    num_gpus: float = 0
    bucket_bytes: int = 256 << 20
    start_timeout_s: float = 1800.0
    timeout_s: float = 600.0


class RayWorker:
    """A `RolloutWorker`.

    Args:
        ray: the module, connected (`forerun.cluster.connected`).
        make_engine: makes the engine in the actor's process. It is sent there, and what it refers to must be
            importable there.
        settings: see there.
        name: of the worker.

    Attributes:
        process: the actor's host and process id.
    """

    def __init__(
        self, ray: Any, make_engine: Callable[[], RolloutEngine], settings: RayWorkerSettings, name: str
    ) -> None:
        self.name = name
        self.capacity = settings.capacity
        self.dtype: torch.dtype | None = None
        self.process = ("a machine of the cluster", 0)
        self._ray = ray
        self._settings = settings
        self._lost: str | None = None
        options = {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus, "max_restarts": 0}
        self._actor = ray.remote(_EngineActor).options(**options).remote()
        self._starting = self._actor.start.remote(make_engine, settings.capacity, name)

    def wait_until_ready(self) -> None:
        """For the engine; before anything else is asked.

        Raises:
            UsageError: `make_engine` raised one.
            ForerunError: the engine was not made, or not in time.
        """
        settings = self._settings
        try:
            self.dtype, self.process = self._answer("start", self._starting, settings.start_timeout_s)
        except WorkerLostError as error:
            raise ForerunError(
                f"{error}; it asks Ray for {settings.num_cpus:g} CPU and {settings.num_gpus:g} GPU"
            ) from None

    def submit(self, requests: Sequence[Request]) -> None:
        """See `RolloutWorker.submit`."""
        self._ask("submit", list(requests))

    def collect(self, timeout_s: float) -> list[Completion]:
        """See `RolloutWorker.collect`."""
        return self._ask("collect", timeout_s, timeout_s=timeout_s + self._settings.timeout_s)

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `RolloutWorker.abort`."""
        self._ask("abort", list(request_ids))

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """See `RolloutWorker.update_weights`. One that breaks off leaves the worker with a part of it: it is lost."""
        self._ask("begin_update")
        try:
            for bucket in buckets(named_tensors, self._settings.bucket_bytes):
                # Freed with the reference, when the worker has answered.
                self._ask("add_weights", self._ray.put([_stored(name, tensor) for name, tensor in bucket]))
            self._ask("end_update", version)
        except BaseException as error:
            self._lose(f"a weight update broke off: {one_line(error)}")
            raise

    def drafter_digest(self) -> str | None:
        """See `RolloutWorker.drafter_digest`."""
        return self._ask("drafter_digest")

    def close(self) -> None:
        """See `RolloutWorker.close`. One that is not ready is ended as it is."""
        if self._lost is None and self.process[1]:
            with suppress(ForerunError):
                self._ask("close")
        self._lose("it was closed")

    def _ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """The actor's answer; what it raised is raised here.

        Raises:
            WorkerLostError: there is none.
        """
        if self._lost is not None:
            raise WorkerLostError(f"rollout worker {self.name}: {self._lost}")
        timeout_s = self._settings.timeout_s if timeout_s is None else timeout_s
        return self._answer(method, getattr(self._actor, method).remote(*arguments), timeout_s)

    def _answer(self, method: str, reference: Any, timeout_s: float) -> Any:
        errors = self._ray.exceptions
        try:
            failure, value = self._ray.get(reference, timeout=timeout_s)
        except errors.GetTimeoutError:
            self._lose(f"no answer to {method} within {timeout_s:g} s")
        except errors.RayActorError:
            host, process = self.process
            self._lose(f"process {process} on {host} has died")
        except errors.RayError as error:
            self._lose(f"{method}: {one_line(getattr(error, 'cause', None) or error):.300}")
        else:
            if failure is None:
                return value
            if not isinstance(failure, WorkerLostError):
                raise failure
            self._lose(str(failure))
        raise WorkerLostError(f"rollout worker {self.name}: {self._lost}")

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._ray.kill(self._actor)  # nothing remains of one that hangs, either


def start_workers(
    ray: Any, make_engine: Callable[[], RolloutEngine], settings: RayWorkerSettings, names: Sequence[str]
) -> list[RayWorker]:
    """Workers of these names, ready; they start side by side.

    Raises:
        UsageError: see `RayWorker.wait_until_ready`.
        ForerunError: likewise; none is left then.
    """
    workers = [RayWorker(ray, make_engine, settings, name) for name in names]
    try:
        for worker in workers:
            worker.wait_until_ready()
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return workers


def _replying(method: Callable[..., Any]) -> Callable[..., tuple[ForerunError | None, Any]]:
    """What the method raises, or returns: Ray would wrap an exception, and print it."""

    @functools.wraps(method)
    def reply(*arguments: Any) -> tuple[ForerunError | None, Any]:
        try:
            return None, method(*arguments)
        except ForerunError as error:
            return error, None

    return reply


class _EngineActor:
    """Inside the actor: an engine with a thread of its own."""

    _worker: LocalWorker

    @_replying
    def start(
        self, make_engine: Callable[[], RolloutEngine], capacity: int, name: str
    ) -> tuple[torch.dtype | None, tuple[str, int]]:
        self._worker = LocalWorker(make_engine(), capacity, name)
        self._parts: list[Named] = []
        return self._worker.dtype, (socket.gethostname(), os.getpid())

    @_replying
    def submit(self, requests: list[Request]) -> None:
        self._worker.submit(requests)

    @_replying
    def collect(self, timeout_s: float) -> list[Completion]:
        return self._worker.collect(timeout_s)

    @_replying
    def abort(self, request_ids: list[str]) -> None:
        self._worker.abort(request_ids)

    @_replying
    def begin_update(self) -> None:
        engine = self._worker.engine
        with self._worker.at_rest():
            self._update = engine.begin_update() if isinstance(engine, UpdatesInParts) else None

    @_replying
    def add_weights(self, bucket: list[_Stored]) -> None:
        tensors = [_tensor(*stored) for stored in bucket]
        if self._update is not None:
            self._update.add(tensors)
        else:  # they stay in the object store until the engine takes all at once
            self._parts += tensors

    @_replying
    def end_update(self, version: int) -> None:
        engine = self._worker.engine
        if isinstance(engine, UpdatesInParts):
            engine.end_update(version)
        else:
            parts, self._parts = self._parts, []
            self._worker.update_weights(parts, version)

    @_replying
    def drafter_digest(self) -> str | None:
        return self._worker.drafter_digest()

    @_replying
    def close(self) -> None:
        self._worker.close()


def _stored(name: str, tensor: Tensor) -> _Stored:
    tensor = tensor.detach().to("cpu").contiguous()
    return name, tensor.dtype, tuple(tensor.shape), tensor.flatten().view(torch.uint8).numpy()


def _tensor(name: str, dtype: torch.dtype, shape: tuple[int, ...], data: np.ndarray) -> Named:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the object store's memory is read-only, and is only read
        return name, torch.from_numpy(data).view(dtype).reshape(shape)
