"""The process that vLLM runs in: another interpreter with other packages, started here and never outliving us."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from forerun.errors import UsageError

INSIDE = Path(__file__).with_name("inside")  # the only files of ours that vLLM's interpreter may import
# An exception's last line, after what vLLM's loggers and torch put before it; pydantic's says what is wrong below it.
_ERROR = re.compile(
    r"^(?:\(.*?\) )?(?:\w+ \d\d-\d\d [\d:]+ \[\S+\] )?(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)"
)
_STOP_S = 20.0
# Not ours to hand on: where our packages lie, and leave for vLLM to unpickle what it is sent.
_KEPT_BACK = ("PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "VLLM_ALLOW_INSECURE_SERIALIZATION")


class VLLMProcess:
    """A script of `inside/` in the interpreter that has vLLM.

    Args:
        python: the interpreter.
        script: the script's name.
        arguments: its arguments.
        environment: variables to add.
        pass_fds: descriptors that it inherits.

    Raises:
        UsageError: there is no such interpreter, or vLLM cannot be imported in it.
    """

    def __init__(
        self,
        python: str | Path,
        script: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._log = tempfile.TemporaryFile("w+b", prefix="forerun-vllm-")  # noqa: SIM115 - closed in `close`
        try:
            self._process = subprocess.Popen(
                [str(Path(python).expanduser()), str(INSIDE / script), *arguments],
                stdin=subprocess.PIPE,  # held open: its end tells the process that we are gone
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=vllm_environment() | dict(environment or {}),
                pass_fds=tuple(pass_fds),
                start_new_session=True,  # a group of its own, to be ended as a whole
            )
        except OSError as error:
            self._log.close()
            raise UsageError(
                f"cannot start vLLM's interpreter {python} ({error.strerror}): give the python of the environment that "
                "vLLM is installed in"
            ) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> None:
        """Until it has ended by itself, for as long as it takes to print its last lines."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)

    def last_error(self) -> str:
        """The last line of its output that names an error; else the signal that ended it, or the last line of all."""
        if self._log.closed:
            return "it was closed"
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 200_000))
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        errors = []
        for number, line in enumerate(lines):
            if found := _ERROR.match(line):
                details = takewhile(lambda line: line.startswith("  "), lines[number + 1 : number + 3])
                errors.append(" ".join([found[1], *details]))
        # "Engine core initialization failed. See root cause above." says nothing itself.
        errors = [line for line in errors if "root cause" not in line] or errors
        code = self._process.poll()
        if not errors and code is not None and code < 0:
            errors = [f"it was killed by signal {-code}"]
        return " ".join((errors or lines or [f"exit code {code}"])[-1].split())

    def close(self) -> None:
        """End it and everything that it started."""
        if self._log.closed:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def vllm_environment() -> dict[str, str]:
    """The environment variables that vLLM is started with: ours, less what would mix the two sets of packages."""
    own = dict(os.environ) | {
        "PYTHONPATH": str(INSIDE),  # by which vLLM's workers find the extension
        "PYTHONNOUSERSITE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {name: value for name, value in own.items() if name not in _KEPT_BACK}
