"""Processes watched at the instants of a piece of work: an instant is just before an access to a file.

Only a process that has no threads yet may fork; one that pytest runs in has.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

PATIENCE_S = 60


def at_every_instant(events: Collection[str], within: Path, act: Callable[[int], None]) -> None:
    """From now on, as long as this process lives, call `act` with their number just before such accesses.

    Args:
        events: names of Python's audit events whose first argument is a path.
        within: the folder in which they count.
    """
    passed = itertools.count()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in events and str(arguments[0]).startswith(f"{within}{os.sep}"):
            act(next(passed))

    sys.addaudithook(watch)


def die_at(instant: int) -> Callable[[int], None]:
    """For `at_every_instant`."""

    def act(number: int) -> None:
        if number == instant:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def forked(work: Callable[[], None]) -> int:
    """Start `work` in another process, which ends with it; its id."""
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)  # or one that hangs would be waited for
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(4)
    return child


def ended(child: int) -> int:
    """Wait for the end of a process; its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
