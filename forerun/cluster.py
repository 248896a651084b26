"""Ray: a small one of this machine's own that ends with the run, or one that runs, by its address.

This module and those that work inside Ray are the only ones that import it, and only when a run asks for it.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from forerun.errors import ForerunError, UsageError, one_line
from forerun.signals import handle_sigterm, interrupt

logger = logging.getLogger(__name__)

# A bucket of weights must fit several times; the memory is taken only as it is used.
OBJECT_STORE_BYTES = 1 << 30
_PASSED_ON = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS")
_CONNECT_S = 10.0
# Removes a directory when its standard input ends, also where a scheduler ends all processes of a run at once. Some of
# these may still write there, and make it anew: it has gone once it is not there for a second.
_REMOVE = """
import os, shutil, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdin.read()
absent = 0
for _ in range(600):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    absent = 0 if os.path.exists(sys.argv[1]) else absent + 1
    if absent == 10:
        break
    time.sleep(0.1)
"""
# How long the end of a block waits for that.
_REMOVED_S = 5.0


def import_ray() -> Any:
    """The module, told to send nothing anywhere and to print only what a run prints.

    Raises:
        UsageError: it is not installed.
    """
    for name, value in (
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_DEDUP_LOGS", "0"),
        ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
    ):
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise UsageError("this needs Ray: pip install -e '.[ray]'") from None
    return ray


@contextmanager
def connected(address: str | None, cpus: int) -> Iterator[Any]:
    """The module `ray`, connected. In a process that is connected already, that connection, which stays.

    Args:
        address: HOST:PORT of a Ray that runs, or "auto" for this machine's. None starts one here, on the loopback
            interface alone and behind a token of its own, without a dashboard; it ends with the block. If this process
            is killed it ends too, the last of its processes within two minutes.
        cpus: that the one which is started says it has, if this machine has fewer.

    Raises:
        UsageError: Ray is not installed, or the address is no address.
        ForerunError: it does not start, or nobody answers.
        KeyboardInterrupt: this process was asked to end (SIGTERM).
    """
    if address is None:
        # Read when Ray is imported. Ray listens to the whole network otherwise, whatever address its node is given.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", _token())
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    earlier = signal.getsignal(signal.SIGTERM)
    settings: dict[str, Any] = {
        "address": address or "local",
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": {name: os.environ[name] for name in _PASSED_ON if name in os.environ}},
    }
    if address is None:
        settings |= {
            "include_dashboard": False,
            "num_cpus": max(cpus, len(os.sched_getaffinity(0))),
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    elif address != "auto":
        _knock(address)
    with nullcontext() if address else _folder() as folder:
        try:
            try:
                ray.init(**settings, _temp_dir=folder)
            except Exception as error:  # Ray raises bare ones, too
                where = "does not start" if address is None else f"at distributed.ray_address={address} cannot be used"
                raise ForerunError(f"Ray {where}: {one_line(error)}") from error
            # Ray's own handler ends its processes at once, and this one aborts when it calls them after that.
            handle_sigterm(interrupt)
            yield ray
        finally:
            ray.shutdown()
            handle_sigterm(earlier or signal.SIG_DFL)


@contextmanager
def _folder() -> Iterator[str]:
    """A directory that a process beside this one removes at the end of the block, or of this process. If that takes
    long it says so, and the block ends before it."""
    folder = tempfile.mkdtemp(prefix="ray-")
    command = [sys.executable, "-I", "-S", "-c", _REMOVE, folder]
    remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield folder
    finally:
        try:
            remover.communicate(timeout=_REMOVED_S)
        except subprocess.TimeoutExpired:
            logger.warning("processes of Ray still write into %s: it is removed within a minute", folder)


@functools.cache
def _token() -> str:
    """One for the life of this process: Ray reads it once, and would not get into its second Ray by another."""
    return secrets.token_hex(32)


def _knock(address: str) -> None:
    """Find out that nobody is there before Ray does, which takes minutes over it."""
    host, colon, port = address.rpartition(":")
    if not colon or "//" in address or not port.isdecimal():
        raise UsageError(f"distributed.ray_address={address} is no address: give the HOST:PORT of `ray start --head`")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError as error:
        raise ForerunError(
            f"nobody answers at distributed.ray_address={address} ({one_line(error)}): start Ray there "
            "(ray start --head), or unset it to start one on this machine"
        ) from error
