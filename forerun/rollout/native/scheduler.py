"""Which request runs in which cache row.

Requests are admitted in their order, as soon as a row is free and the memory for it. Rows whose prompt is in the cache
decode, and keep to the first rows; behind them come those whose prompt is on its way, in their order of admission. Of
these, only the first can hold anything yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from forerun.rollout.native.sequence import Running


class Move(NamedTuple):
    """The first `length` positions of cache row `source` go to row `target`."""

    source: int
    target: int
    length: int


@dataclass
class Retired:
    """What `Scheduler.retire` did.

    Attributes:
        finished: the sequences that were taken out.
        kept: for each sequence that still decodes, in order, the row that it had.
        moves: to make in the cache, in this order.
    """

    finished: list[Running]
    kept: list[int]
    moves: list[Move]


class Scheduler:
    """Waiting, prefilling and decoding sequences; decoding[r] holds cache row r, prefilling[i] row len(decoding) + i.

    Args:
        max_rows: how many can run at once.
        max_tokens: positions that the cache can have, all rows together.
        slack: positions that a row may need beyond its limit.
        overhead: what a row takes besides, however long it is, in positions.
    """

    def __init__(self, max_rows: int, max_tokens: int, slack: int, overhead: int) -> None:
        self.waiting: deque[Running] = deque()  # in the order of admission
        self.prefilling: list[Running] = []
        self.decoding: list[Running] = []
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.slack = slack
        self.overhead = overhead

    @property
    def rows(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def expected_rows(self) -> int:
        """Rows that what is here can come to take."""
        return min(self.max_rows, self.rows + len(self.waiting))

    @property
    def longest(self) -> int:
        """Positions that the longest admitted sequence can come to need."""
        return max((s.limit for s in (*self.decoding, *self.prefilling)), default=0) + self.slack

    def admit(self) -> None:
        """Let waiting sequences in while there is a row and, once all have grown to their limits, memory for them."""
        while self.waiting and self.rows < self.max_rows:
            longest = max(self.longest, self.waiting[0].limit + self.slack)
            if (self.rows + 1) * (longest + self.overhead) > self.max_tokens:
                break
            self.prefilling.append(self.waiting.popleft())

    def join(self) -> Running:
        """The first prefilling sequence decodes from now on; its row stays."""
        sequence = self.prefilling.pop(0)
        self.decoding.append(sequence)
        return sequence

    def abort(self, request_ids: set[str]) -> list[Running]:
        """Mark these as finished, unless they are already; those that still waited are taken out and returned."""
        for s in (*self.waiting, *self.prefilling, *self.decoding):
            if s.request.request_id in request_ids and s.finish_reason is None:
                s.finish_reason = "abort"
        taken = [s for s in self.waiting if s.finish_reason is not None]
        self.waiting = deque(s for s in self.waiting if s.finish_reason is None)
        return taken

    def retire(self) -> Retired:
        """Take finished sequences out of the rows and close the gaps that they leave."""
        count = len(self.decoding)
        finished = [s for s in self.decoding if s.finish_reason is not None]
        kept = list(range(count))
        moves = []
        row = 0
        while row < len(self.decoding):
            if self.decoding[row].finish_reason is None:
                row += 1
                continue
            last, place = self.decoding.pop(), kept.pop()
            if row < len(self.decoding):
                self.decoding[row], kept[row] = last, place
                if last.finish_reason is None:
                    moves.append(Move(place, row, last.length))
        head = self.prefilling[0] if self.prefilling else None
        if head is not None and head.finish_reason is None and head.prefilled and len(self.decoding) < count:
            moves.append(Move(count, len(self.decoding), head.prefilled))
        finished += [s for s in self.prefilling if s.finish_reason is not None]
        self.prefilling = [s for s in self.prefilling if s.finish_reason is None]
        return Retired(finished, kept, moves)
