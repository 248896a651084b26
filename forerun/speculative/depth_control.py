"""How many tokens to draft in the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DepthControl(Protocol):
    """Chooses the number of drafts per row, step by step. An engine asks before each decode step and reports after."""

    def depth(self, rows: int) -> int:
        """Drafts per row for the next step of `rows` running rows; 0 drafts nothing."""
        ...

    def observe(self, rows: int, depth: int, seconds: float, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Take note of one decode step.

        Args:
            rows: rows that ran.
            depth: drafts per row that it was run with.
            seconds: wall time of the step, without prefill.
            drafted: drafts judged at each depth over all rows, index 0 = depth 1.
            accepted: how many of them were accepted.
        """
        ...


class FixedDepth:
    """Always the same number of drafts."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def depth(self, rows: int) -> int:
        return self._depth

    def observe(self, rows: int, depth: int, seconds: float, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        pass
