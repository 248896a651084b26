"""A vLLM engine in a child process, reached over a socket pair; inside/forerun_offline.py has what is said on it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, UsageError
from forerun.rollout.child import ChildProcess
from forerun.rollout.vllm.connection import Asked, Finished
from forerun.rollout.vllm.environment import INSIDE, vllm_environment


class _Ended(ForerunError):
    """The call has no further answers: vLLM reported an error, or is gone."""


class OfflineConnection:
    """Start vLLM in a child process and wait until it is ready.

    Args:
        python: the interpreter that has vLLM.
        arguments: of vLLM's EngineArgs.
        environment: variables for the child.

    Raises:
        UsageError: the interpreter is missing or has no vLLM.
        ForerunError: vLLM does not start; the line holds its own last error.
    """

    def __init__(
        self, python: str | Path, arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = ChildProcess(
                    "vLLM",
                    [str(Path(python).expanduser()), str(INSIDE / "forerun_offline.py"), str(theirs.fileno())],
                    vllm_environment() | dict(environment or {}),
                    pass_fds=[theirs.fileno()],
                )
            except UsageError:
                self._socket.close()
                raise
        self._lines = self._socket.makefile("r", encoding="utf-8")
        # Messages go from a thread of its own, which no Ctrl-C can interrupt in the middle of a line.
        self._sender = ThreadPoolExecutor(1)
        self._calling = threading.Lock()  # answers come in the order of the calls: one call at a time
        self._number = 0
        self._joining = threading.Lock()
        # Of the `generate` that runs and of what was added to it: ids, and messages that have no last answer yet.
        self._names: list[str] = []
        self._open = 0
        self._generates = 0  # calls of it that went to vLLM
        try:
            self._send({"engine": dict(arguments)})
            self._receive()
        except ForerunError as error:
            log = self.process.keep_log()
            self.close()
            if "No module named 'vllm" in str(error):
                log.unlink()
                raise UsageError(f"{python} cannot import vllm: install vLLM in that environment") from None
            raise ForerunError(f"vLLM did not start: {error} (whole log: {log})") from None
        except BaseException:
            self.close()
            raise

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._sender.submit(self._write, message).result()
        except (OSError, RuntimeError):  # the latter: closed already
            raise self._gone() from None

    def _write(self, message: dict[str, Any]) -> None:
        self._socket.sendall((json.dumps(message) + "\n").encode())
        self._generates += message.get("call") == "generate"

    def _receive(self, number: int | None = None) -> dict[str, Any]:
        """The next answer to the call of this number, to `generate` or to `add`; those to calls that were interrupted
        are passed over.
        """
        while True:
            try:
                line = self._lines.readline()
            except OSError:
                line = ""
            if not line:
                raise self._gone()
            answer = json.loads(line)
            if answer.get("number") == number:
                break
        if "error" in answer:
            raise _Ended(f"vLLM: {answer['error']}")
        return answer

    def _gone(self) -> _Ended:
        self.process.wait()
        return _Ended(f"the vLLM process has ended: {self.process.last_error()}")

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._open:
            raise ForerunError(f"vLLM is generating: {name} has to wait until generate has returned")
        with self._calling:
            self._number += 1
            self._send({"call": name, "arguments": arguments, "number": self._number})
            return self._receive(self._number)["value"]

    def generate(self, requests: Sequence[Asked], on_finish: Callable[[Finished], None]) -> None:
        with self._calling:
            self._generate(requests, on_finish)

    def _generate(self, requests: Sequence[Asked], on_finish: Callable[[Finished], None]) -> None:
        before = self._generates
        self._names, self._open = [], 1
        refused: str | None = None
        try:
            self._ask("generate", requests)
            while self._open:
                answer = self._receive()
                if "finished" in answer:
                    on_finish(answer["finished"])
                else:
                    refused = refused or answer.get("refused")
                    self._close_one()
        except _Ended:
            raise
        except BaseException:
            # The caller failed, or was interrupted: nothing of this run may be left on the line.
            self._sender.submit(int).result()  # what was on its way has gone
            if self._generates == before:  # not even asked
                self._close_one()
            while self._open:
                self.abort(self._names)
                while "finished" in self._receive():
                    pass
                self._close_one()
            raise
        finally:
            with self._joining:
                self._open = 0
        if refused is not None:
            raise UsageError(refused)

    def add(self, requests: Sequence[Asked]) -> bool:
        with self._joining:
            if not self._open:
                return False
            self._open += 1
            self._ask("add", requests)
            return True

    def _ask(self, call: str, requests: Sequence[Asked]) -> None:
        self._names += [request["id"] for request in requests]
        self._send({"call": call, "arguments": [requests]})

    def _close_one(self) -> None:
        with self._joining:
            self._open -= 1

    def abort(self, ids: Iterable[str]) -> None:
        self._send({"call": "abort", "arguments": [list(ids)]})

    def worker(self, method: str, *arguments: Any) -> Any:
        return self._call("worker", method, *arguments)

    def reset_prefix_cache(self) -> bool:
        return self._call("reset_prefix_cache")

    def counters(self) -> dict[str, Any]:
        return self._call("counters")

    def sleep(self) -> None:
        self._call("sleep")

    def wake(self, tags: list[str] | None = None) -> None:
        self._call("wake", tags)

    def close(self) -> None:
        self.process.close()
        self._lines.close()
        self._socket.close()
        self._sender.shutdown(wait=False)
