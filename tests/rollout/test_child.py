"""How another interpreter's end is told."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from forerun.rollout.child import ChildProcess, environment_without
from tests.rollout.processes import wait_for_end


def ended(program: str) -> str:
    child = ChildProcess("vLLM", [sys.executable, "-S", "-c", program], environment_without(()))
    assert child.ends_within(60)
    told = child.last_error()
    child.close()
    assert child.last_error() == "it was closed"
    return told


def test_what_ended_it_is_told_and_not_what_went_before() -> None:
    kill = "import os; os.kill(os.getpid(), 9)"
    assert ended(kill) == "it was killed by signal 9"
    assert ended(f"print('ValueError: old', flush=True); {kill}") == (
        "it was killed by signal 9 (its last error: ValueError: old)"
    )
    assert ended("print('one'); raise KeyError('two')") == "KeyError: 'two'"
    assert ended("print('one'); raise SystemExit(3)") == "one"
    assert ended("raise SystemExit(3)") == "exit code 3"


def test_reading_the_log_does_not_move_where_it_is_written() -> None:
    """Both write through one open file, whose place they share."""
    program = "import sys\nfor i in range(3): print('line', i, flush=True); sys.stdin.read(1)"
    child = ChildProcess("vLLM", [sys.executable, "-S", "-c", program], environment_without(()))
    stdin = child._process.stdin
    assert stdin is not None
    for i in range(3):
        while not child.last_error().endswith(f"line {i}"):
            pass
        os.write(stdin.fileno(), b"x")
    assert child.ends_within(60)
    log = child.keep_log()
    assert log.read_text(encoding="utf-8").splitlines() == ["line 0", "line 1", "line 2"]
    log.unlink()
    child.close()


STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(other.pid))
time.sleep(600)
"""
ORDERLY = """
import os, pathlib, signal, sys, time
kept = pathlib.Path(sys.argv[1])
if os.fork() == 0:  # as Python's resource tracker, it removes what is left when the other one is gone
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.close()
    parent = os.getppid()
    kept.touch()
    while os.getppid() == parent:
        time.sleep(0.01)
    time.sleep(0.2)
    kept.unlink()
    os._exit(0)
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
time.sleep(600)
"""


def started(program: str, file: Path) -> ChildProcess:
    child = ChildProcess("vLLM", [sys.executable, "-S", "-c", program, str(file)], environment_without(()))
    while not file.exists() or (program is STUBBORN and not file.read_text()):
        time.sleep(0.01)
    return child


def test_it_is_asked_to_end_and_what_it_started_gets_to(tmp_path: Path) -> None:
    child = started(ORDERLY, tmp_path / "kept")
    child.close()
    assert not (tmp_path / "kept").exists() and not child.running


def test_an_interrupted_close_kills_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = started(STUBBORN, tmp_path / "other")

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(child, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        child.close()
    assert not child.running
    wait_for_end(int((tmp_path / "other").read_text()))
    child.close()
