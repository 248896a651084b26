"""Processes of a gloo group that stay up and run one function after another, so many examples share their start."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_S = 60.0
# For their start, in which a busy machine may take minutes over the imports.
START_S = 300.0
# What the ranks need and takes seconds to import: once, in the server that they are forked from.
PRELOADED = ["forerun", "hypothesis", "transformers.models.llama.modeling_llama", "forerun.engines.megatron.engine"]

Task = Callable[[dist.ProcessGroup, Any], Any]


class Ranks:
    """`world_size` processes, and a group of the first n of them for every n in `sizes`.

    Use as a context manager. The functions that they run are sent by name, so they must stand in a module.
    """

    def __init__(self, world_size: int, sizes: Sequence[int], store: Path) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._connections: list[Connection] = []
        self._processes = []
        self._up = False
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world_size, tuple(sizes), str(store), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()  # ends the loop in `_serve`
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()

    def run(self, task: Task, arguments: Sequence[Any]) -> list[Any]:
        """`task(group, arguments[rank])` on the group of the first len(arguments) ranks; their results in order."""
        if not self._up:
            for rank, connection in enumerate(self._connections):
                if not connection.poll(START_S):
                    raise TimeoutError(f"rank {rank} has not started within {START_S:g} s")
                connection.recv()
            self._up = True
        chosen = self._connections[: len(arguments)]
        for connection, argument in zip(chosen, arguments, strict=True):
            connection.send((task, len(arguments), argument))
        results = []
        for rank, connection in enumerate(chosen):
            if not connection.poll(TIMEOUT_S):
                raise TimeoutError(f"rank {rank} of {len(chosen)} has not answered for {TIMEOUT_S:g} s")
            failure, result = connection.recv()
            if failure is not None:
                raise AssertionError(f"rank {rank} of {len(chosen)} failed:\n{failure}")
            results.append(result)
        return results


def _serve(rank: int, world_size: int, sizes: Sequence[int], store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_S / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    groups = {size: dist.new_group(list(range(size)), timeout=timeout) for size in sizes}
    connection.send("up")
    while True:
        try:
            task, size, argument = connection.recv()
        except EOFError:
            break
        try:
            connection.send((None, task(groups[size], argument)))
        except Exception:
            connection.send((traceback.format_exc(), None))
    dist.destroy_process_group()
