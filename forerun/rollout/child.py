"""A process of another interpreter with other packages, started here and never outliving us."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from forerun.errors import UsageError

# An exception's last line, after what loggers and torch put before it; pydantic's says what is wrong below it.
_ERROR = re.compile(
    r"^(?:\(.*?\) )?(?:\w+ \d\d-\d\d [\d:]+ \[\S+\] )?(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)"
)
_STOP_S = 20.0
# For what it started to end when it has, such as the process of Python's that removes shared memory.
_SETTLE_S = 2.0
_POLL_S = 0.01
_LARGEST_LOG = 64 << 20
# Not ours to hand on: where our packages lie.
_KEPT_BACK = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV")
# What makes this process a rank (torchrun's variables): a server started by one would join its group.
_RANK = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


class ChildProcess:
    """A command that ends when its standard input does, with all processes that it starts.

    Args:
        name: what runs in it, for messages: "vLLM" or "SGLang".
        command: interpreter and arguments.
        environment: all of its variables.
        pass_fds: descriptors that it inherits.

    Raises:
        UsageError: there is no such interpreter.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        self._closed = False
        self._log = tempfile.TemporaryFile("w+b", prefix="forerun-")  # noqa: SIM115 - closed in `close`
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # held open: its end tells the process that we are gone
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=tuple(pass_fds),
                start_new_session=True,  # a group of its own, to be ended as a whole
            )
        except OSError as error:
            self._log.close()
            raise UsageError(
                f"cannot start {name}'s interpreter {command[0]} ({error.strerror}): give the python of the "
                f"environment that {name} is installed in"
            ) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended, or does so by itself within this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.running

    def wait(self) -> None:
        """Until it has ended by itself, for as long as it takes to print its last lines."""
        self.ends_within(_STOP_S)

    def last_error(self) -> str:
        """The signal that ended it, and the last line of its output that names an error; else the last line of all."""
        if self._closed:
            return "it was closed"
        lines = [line for line in self._printed(200_000).decode(errors="replace").splitlines() if line.strip()]
        errors = []
        for number, line in enumerate(lines):
            if found := _ERROR.match(line):
                details = takewhile(lambda line: line.startswith("  "), lines[number + 1 : number + 3])
                errors.append(" ".join([found[1], *details]))
        # "Engine core initialization failed. See root cause above." says nothing itself.
        errors = [line for line in errors if "root cause" not in line] or errors
        code = self._process.poll()
        if code is not None and code < 0:  # errors before that need not have to do with it
            errors = [f"it was killed by signal {-code}" + (f" (its last error: {errors[-1]})" if errors else "")]
        return " ".join((errors or lines or [f"exit code {code}"])[-1].split())

    def keep_log(self) -> Path:
        """Write what it printed to a file that stays; returns its path."""
        handle, path = tempfile.mkstemp(prefix=f"forerun-{self.name.lower()}-", suffix=".log")
        with os.fdopen(handle, "wb") as file:
            file.write(self._printed(_LARGEST_LOG))
        return Path(path)

    def _printed(self, most: int) -> bytes:
        """The last bytes of its output, `most` of them. Its place in the file is the process's own: it stays put."""
        handle = self._log.fileno()
        size = os.fstat(handle).st_size
        return os.pread(handle, most, max(0, size - most))

    def close(self) -> None:
        """End it and everything that it started: asked to first, then killed."""
        if self._closed:
            return
        self._closed = True
        self._process.terminate()  # an engine that is killed leaves what it has in /dev/shm
        try:
            self.wait()
            deadline = time.monotonic() + (0 if self.running else _SETTLE_S)
            while time.monotonic() < deadline and self._has_group():
                time.sleep(_POLL_S)
        finally:  # also where a Ctrl-C ends the waiting
            if self._has_group():
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._log.close()

    def _has_group(self) -> bool:
        """Whether anything of what it started is left."""
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True


def environment_without(unwanted: Sequence[str]) -> dict[str, str]:
    """The variables for another interpreter: ours, less `unwanted` and what would mix packages or process groups."""
    left_out = {*_KEPT_BACK, *unwanted}
    kept = {name: value for name, value in os.environ.items() if name not in left_out and not _RANK.fullmatch(name)}
    return kept | {"PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1"}
