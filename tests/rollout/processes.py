"""Whether processes that nobody here waits for have ended."""

from __future__ import annotations

import time
from pathlib import Path


def has_ended(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for_end(process: int) -> None:
    deadline = time.monotonic() + 20
    while not has_ended(process):
        assert time.monotonic() < deadline, f"process {process} still runs"
        time.sleep(0.1)
