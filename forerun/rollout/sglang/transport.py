"""The two ways in which tensors reach an SGLang server: inside the request, or by broadcast of a process group."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed
from torch import Tensor

from forerun.errors import ForerunError, one_line
from forerun.models.weight_stream import Named
from forerun.rollout.client import Client
from forerun.rollout.loopback import HOST, free_port
from forerun.rollout.sglang.payload import encode

Backend = Literal["gloo", "nccl"]
_POLL_S = 0.005
# For a group to come together, and for a bucket to go through it.
_TIMEOUT_S = 300.0
# For a server to leave a group that broke.
_ABANDONED_S = 10.0


class Transport(Protocol):
    """Brings one bucket after the other into the server's weights."""

    reaches_drafter_always: bool

    def send(self, bucket: Sequence[Named], settings: Mapping[str, Any]) -> None:
        """Load a bucket. `settings` are further fields of the request.

        Raises:
            ForerunError: the server refused, or is gone.
        """
        ...

    def close(self) -> None: ...


@dataclass
class InRequest:
    """/update_weights_from_tensor with the data inside the request: any server, any device, no shared memory.

    Every rank takes its shard from a copy of its own, so tensor parallelism multiplies what is sent.
    """

    client: Client
    tp_size: int
    reaches_drafter_always = True

    def send(self, bucket: Sequence[Named], settings: Mapping[str, Any]) -> None:
        text = encode(bucket)
        body = {"serialized_named_tensors": [text] * self.tp_size, **settings}
        self.client.post("/update_weights_from_tensor", body)

    def close(self) -> None:
        """Nothing is held."""


class Broadcast:
    """/update_weights_from_distributed: torch.distributed, we are rank 0, the server's ranks come after.

    Args:
        client: the server.
        tp_size: its ranks.
        backend: nccl between GPUs, gloo between CPUs.

    Raises:
        ForerunError: the group did not come together.
    """

    # Versions without begin_weight_update leave the draft worker's weights as they were (SGLang issue 27718).
    reaches_drafter_always = False

    def __init__(self, client: Client, tp_size: int, backend: Backend) -> None:
        self.client = client
        self.tp_size = tp_size
        self.backend = backend
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._group: torch.distributed.ProcessGroup | None = None
        self._join()

    def _join(self) -> None:
        self.name = f"forerun_weights_{time.time_ns()}"
        port, size = free_port(), self.tp_size + 1
        body = {
            "master_address": HOST,
            "master_port": port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": self.name,
            "backend": self.backend,
        }
        call = _Call(lambda: self.client.post("/init_weights_update_group", body, _TIMEOUT_S))
        try:
            self._group = join_group(port, size, self.name, self.backend, _TIMEOUT_S)
        except Exception as error:  # torch.distributed raises many kinds
            call.failure_within(_POLL_S)
            raise ForerunError(
                f"no process group with the SGLang server ({one_line(error):.200}): see its log, or send weights in "
                "requests (rollout.weight_transport=request)"
            ) from None
        call.result()

    def send(self, bucket: Sequence[Named], settings: Mapping[str, Any]) -> None:
        if self._group is None:
            self._join()
        try:
            self._send(bucket, settings)
        except BaseException:
            # The server waits in the group for what does not come; whoever sends again is in another one.
            self._abandon()
            raise

    def _send(self, bucket: Sequence[Named], settings: Mapping[str, Any]) -> None:
        tensors = [tensor.detach().to(self.device).contiguous() for _, tensor in bucket]
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": self.name,
            **settings,
        }
        call = _Call(lambda: self.client.post("/update_weights_from_distributed", body, _TIMEOUT_S))
        for tensor in tensors:
            self._broadcast(tensor, call)
        call.result()

    def _broadcast(self, tensor: Tensor, call: _Call) -> None:
        """One tensor; given up as soon as the server refuses, since it will not receive then."""
        try:
            work = torch.distributed.broadcast(tensor, group=self._group, group_src=0, async_op=True)
        except RuntimeError as error:  # NCCL's, which only finds here that a GPU is in the group twice
            traceback.clear_frames(error.__traceback__)  # which hold the group, and with it its connections
            raise ForerunError(
                f"no weights can be broadcast to the SGLang server ({one_line(error):.200}): start it on GPUs that the "
                "trainer does not send from, or set rollout.weight_transport=request"
            ) from None
        assert work is not None
        deadline = time.monotonic() + _TIMEOUT_S
        while not work.is_completed():
            call.failure_within(_POLL_S)
            if time.monotonic() > deadline:
                raise ForerunError(f"the SGLang server took no weights for {_TIMEOUT_S:.0f} s: see its log")
        work.wait()

    def close(self) -> None:
        """Leave the group, and have the server leave it."""
        if self._group is None:
            return
        try:
            self.client.post("/destroy_weights_update_group", {"group_name": self.name}, _TIMEOUT_S)
        finally:
            self._destroy()

    def _abandon(self) -> None:
        """Leave it in the middle of a broadcast. Either side may wait there for the other, and hears when it goes."""
        body = {"group_name": self.name}
        call = _Call(lambda: self.client.post("/destroy_weights_update_group", body, _ABANDONED_S))
        with suppress(RuntimeError):  # what broke the broadcast says more
            self._destroy()
        with suppress(ForerunError):
            call.result()

    def _destroy(self) -> None:
        group, self._group = self._group, None
        torch.distributed.destroy_process_group(group)


class _Call:
    """A request that runs beside what it waits for."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._error = error

    def result(self) -> None:
        """Wait for the answer; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def failure_within(self, seconds: float) -> None:
        """Raise what went wrong, if it has by then."""
        self._thread.join(seconds)
        if not self._thread.is_alive() and self._error is not None:
            raise self._error


def join_group(
    port: int, world_size: int, name: str, backend: Backend, timeout_s: float
) -> torch.distributed.ProcessGroup:
    """Rank 0 of a group beside the default one, which the server's ranks are not in.

    torch has no public way to make such a group, and both sides must derive the same keys of the store: these are the
    calls that SGLang's ranks make (`init_custom_process_group`, which comes from OpenRLHF).
    """
    from torch.distributed.distributed_c10d import (
        Backend,
        GroupName,
        PrefixStore,
        _new_process_group_helper,
        _world,
        rendezvous,
    )

    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(rendezvous(f"tcp://{HOST}:{port}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        size, rank, [], Backend(backend), PrefixStore(name, store), group_name=GroupName(name), timeout=timeout
    )
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group
