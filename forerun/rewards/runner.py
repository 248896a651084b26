"""Scores responses in worker processes with a time limit, so that no reward function can stop or kill a run."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import IO, Any

from forerun.errors import UsageError
from forerun.rewards.protocol import RewardRequest, RewardResult

_START_LIMIT_S = 120.0


class RewardRunner:
    """Runs one reward function in `num_workers` processes. Use as a context manager, or call `close`.

    Args:
        spec: "math", "exact_match", "reasoning_gym", "auto" (by data source), "package.module:function" or
            "path/to/file.py:function" with the signature of `RewardFunction` (or verl's).
        time_limit_s: seconds for one response; then its worker is killed and another started.
        num_workers: processes that score at the same time.
        kwargs: further keyword arguments for a function of the user's own; JSON values.

    Raises:
        UsageError: the function cannot be found or imported.
    """

    def __init__(
        self,
        spec: str = "auto",
        time_limit_s: float = 10.0,
        num_workers: int = 1,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if time_limit_s <= 0 or num_workers < 1:
            raise UsageError(
                f"reward time_limit_s={time_limit_s} must be positive and num_workers={num_workers} at least 1"
            )
        self._workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all = [_Worker(spec, time_limit_s, kwargs or {}) for _ in range(num_workers)]
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")
        self.events: Counter[str] = Counter()
        self._counting = threading.Lock()
        try:
            for worker in self._all:
                worker.start()
                self._workers.put(worker)
        except BaseException:
            self.close()
            raise

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Judge responses, in any number of threads; results in the requests' order. Events are counted in `events`."""
        results = list(self._threads.map(self._score_one, requests))
        with self._counting:
            self.events.update(result.event for result in results if result.event is not None)
        return results

    def close(self) -> None:
        """End the worker processes. A call of `score` that waits for one, in another thread, ends too."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._all:
            worker.kill()
        self._threads.shutdown()  # each thread has its worker's pipes for itself until then
        for worker in self._all:
            worker.stop()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _score_one(self, request: RewardRequest) -> RewardResult:
        worker = self._workers.get()
        try:
            return worker.score(request)
        finally:
            self._workers.put(worker)


class _Worker:
    """One process of `forerun.rewards.worker`, restarted when it hung or died."""

    def __init__(self, spec: str, time_limit_s: float, kwargs: Mapping[str, Any]) -> None:
        self.spec = spec
        self.kwargs = dict(kwargs)
        self.time_limit_s = time_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._killed = False

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "forerun.rewards.worker"),
                *(self.spec, str(self.time_limit_s), json.dumps(self.kwargs)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a kill reaches what the function itself started; Ctrl-C does not
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        if self._killed:
            self.kill()
        assert self._process.stderr is not None
        self._log = _Tail(self._process.stderr)
        self._unread = b""
        reply = self._read(_START_LIMIT_S)
        if reply is None or "error" in reply:
            reason = f"its process did not start: {self._last_log_line()}" if reply is None else reply["error"]
            self.stop()
            raise UsageError(f"reward function: {reason}")

    def score(self, request: RewardRequest) -> RewardResult:
        if self._process is None:
            try:
                self.start()
            except (UsageError, OSError) as error:  # it did start once: no reason to end the run
                return RewardResult(0.0, "died", str(error))
        assert self._process is not None and self._process.stdin is not None
        line = json.dumps(
            {
                "prompt": request.prompt,
                "response": request.response,
                "ground_truth": request.ground_truth,
                "data_source": request.data_source,
                "extra": request.extra,
            },
            default=str,
        )
        started = time.monotonic()
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
            reply = self._read(self.time_limit_s)
        except BrokenPipeError:
            reply = None
        if reply is None:
            hung = time.monotonic() - started >= self.time_limit_s
            detail = f"no result within {self.time_limit_s:g} s" if hung else self._last_log_line()
            self.stop()
            return RewardResult(0.0, "timeout" if hung else "died", detail)
        if "event" in reply:
            return RewardResult(0.0, str(reply["event"]), str(reply["detail"]))
        return RewardResult(float(reply["score"]), fields=reply["fields"])

    def kill(self) -> None:
        """Kill the process, and one that takes its place; whoever waits for its reply hears of it. For any thread."""
        self._killed = True
        process = self._process
        if process is not None and process.poll() is None:
            _kill_all(process)

    def stop(self) -> None:
        if self._process is None:
            return
        _kill_all(self._process)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that was not taken any more
                    stream.close()
        self._process.wait()
        self._process = None

    def _read(self, limit_s: float) -> dict[str, Any] | None:
        """The next reply, or None when the process ended or the limit passed."""
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        fd = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                data = os.read(fd, 65536)
                if not data:
                    return None
                self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _last_log_line(self) -> str:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1)
        lines = self._log.text().split("\n")
        code = self._process.returncode if self._process is not None else None
        return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")[:300]


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker and what its function started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _Tail:
    """Reads a pipe to its end and keeps what came last: a function that prints without end fills no disk."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept = b""
        self._thread = threading.Thread(target=self._drain, name="reward log", daemon=True)
        self._thread.start()

    def text(self) -> str:
        """What came last, once the pipe has ended; a process that outlives its worker may hold it open."""
        self._thread.join(timeout=1)
        return self._kept.decode(errors="replace")

    def _drain(self) -> None:
        with self._stream:
            while data := os.read(self._stream.fileno(), 65536):
                self._kept = (self._kept + data)[-4096:]
