"""Which requests wait, which worker holds which, and what is written of each: bookkeeping without threads or workers.

A request is answered exactly once. What its worker lost is handed out again, with the id and the seed that it had; what
an abort cut short is handed out again as its continuation.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from forerun.rollout.pieces import as_ended, continuation, joined
from forerun.rollout.protocol import Completion, Request


@dataclass
class Pending:
    """A request without an answer.

    Attributes:
        request: as it was asked.
        number: its place among all requests.
        written: what is written of it so far, None at first.
        worker: who holds it; None while it waits.
    """

    request: Request
    number: int
    written: Completion | None = None
    worker: str | None = None


class Dispatch:
    """Hands out requests in the order in which they came, and joins what comes back.

    Args:
        tokenizer: the model's; needed with stop strings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.tokenizer = tokenizer
        self._pending: dict[str, Pending] = {}
        self._waiting: list[tuple[int, str]] = []  # a heap of (number, id)
        self._number = 0

    @property
    def num_waiting(self) -> int:
        """Requests that no worker holds."""
        return len(self._waiting)

    def held(self, worker: str | None = None) -> list[str]:
        """Ids of the requests that this worker holds; that any worker holds, for None."""
        return [
            request_id
            for request_id, pending in self._pending.items()
            if pending.worker is not None and worker in (None, pending.worker)
        ]

    def pending(self) -> list[Pending]:
        """Every request without an answer, in order."""
        return sorted(self._pending.values(), key=lambda pending: pending.number)

    def add(self, request: Request, written: Completion | None = None) -> None:
        """Let a request wait behind those that came before it.

        Raises:
            ValueError: one with its id has no answer yet.
        """
        if request.request_id in self._pending:
            raise ValueError(f"request {request.request_id!r} has no answer yet")
        self._pending[request.request_id] = Pending(request, self._number, written)
        self._wait(request.request_id)
        self._number += 1

    def hand_out(self, worker: str, count: int) -> list[Request]:
        """The first `count` waiting requests, which this worker holds from now on."""
        requests = []
        for _ in range(min(count, len(self._waiting))):
            _, request_id = heapq.heappop(self._waiting)
            pending = self._pending[request_id]
            pending.worker = worker
            requests.append(
                pending.request if pending.written is None else continuation(pending.request, pending.written)
            )
        return requests

    def take_back(self, worker: str, completion: Completion) -> Completion | None:
        """Note what a worker returned: the answer to a request, or None where there is none (yet).

        There is none to what this worker does not hold - it was thought lost, or says it twice - which is dropped; and
        none yet where the request was aborted: it waits for its continuation, in its old place.
        """
        pending = self._pending.get(completion.request_id)
        if pending is None or pending.worker != worker:
            return None
        pending.worker = None
        if pending.written is not None:
            completion = joined(pending.request, pending.written, completion, self.tokenizer)
        completion = as_ended(pending.request, completion)
        if completion.finish_reason == "abort":
            pending.written = completion
            self._wait(completion.request_id)
            return None
        del self._pending[completion.request_id]
        return completion

    def lose(self, worker: str) -> int:
        """A worker is gone: what it held waits again, in its old place. Returns how many requests that are."""
        lost = self.held(worker)
        for request_id in lost:
            self._pending[request_id].worker = None
            self._wait(request_id)
        return len(lost)

    def _wait(self, request_id: str) -> None:
        heapq.heappush(self._waiting, (self._pending[request_id].number, request_id))
