"""An engine's server of our own on a port of loopback, and waiting until it answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from forerun.errors import ForerunError, UsageError
from forerun.rollout.child import ChildProcess
from forerun.rollout.client import Client

_LEASH = Path(__file__).with_name("leash") / "forerun_leash.py"
_POLL_S = 0.2
_ANSWER_S = 30.0


def start_server(
    name: str,
    python: str | Path,
    module: str,
    arguments: Sequence[str],
    base_url: str,
    environment: Mapping[str, str],
    timeout_s: float,
) -> ChildProcess:
    """Run a module as a server that ends when we do; returns its process once /health says yes.

    Args:
        name: of the program, whose package has the same name in small letters.
        python: interpreter of the environment that has it.
        module: what `python -m` would run.
        arguments: the module's.
        base_url: where these have it listen.
        environment: all of its variables.
        timeout_s: seconds until it must answer.

    Raises:
        UsageError: the interpreter is missing or has no such module.
        ForerunError: the server does not start; the line holds its own last error and where its log lies.
    """
    command = [str(Path(python).expanduser()), str(_LEASH), module, *arguments]
    process = ChildProcess(name, command, environment)
    client = Client(name, base_url, _ANSWER_S)
    deadline = time.monotonic() + timeout_s
    try:
        while process.running:
            if time.monotonic() > deadline:
                raise _not_started(process, f"within {timeout_s:.0f} s")
            with suppress(ForerunError):  # nobody listens yet, or it answers 503 while it loads
                client.get("/health")
                return process
            time.sleep(_POLL_S)
        if f"No module named '{name.lower()}" in process.last_error():
            raise UsageError(f"{python} cannot import {name.lower()}: install {name} in that environment")
        raise _not_started(process, "")
    except BaseException:
        process.close()
        raise


def _not_started(process: ChildProcess, when: str) -> ForerunError:
    what = " ".join(f"{process.name} did not start {when}".split())
    return ForerunError(f"{what}: {process.last_error()} (whole log: {process.keep_log()})")
