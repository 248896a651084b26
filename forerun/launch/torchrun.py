"""Ranks of this machine as processes under torch's elastic agent, which is what torchrun runs; one report if one fails.

The first failure ends the run: the agent ends the other ranks, and each machine reports its own.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from forerun.config import DistributedConfig
from forerun.errors import ForerunError
from forerun.launch.failure import RankFailedError, error_of, name_of, read_lines, show_last_lines, trace_lines
from forerun.launch.rank import OUTPUT_FILE


def start_ranks(arguments: Sequence[str], config: DistributedConfig) -> None:
    """Run `forerun *arguments` as every rank of this machine, until all have ended.

    Raises:
        RankFailedError: the first rank that failed; its last lines are on stderr then.
        UsageError: what the ranks were given cannot be used.
        ForerunError: the machines did not meet in time.
        KeyboardInterrupt: this process was asked to end; the ranks have.
    """
    logs = Path(tempfile.mkdtemp(prefix="forerun-ranks-"))
    several = config.nnodes > 1
    settings = LaunchConfig(
        min_nodes=config.nnodes,
        max_nodes=config.nnodes,
        nproc_per_node=config.nproc_per_node,
        run_id=config.rdzv_id if several else str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint=config.rdzv_endpoint if several and config.rdzv_endpoint else "localhost:0",
        rdzv_configs={"timeout": max(1, int(config.timeout_s))},
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs)),
        shutdown_timeout=int(config.shutdown_timeout_s),
    )
    if config.nproc_per_node > 1:  # or every rank would start a thread for every core
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // config.nproc_per_node)))
    logging.disable(logging.ERROR)  # the agent's account of a failure; ours follows
    try:
        elastic_launch(settings, sys.executable)("-m", "forerun.cli", *arguments)
    except ChildFailedError as error:
        rank, failure = _first(error.failures)
        show_last_lines(rank, _last_lines(failure, logs))
        raise _reported(rank, failure) from None
    except RendezvousError as error:
        raise ForerunError(
            f"the {config.nnodes} machines did not meet at {config.rdzv_endpoint} within distributed.timeout_s="
            f"{config.timeout_s:g} ({error}): start the same command on all of them"
        ) from error
    except SignalException:
        raise KeyboardInterrupt from None
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(logs, ignore_errors=True)


def _raised(failure: ProcessFailure) -> dict[str, Any] | None:
    """What a rank wrote into its error file (`rank._Recorder`); None if it was ended otherwise."""
    said: Any = failure.message
    return said if isinstance(said, dict) else None


def _first(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The failure that took the others along.

    A rank killed by a signal leaves no error file, and what the others raised when it was gone came after it. SIGTERM
    is what the agent sends them.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        failure = item[1]
        if (raised := _raised(failure)) is not None:
            return 1, int(raised["extraInfo"]["time_ns"])
        return (2 if failure.exitcode == -signal.SIGTERM else 0), failure.timestamp

    return min(failures.items(), key=order)


def _reported(rank: int, failure: ProcessFailure) -> ForerunError:
    where = name_of(rank, failure.local_rank, failure.pid, socket.gethostname())
    if (raised := _raised(failure)) is not None:
        return error_of(where, failure.exitcode, raised["message"])
    if failure.exitcode < 0:
        mend = ": the system kills so when memory runs out (dmesg)" if failure.exitcode == -signal.SIGKILL else ""
        return RankFailedError(f"{where} was killed by {failure.signal_name()}{mend}")
    return RankFailedError(f"{where} ended with exit code {failure.exitcode} and did not say why")


def _last_lines(failure: ProcessFailure, logs: Path) -> list[str]:
    """The traceback, or of a rank that left none what it printed (rank 0 prints to the terminal)."""
    if (raised := _raised(failure)) is not None:
        return trace_lines(str(raised["extraInfo"]["py_callstack"]))
    return [line for path in logs.glob(f"*/attempt_0/{failure.local_rank}/{OUTPUT_FILE}") for line in read_lines(path)]
