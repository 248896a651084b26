"""Virtual environments for the outside programs that judge us, built on demand and kept.

`NAME.txt` beside this file pins everything that program NAME needs; it is installed with --no-deps. An environment lies
in $FORERUN_ORACLE_CACHE (default ~/.cache/forerun/oracles) under a key made from the Python version and that file. It
counts as there only once its marker file is, so an interrupted build starts over; a lock keeps two processes apart.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
NAMES = tuple(sorted(file.stem for file in HERE.glob("*.txt")))


class OracleUnavailable(Exception):
    """The environment cannot be built here; the message says why, in one line."""


def environment(name: str, say: Callable[[str], None] = print) -> Path:
    """The Python interpreter of the environment of `name`, which is built first if need be.

    Args:
        name: one of `NAMES`.
        say: told, in one line, when a build starts and ends.

    Raises:
        OracleUnavailable: it cannot be built.
    """
    requirements = HERE / f"{name}.txt"
    cache = Path(os.environ.get("FORERUN_ORACLE_CACHE") or Path.home() / ".cache" / "forerun" / "oracles")
    key = hashlib.sha256(platform.python_version().encode() + requirements.read_bytes()).hexdigest()[:16]
    place = cache / f"{name}-{key}"
    interpreter, marker = place / "bin" / "python", place / ".whole"
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{name}-{key}.lock"):
        if not marker.exists():
            shutil.rmtree(place, ignore_errors=True)
            say(f"building the oracle environment {name} in {place} (minutes, once)")
            start = time.monotonic()
            _run([sys.executable, "-m", "venv", str(place)])
            pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--retries", "1"]
            # The file says what goes together, whatever a package declares.
            _run([*pip, "--no-deps", "--ignore-requires-python", "--requirement", str(requirements)])
            marker.touch()
            say(f"built the oracle environment {name} in {time.monotonic() - start:.0f} s")
    return interpreter


def packages(interpreter: Path) -> Path:
    """Where an environment's packages lie."""
    (place,) = (interpreter.parents[1] / "lib").glob("python*/site-packages")
    return place


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # given up by the system when the process ends, however it ends
        yield


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        reason = (errors or lines or [f"exit code {done.returncode}"])[-1]
        raise OracleUnavailable(f"`{' '.join(command[1:4])}` failed: {reason}")
