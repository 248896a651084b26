"""Ranks as Ray actors, each with its place in a placement group; one report if one fails, as for those of torchrun."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from forerun.cluster import connected, import_ray
from forerun.config import DistributedConfig
from forerun.errors import ForerunError, one_line
from forerun.launch.failure import RankFailedError, error_of, name_of, read_lines, show_last_lines, trace_lines
from forerun.launch.rank import redirect_output, told
from forerun.rollout.loopback import free_port

# After the first failure: how long the other ranks get to say that they failed before it, or to be found dead.
_SETTLE_S = 10.0
# Ray passes on what rank 0 prints a moment later.
_OUTPUT_LAG_S = 0.5


@dataclass
class _Place:
    """Where a rank's process is, and the file that it prints into (ranks other than 0)."""

    node_id: str
    address: str
    host: str
    pid: int
    output: Path


@dataclass
class _Raised:
    """What a rank's work raised, and when (nanoseconds since the epoch)."""

    said: str
    trace: str
    exit_code: int
    time_ns: int


class _Rank:
    """Inside the actor. Its methods run in the process's main thread."""

    def __init__(self, rank: int, local_rank: int, world_size: int, directory: str) -> None:
        self.rank = rank
        self.local_rank = local_rank
        # Of the devices that Ray lets this process see, which is one.
        seen = "0" if os.environ.get("CUDA_VISIBLE_DEVICES") else str(local_rank)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": seen}
        with suppress(OSError):  # another machine need not have it; relative paths are then from where Ray was started
            os.chdir(directory)

    def __repr__(self) -> str:
        return f"rank {self.rank}"  # before each line that it prints

    def place(self, threads: int | None, local_size: int) -> _Place:
        ray = import_ray()
        context = ray.get_runtime_context()
        logs = Path(context.get_temp_dir(), context.get_session_name(), "logs")
        output = logs / f"forerun-rank-{self.rank}-{os.getpid()}.log"
        if self.rank != 0:
            redirect_output(output)
        # Ray sets OMP_NUM_THREADS to the CPUs of the actor.
        torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_size))
        address = ray.util.get_node_ip_address()
        return _Place(context.get_node_id(), address, socket.gethostname(), os.getpid(), output)

    def port(self) -> int:
        return free_port()

    def work(self, work: Callable[[], None], address: str, port: int) -> _Raised | None:
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        try:
            work()
            return None
        except BaseException as error:
            said, trace = told(error)
            return _Raised(said, trace, error.exit_code if isinstance(error, ForerunError) else 1, time.time_ns())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def start_ranks(
    work: Callable[[], None], config: DistributedConfig, wants_cuda: bool | None, more_cpus: float = 0
) -> None:
    """Do `work` as every rank, each in a process of its own, until all have ended.

    Args:
        work: what a rank does, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set. It is sent there,
            and what it refers to must be importable there.
        config: `nnodes` machines with `nproc_per_node` ranks each, of the Ray at `ray_address`.
        wants_cuda: whether every rank needs a GPU; None: if there are any.
        more_cpus: that `work` will ask Ray for itself.

    Raises:
        RankFailedError: the first rank that failed; its last lines are on stderr then.
        UsageError: Ray is not installed, or what the ranks were given cannot be used.
        ForerunError: Ray does not start or answer, or has no room for the ranks within `timeout_s`.
    """
    with connected(config.ray_address, cpus=math.ceil(config.nproc_per_node + more_cpus)) as ray:
        gpus = 1 if (wants_cuda if wants_cuda is not None else ray.cluster_resources().get("GPU", 0) > 0) else 0
        group = _reserve(ray, config, gpus)
        actors: list[Any] = []
        try:
            actors += _create(ray, config, gpus, group)
            places = _places(ray, actors, config)
            port = ray.get(actors[0].port.remote(), timeout=config.timeout_s)
            running = {actor.work.remote(work, places[0].address, port): rank for rank, actor in enumerate(actors)}
            failures = _failures(ray, running, actors)
            if failures:
                rank, raised = min(failures.items(), key=_order)
                lines = _last_lines(ray, places[rank]) if raised is None else trace_lines(raised.trace)
                show_last_lines(rank, lines)
                raise _reported(rank, rank % config.nproc_per_node, places[rank], raised)
            time.sleep(_OUTPUT_LAG_S)
        finally:
            for actor in actors:
                ray.kill(actor)
            ray.util.remove_placement_group(group)


