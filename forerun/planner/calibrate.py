"""Step costs and acceptance measured on this machine, with the engine that will run.

The native engine tells its depth control the time of every step, so one rollout in which rows drop out and depths take
turns measures them all. Another engine only shows whole calls; there, the time of a step is what more tokens add.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forerun.speculative.step_costs import StepCosts

if TYPE_CHECKING:
    from forerun.rollout.native.engine import NativeEngine
    from forerun.rollout.protocol import Request, RolloutEngine

# Measured steps do not grow old while a plan is made.
_FOREVER = 1e9
# Weight of a measured step, so that where there are measurements they count and the fitted law does not.
_WEIGHT = 8.0
_STEPS_PER_DEPTH = 3
_ROUNDS = 2


@dataclass
class Calibration:
    """What was measured (a `forerun.planner.cost.StepCost`).

    Attributes:
        costs: seconds per (rows, depth).
        drafted, accepted: drafts per depth, index 0 = depth 1.
    """

    costs: StepCosts
    drafted: list[int]
    accepted: list[int]

    def seconds(self, rows: int, depth: int, context: float) -> float:
        """See `StepCost.seconds`. The cache is as long as it was while measuring, whatever `context` says."""
        return self.costs.predict(rows, depth)[0]

    @property
    def acceptance(self) -> list[float]:
        """Accepted drafts per draft at each depth that was tried."""
        shares = [a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d]
        return [min(shares[: k + 1]) for k in range(len(shares))]


class _Rotation:
    """Takes the depths in turns and notes what each step took (a `DepthControl`)."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.found = Calibration(StepCosts(_FOREVER), [0] * max_depth, [0] * max_depth)
        self._rows = 0
        self._steps = 0
        self._before = 0

    def depth(self, rows: int) -> int:
        if rows != self._rows:
            self._rows, self._steps = rows, 0
        return self._steps // _STEPS_PER_DEPTH % (self.max_depth + 1)

    def observe(self, rows: int, depth: int, seconds: float, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self._steps += 1
        if depth == self._before:  # the first step after a change also feeds the drafter's cache
            self.found.costs.observe(rows, depth, seconds, _WEIGHT)
        self._before = depth
        for k, (judged, kept) in enumerate(zip(drafted, accepted, strict=True)):
            self.found.drafted[k] += judged
            self.found.accepted[k] += kept


def calibrate_native(engine: NativeEngine, requests: Sequence[Request], max_rows: int, max_depth: int) -> Calibration:
    """Measure steps of max_rows rows, half as many, ... down to one, at depths 0..max_depth.

    Args:
        engine: a native engine; its depth control and depth are put back afterwards.
        requests: prompts to continue, over and over where there are fewer than rows. Their sampling holds, but for the
            lengths and the stop tokens.
        max_rows: most rows.
        max_depth: deepest depth; 0 measures plain steps only.
    """
    sizes = [max_rows >> i for i in range(max_rows.bit_length())]
    # Tokens in which every depth gets its steps even if all drafts are accepted.
    tokens = _ROUNDS * _STEPS_PER_DEPTH * sum(range(1, max_depth + 2))
    lengths = []
    for place in range(max_rows):
        level = next(i for i, rows in enumerate(reversed(sizes)) if place < rows)
        lengths.append((len(sizes) - level) * tokens)
    asked = [_with_length(requests[i % len(requests)], f"calibration {i}", length) for i, length in enumerate(lengths)]
    rotation = _Rotation(max_depth)
    before = engine.num_speculative_tokens, engine.depth_control
    try:
        engine.num_speculative_tokens, engine.depth_control = max_depth, _Rotation(max_depth)
        engine.generate(asked)  # builds what the first steps of each shape build
        engine.depth_control = rotation
        engine.generate(asked)
    finally:
        engine.num_speculative_tokens, engine.depth_control = before
    return rotation.found


def calibrate_by_calls(
    engine: RolloutEngine,
    depth: int,
    requests: Sequence[Request],
    sizes: Sequence[int],
    tokens: int = 32,
    rounds: int = 4,
) -> Calibration:
    """Measure steps at the engine's own fixed depth, from what `tokens` more tokens add to a call of `generate`.

    Rows that accept more end earlier, so the rows of a step are the average over the call.

    Args:
        engine: any engine of the protocol that reports drafts.
        depth: drafts per step that it was started with.
        requests: see `calibrate_native`.
        sizes: numbers of rows to measure.
        tokens: of the shorter call; the longer has twice as many.
        rounds: pairs of calls for each size, each with prompts of its own while there are any; a step takes what the
            median pair says.
    """
    found = Calibration(StepCosts(_FOREVER), [0] * depth, [0] * depth)

    def call(rows: int, first: int, length: int) -> tuple[float, float]:
        """Seconds and steps of one call."""
        asked = [_with_length(requests[(first + i) % len(requests)], f"row {i}", length) for i in range(rows)]
        before = engine.speculation_totals()
        started = time.perf_counter()
        engine.generate(asked)
        seconds = time.perf_counter() - started
        after = engine.speculation_totals()
        if not depth or before is None or after is None:
            return seconds, length - 1
        steps = after.num_verify_steps - before.num_verify_steps
        accepted = before.accepted_per_depth or [0] * depth
        for k in range(depth):
            found.drafted[k] += steps
            found.accepted[k] += after.accepted_per_depth[k] - accepted[k]
        return seconds, steps / rows

    for rows in sizes:
        call(rows, 0, tokens)  # builds what the first steps of each shape build
        measured = []
        for first in range(0, rounds * rows, rows):
            (short, few), (long, many) = call(rows, first, tokens), call(rows, first, 2 * tokens)
            measured.append(max(long - short, 1e-6) / max(many - few, 1e-6))
        found.costs.observe(rows, depth, statistics.median(measured), 100 * _WEIGHT)
    return found


def _with_length(request: Request, request_id: str, length: int) -> Request:
    sampling = replace(request.sampling, max_tokens=length, min_tokens=0, stop=(), stop_token_ids=())
    return replace(request, request_id=request_id, sampling=sampling)
