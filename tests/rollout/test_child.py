"""How another interpreter's end is told."""

from __future__ import annotations

import os
import sys

from forerun.rollout.child import ChildProcess, environment_without


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
