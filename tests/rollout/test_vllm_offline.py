"""The line to a vLLM in a child process, with a child that speaks the protocol and is slow to read."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from forerun.rollout.vllm import offline
from forerun.rollout.vllm.connection import Asked, Finished

# Once up, reads nothing for a second; then ends requests when they are aborted, or at once where they are few.
CHILD = """
import json, socket, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
lines = connection.makefile("r")
send = lambda answer: connection.sendall((json.dumps(answer) + "\\n").encode())
lines.readline()
send({"value": None, "number": None})
time.sleep(1)
running = []
for line in lines:
    call = json.loads(line)
    if call["call"] == "generate":
        running = [request["id"] for request in call["arguments"][0]]
        if len(running) > 1:
            continue
    elif call["call"] != "abort":
        send({"value": call["call"], "number": call["number"]})
        continue
    for each in running:
        send({"finished": {"id": each}})
    if running:
        send({"value": None, "number": None})
    running = []
"""


def test_an_interrupt_while_requests_are_sent_leaves_the_line_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forerun_offline.py").write_text(CHILD, encoding="utf-8")
    monkeypatch.setattr(offline, "INSIDE", tmp_path)
    connection = offline.OfflineConnection(sys.executable, {})
    many: list[Asked] = [{"id": str(i), "token_ids": [7] * 100_000, "sampling_params": {}} for i in range(40)]
    seen: list[Finished] = []
    try:
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            connection.generate(many, seen.append)
            time.sleep(5)
        assert connection.counters() == "counters"
        connection.generate(many[:1], seen.append)
        assert [finished["id"] for finished in seen] == ["0"]
    finally:
        connection.close()
