"""Calibration: what it measures is what the clock says, and it leaves the engine as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from forerun.planner import calibrate
from forerun.planner.calibrate import calibrate_by_calls, calibrate_native
from forerun.planner.plan import make_plan
from forerun.planner.timeline import Span
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Completion, Request, SamplingParams, SpeculationTotals
from tests.rollout import tiny


@pytest.fixture
def engine() -> NativeEngine:
    return NativeEngine(tiny.carrier(), num_speculative_tokens=1, max_num_seqs=4, products="linear")


REQUESTS = [Request(f"{i}", [i + 1, i + 2, i + 3], SamplingParams(temperature=0)) for i in range(3)]


def test_the_native_engine_is_measured_at_every_depth_and_put_back(engine: NativeEngine) -> None:
    found = calibrate_native(engine, REQUESTS, max_rows=4, max_depth=2)
    assert engine.num_speculative_tokens == 1 and engine.depth_control is None
    for rows in (1, 2, 4):
        for depth in range(3):
            seconds, measured = found.costs.predict(rows, depth)
            assert seconds > 0 and measured >= 1, (rows, depth)
    assert found.drafted[0] >= found.drafted[1] > 0
    assert all(0 <= share <= 1 for share in found.acceptance)
    plan = make_plan(found, found.acceptance, [Span(4, 3, 0), Span(1, 9, 0)], 2)
    assert plan.batches[0].step_seconds == pytest.approx([found.costs.predict(4, k)[0] for k in range(3)])


def test_acceptance_is_what_the_engine_counts(engine: NativeEngine) -> None:
    before = engine.speculation_totals()
    assert before is not None and before.num_draft_tokens == 0
    found = calibrate_native(engine, REQUESTS, max_rows=2, max_depth=1)
    after = engine.speculation_totals()
    assert after is not None
    # Two rollouts of the same requests, the first of which only warms up.
    assert 2 * found.drafted[0] == pytest.approx(after.num_draft_tokens, rel=0.25)


class Clock:
    """A machine of known speed behind the engines' protocol: a step takes a + b * rows * (depth + 1) seconds.

    Every draft of every other step is accepted.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.now = 0.0
        self.totals = SpeculationTotals(accepted_per_depth=[0] * depth)

    def cost(self, rows: int) -> float:
        return 0.5 + 0.25 * rows * (self.depth + 1)

    def generate(self, requests: Sequence[Request], on_finish: Any = None) -> list[Completion]:
        rows, tokens = len(requests), requests[0].sampling.max_tokens
        assert {request.sampling.max_tokens for request in requests} == {tokens}
        self.now += 10 + 0.1 * rows  # prefill, and the first token
        done, step = 1, 0
        while done < tokens:
            accepted = min(self.depth, tokens - done - 1) if step % 2 else 0
            done += 1 + accepted
            step += 1
            self.now += self.cost(rows)
            self.totals.num_verify_steps += rows * (self.depth > 0)
            for k in range(accepted):
                self.totals.accepted_per_depth[k] += rows
        return []

    def speculation_totals(self) -> SpeculationTotals:
        return SpeculationTotals(
            self.totals.num_verify_steps, 0, 0, accepted_per_depth=list(self.totals.accepted_per_depth)
        )


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_calls_of_two_lengths_give_the_seconds_of_a_step(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(depth)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock.now)
    found = calibrate_by_calls(clock, depth, REQUESTS, [1, 4, 16], tokens=31)  # type: ignore[arg-type]
    for rows in (1, 4, 16):
        assert found.seconds(rows, depth, 0) == pytest.approx(clock.cost(rows), rel=1e-3)
    assert found.seconds(8, depth, 0) == pytest.approx(clock.cost(8), rel=0.05)
    assert found.acceptance == pytest.approx([0.5] * depth, abs=0.05)
