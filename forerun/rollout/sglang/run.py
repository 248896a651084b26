"""One call of `generate`: every request a /generate of its own, so that the server batches them as it likes."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from forerun.errors import ForerunError, UsageError
from forerun.rollout.client import Client, Refused
from forerun.rollout.protocol import Completion, Request
from forerun.rollout.sglang.completion import aborted, to_completion
from forerun.rollout.sglang.sampling import to_sglang, top_log_probs_wanted
from forerun.rollout.sglang.server import ServerFacts

# An abort that overtakes its request is lost on the server, so it is sent again until the request has ended.
_ABORT_AGAIN_S = 0.05
# A server that answers no abort for so long hangs.
_ABORT_S = 10.0


class Run:
    """The requests in flight.

    Args:
        client: the server.
        facts: its settings.
        requests: to complete, ids all different.
        seeds: one for each request, None where the server obeys none.
        version: of the weights.
        max_connections: requests that are with the server at once.
    """

    def __init__(
        self,
        client: Client,
        facts: ServerFacts,
        requests: Sequence[Request],
        seeds: Sequence[int | None],
        version: int,
        max_connections: int,
    ) -> None:
        self.client, self.facts, self.version = client, facts, version
        self.requests: list[Request] = []
        self.seeds: list[int | None] = []
        # SGLang aborts every request whose id *begins with* the given one: ids of equal length, and of this run alone.
        self._name = uuid.uuid4().hex
        self.rids: dict[str, str] = {}
        self._aborting: set[str] = set()
        self._running: set[str] = set()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_connections, thread_name_prefix="sglang")
        self._indices: dict[Future[Completion], int] = {}
        self._pending: set[Future[Completion]] = set()
        self._over = False
        self.add(requests, seeds)

    def add(self, requests: Sequence[Request], seeds: Sequence[int | None]) -> bool:
        """Run these too; False where the run is over. For any thread.

        Raises:
            UsageError: the id of a request that runs; none is added.
        """
        with self._lock:
            for request in requests:
                if request.request_id in self._running:
                    raise UsageError(f"a request with the id {request.request_id!r} is running: ids must differ")
            if self._over:
                return False
            for request, seed in zip(requests, seeds, strict=True):
                index = len(self.requests)
                self.requests.append(request)
                self.seeds.append(seed)
                self.rids[request.request_id] = f"{self._name}-{index:09d}"
                self._running.add(request.request_id)
                self._aborting.discard(request.request_id)  # of an earlier one by that name
                future = self._pool.submit(self._complete, index)
                self._indices[future] = index
                self._pending.add(future)
            return True

    def finished(self) -> Generator[tuple[int, Completion], None, None]:
        """Run to the end; yields (index of the request, completion) as they end.

        Raises:
            ForerunError: the server refused a request or is gone; the others are aborted.
        """
        with self._pool:
            try:
                while pending := self._left():
                    done, _ = wait(pending, timeout=_ABORT_AGAIN_S, return_when=FIRST_COMPLETED)
                    for future in sorted(done, key=self._indices.__getitem__):
                        completion = future.result()
                        with self._lock:
                            self._pending.remove(future)
                        yield self._indices[future], completion
                    self._send_aborts()
            finally:  # after an error, here or in the caller's `on_finish`, nothing must go on running
                with self._lock:
                    self._over = True
                    pending = self._pending
                deadline = time.monotonic() + _ABORT_S
                while pending:
                    if time.monotonic() < deadline:
                        self.abort(self.rids)
                    else:  # SGLang aborts what nobody waits for any more
                        self.client.hang_up()
                    _, pending = wait(pending, timeout=_ABORT_AGAIN_S)

    def _left(self) -> set[Future[Completion]]:
        """What has not been handed out; once there is nothing, nothing can be added."""
        with self._lock:
            self._over = not self._pending
            return set(self._pending)

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `RolloutEngine.abort`."""
        with self._lock:
            self._aborting.update(request_id for request_id in request_ids if request_id in self.rids)
        self._send_aborts()

    def _send_aborts(self) -> None:
        with self._lock:
            running = self._aborting & self._running
        for request_id in running:
            try:
                self.client.post("/abort_request", {"rid": self.rids[request_id]}, timeout_s=_ABORT_S)
            except Refused:
                continue
            except ForerunError:  # a server that is gone or hangs shows in the request itself
                return

    def _complete(self, index: int) -> Completion:
        request = self.requests[index]
        try:
            with self._lock:
                if request.request_id in self._aborting:
                    return aborted(request)
            try:
                answer = self.client.post("/generate", self._body(index))
            except Refused:
                raise
            except ForerunError:  # the server may be at it still
                with suppress(ForerunError):
                    self.client.post("/abort_request", {"rid": self.rids[request.request_id]}, timeout_s=_ABORT_S)
                raise
            return to_completion(request, answer, self.facts, self.version)
        finally:
            with self._lock:
                self._running.discard(request.request_id)

    def _body(self, index: int) -> dict[str, Any]:
        request = self.requests[index]
        room = self.facts.context_length - len(request.prompt_token_ids)
        wanted = top_log_probs_wanted(request.sampling)
        return {
            "rid": self.rids[request.request_id],
            "input_ids": list(request.prompt_token_ids),
            "sampling_params": to_sglang(request.sampling, min(request.sampling.max_tokens, room), self.seeds[index]),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
            **({"top_logprobs_num": wanted} if wanted else {}),
        }
