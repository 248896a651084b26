"""A rank that failed, told the same way whoever started it: its last lines on stderr, then one error.

What a run was given and cannot use is no failure of a rank: every rank finds it, and it is said once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from forerun.errors import ForerunError, UsageError

# Lines of a failed rank's traceback or output that the report shows.
LAST_LINES = 25


class RankFailedError(ForerunError):
    """One rank failed, and with it the run, which exits with 1 whatever the rank's exit code was."""


def name_of(rank: int, local_rank: int, pid: int, host: str) -> str:
    """Which process a rank is."""
    return f"rank {rank} (local rank {local_rank}, process {pid}) on {host}"


def error_of(where: str, exit_code: int, said: str) -> ForerunError:
    """The run's error, of what a rank raised."""
    if exit_code == UsageError.exit_code:
        return UsageError(said)
    return RankFailedError(f"{where} failed with exit code {exit_code}: {said}")


def show_last_lines(rank: int, lines: Sequence[str]) -> None:
    """The last of `lines`, on stderr."""
    for line in lines[-LAST_LINES:]:
        print(f"[rank {rank}] {line}", file=sys.stderr)


def trace_lines(traceback: str) -> list[str]:
    """Of a traceback. None of an error that is a line, which the report itself says."""
    lines = traceback.splitlines()
    return lines if len(lines) > 1 else []


def read_lines(path: Path) -> list[str]:
    """What a rank printed into this file."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
