"""Runs in vLLM's environment: vLLM's OpenAI-compatible server, which ends when standard input closes.

The arguments are the server's own. Whoever started it holds the other end of standard input, so that no server outlives
a trainer that was killed.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _watch() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)  # this process leads its group, vLLM's own are in it


if __name__ == "__main__":
    threading.Thread(target=_watch, daemon=True).start()
    # Not `vllm serve`: in repacked builds that command looks for a distribution named vllm and fails.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
