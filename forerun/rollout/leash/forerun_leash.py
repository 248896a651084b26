"""Runs in a server's environment: its module, as `python -m` would, until standard input closes.

The first argument is the module, the others are the server's own. Whoever started it holds the other end of standard
input, so that no server outlives a trainer that was killed. Python puts this file's folder on the search path: nothing
else may lie here.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _watch() -> None:
    while os.read(0, 1):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)  # this process leads its group, the server's own are in it


if __name__ == "__main__":
    threading.Thread(target=_watch, daemon=True).start()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
