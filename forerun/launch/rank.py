"""This process as one rank of several that torchrun started: its process group and mesh, its output, how it fails."""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from forerun.config import DistributedConfig, EngineConfig
from forerun.errors import ForerunError, UsageError
from forerun.signals import sigterm_interrupts
from forerun.trainers.setup import resolve_device

# Beside a rank's error file: what ranks other than 0 print.
OUTPUT_FILE = "output.log"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# What torch says of it: gloo, and the store where ranks meet.
_TIMED_OUT = re.compile("timed out (waiting|after)|wait timeout", re.IGNORECASE)


def is_rank() -> bool:
    """Whether torchrun, or what sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def joined(engine: EngineConfig, distributed: DistributedConfig) -> Iterator[DeviceMesh]:
    """The mesh of all ranks, as `engine.fsdp_size` lays it out, on `engine.device`: gloo on the CPU, NCCL on CUDA.

    Raises:
        UsageError: the environment names no meeting place, or more ranks of this machine than it has CUDA devices.
        ForerunError: in place of what torch raises of a rank that was waited for too long.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise UsageError(f"RANK and WORLD_SIZE are set, and {missing[0]} is not: start the ranks with torchrun")
    device, size = resolve_device(engine), int(os.environ["WORLD_SIZE"])
    if device.type == "cuda":
        check_device_count(int(os.environ["LOCAL_RANK"]) + 1)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    try:
        yield _mesh(device, size, engine.fsdp_size or size, timedelta(seconds=distributed.timeout_s))
    except RuntimeError as error:  # torch has no type of its own for it
        if _TIMED_OUT.search(str(error)) is None:
            raise
        raise ForerunError(
            f"another rank was waited for longer than distributed.timeout_s={distributed.timeout_s:g}: raise it if "
            "what that rank did takes so long, such as rank 0's rewards, rollouts or loading a model; else see why "
            "it stood still"
        ) from error
    # Not after a failure: it waits for ranks that may be gone.
    dist.destroy_process_group()


def _mesh(device: torch.device, size: int, shards: int, timeout: timedelta) -> DeviceMesh:
    # With CUDA both: what is kept on the CPU is summed there.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    if shards == size:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device.type, (size // shards, shards), mesh_dim_names=("replicate", "shard"))
    for group in (*mesh.get_all_groups(), mesh._flatten().get_group()):
        _set_pg_timeout(timeout, group)  # those have torch's default; there is no public way
    return mesh


def check_device_count(ranks: int) -> None:
    """Refuse more ranks on this machine than it has CUDA devices.

    Raises:
        UsageError
    """
    if ranks > (found := torch.cuda.device_count()):
        raise UsageError(f"{ranks} ranks on this machine, which has {found} CUDA devices: start one for each")


def run_as_rank(work: Callable[[], None]) -> None:
    """Do a rank's work. What it raises goes into the file where torchrun looks for it, and ends the process.

    Output of ranks other than 0 goes into a file beside that one; without torchrun nowhere, but for what is raised.
    """
    if not os.environ.get(_ERROR_FILE):  # srun or mpirun: nobody would read the files
        with sigterm_interrupts(), ExitStack() as quiet:  # schedulers send it to every rank
            if os.environ["RANK"] != "0":
                nowhere = quiet.enter_context(open(os.devnull, "w"))
                quiet.enter_context(redirect_stdout(nowhere))
                quiet.enter_context(redirect_stderr(nowhere))
            return work()
    if int(os.environ["RANK"]) != 0:
        redirect_output(Path(os.environ[_ERROR_FILE]).with_name(OUTPUT_FILE))
    try:
        record(work, _Recorder())()
    except BaseException as error:
        code = error.exit_code if isinstance(error, ForerunError) else 1
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: ranks that wait for this one fail when its connections close, so never before it has ended. And
        # closing a process group that has lost a rank may take until its timeout.
        os._exit(code)


def leave(code: int) -> NoReturn:
    """End a rank's process as Python does, but for taking the interpreter apart.

    gloo's threads outlive their process group, and one that lets go of a tensor by then aborts the process.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # these two are what Python calls
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it any more
            code = code or 1
    os._exit(code)


def redirect_output(path: Path) -> None:
    """Python's and C's output into a file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(handle, stream.fileno())
    os.close(handle)


def told(error: BaseException) -> tuple[str, str]:
    """What a rank's report says, and its traceback; an error that is meant for the user has none but its line."""
    if isinstance(error, ForerunError):
        return str(error), str(error)
    return f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


class _Recorder(ErrorHandler):
    """torch's error file, with the time in nanoseconds: ranks that a failure takes along fail in the same second."""

    def record_exception(self, e: BaseException) -> None:
        said, trace = told(e)
        info = {
            "py_callstack": trace,
            "timestamp": str(int(time.time())),
            "time_ns": time.time_ns(),
        }
        Path(os.environ[_ERROR_FILE]).write_text(json.dumps({"message": {"message": said, "extraInfo": info}}))
