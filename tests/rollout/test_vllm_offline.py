"""The line to a vLLM in a child process, with a child that speaks the protocol and is slow to read."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from forerun.errors import ForerunError
from forerun.rollout.vllm import offline
from forerun.rollout.vllm.connection import Asked, Finished
from forerun.trainers.rollout_engines import make_rollout_engine
from tests.trainers.tiny import make_model, make_tokenizer
from tests.trainers.tiny_rl import MTP, settings

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


# Keeps what it is started with, and does not start.
TOLD = """
import json, pathlib, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
pathlib.Path(__file__).with_name("told.json").write_text(connection.makefile("r").readline())
connection.sendall(json.dumps({"error": "told"}).encode() + b"\\n")
"""


@pytest.mark.parametrize(
    ("changes", "sleeps"),
    [
        ([], True),
        (["rollout.free_cache_engine=false"], False),
        (["rollout.engine_kwargs.enable_sleep_mode=false"], False),
        (["async_training.enable=true"], False),
    ],
    ids=["sleeps", "stays", "own word", "asynchronous"],
)
def test_a_run_s_settings_reach_vllm(
    changes: list[str], sleeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "forerun_offline.py").write_text(TOLD, encoding="utf-8")
    monkeypatch.setattr(offline, "INSIDE", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the log stays
    make_model().save_pretrained(tmp_path / "trunk")
    config = settings(
        tmp_path,
        *MTP,
        f"model.path={tmp_path / 'trunk'}",
        "mtp.enable_rollout=true",
        "rollout.engine=vllm",
        f"rollout.python={sys.executable}",
        "rollout.gpu_memory_utilization=0.4",
        *changes,
    )
    with pytest.raises(ForerunError, match="told"):
        make_rollout_engine(config, None, make_tokenizer())
    told = json.loads((tmp_path / "told.json").read_text())["engine"]
    assert told["enable_sleep_mode"] is sleeps and told["gpu_memory_utilization"] == 0.4
    assert told["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 1}