def _reserve(ray: Any, config: DistributedConfig, gpus: int) -> Any:
    """A bundle for each machine, with room for its ranks."""
    size = config.nproc_per_node
    bundle = {"CPU": size} | ({"GPU": size * gpus} if gpus else {})
    group = ray.util.placement_group([bundle] * config.nnodes, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=config.timeout_s)
    except BaseException as error:
        ray.util.remove_placement_group(group)
        if not isinstance(error, ray.exceptions.GetTimeoutError):
            raise
        there = ", ".join(f"{ray.cluster_resources().get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        asked = " and ".join(f"{count:g} {name}" for name, count in bundle.items())
        raise ForerunError(
            f"Ray has had no room within distributed.timeout_s={config.timeout_s:g} for {asked} on each of "
            f"{config.nnodes} machines; it has {there} on {len(ray.nodes())} in all: ask for fewer ranks, add "
            "machines, or end what else runs there"
        ) from None
    return group


def _create(ray: Any, config: DistributedConfig, gpus: int, group: Any) -> list[Any]:
    size = config.nproc_per_node
    make = ray.remote(_Rank).options
    place = partial(ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy, group)
    return [
        make(num_cpus=1, num_gpus=gpus, max_restarts=0, scheduling_strategy=place(rank // size)).remote(
            rank, rank % size, config.nnodes * size, os.getcwd()
        )
        for rank in range(config.nnodes * size)
    ]


def _places(ray: Any, actors: Sequence[Any], config: DistributedConfig) -> list[_Place]:
    threads = os.environ.get("OMP_NUM_THREADS")
    asked = [actor.place.remote(int(threads) if threads else None, config.nproc_per_node) for actor in actors]
    try:
        return ray.get(asked, timeout=config.timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise ForerunError(
            f"the ranks' processes have not started within distributed.timeout_s={config.timeout_s:g}: raise it"
        ) from None
    except ray.exceptions.RayError as error:  # such as a machine without Forerun
        raise ForerunError(f"a rank's process does not start: {_gist(error)}") from None


def _failures(ray: Any, running: dict[Any, int], actors: Sequence[Any]) -> dict[int, _Raised | None]:
    """Of every rank that failed until all had ended or the first failure was `_SETTLE_S` old; None: it is dead."""
    failures: dict[int, _Raised | None] = {}
    deadline: float | None = None
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, _ = ray.wait(list(running), timeout=left)
        if not done:
            break
        rank = running.pop(done[0])
        raised: _Raised | None = None
        try:
            raised = ray.get(done[0])
            if raised is None:
                continue
            ray.kill(actors[rank])  # ranks that wait for this one fail when its connections close
        except ray.exceptions.RayActorError:
            pass
        except ray.exceptions.RayError as error:  # such as work that cannot be imported there
            raised = _Raised(_gist(error), str(error), ForerunError.exit_code, time.time_ns())
        failures[rank] = raised
        deadline = deadline or time.monotonic() + _SETTLE_S
    return failures


def _order(failure: tuple[int, _Raised | None]) -> tuple[bool, int]:
    """The one that took the others along comes first: what others raised when a rank was gone came after it."""
    raised = failure[1]
    return raised is not None, 0 if raised is None else raised.time_ns


def _reported(rank: int, local_rank: int, place: _Place, raised: _Raised | None) -> ForerunError:
    where = name_of(rank, local_rank, place.pid, place.host)
    if raised is not None:
        elsewhere = "" if place.host == socket.gethostname() else f" (on {place.host})"
        return error_of(where, raised.exit_code, raised.said + elsewhere)
    return RankFailedError(
        f"{where} was killed, or ended without a word: the system kills so when memory runs out (dmesg)"
    )


def _last_lines(ray: Any, place: _Place) -> list[str]:
    """What a dead rank had printed, read on its machine; none if that is gone too, or of rank 0, which prints here."""
    on_its_machine = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    read = ray.remote(read_lines).options(num_cpus=0, max_retries=0, scheduling_strategy=on_its_machine)
    try:
        return ray.get(read.remote(place.output), timeout=_SETTLE_S)
    except ray.exceptions.RayError:
        return []


def _gist(error: Exception) -> str:
    """The last line of what Ray says, which is the error itself; before it come traces of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(error) if not lines else lines[-1]
