"""Depth control on simulated clocks: long-tail batches in which rows drop out from 32 down to 1.

Costs and acceptance are known functions, and what becomes of the draft for a token depends on the token alone, so every
controller rolls out the same texts and their times can be compared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache

import pytest

from forerun.speculative.depth_control import Acceptance, AdaptiveDepth, DepthControl, FixedDepth

MAX_DEPTH = 3
Cost = Callable[[int, int, float], float]  # rows, depth, seconds so far -> seconds
Share = Callable[[int, float], float]  # depth, seconds so far -> share accepted where all before were


@cache
def luck(row: int, token: int) -> float:
    return random.Random(f"{row}/{token}").random()


class Simulation:
    """A batch of completions under a controller; `seconds` is how long it took, `steps` what was run."""

    def __init__(
        self,
        control: DepthControl,
        lengths: list[int],
        cost: Cost,
        share: Share,
        noise: float = 0.0,
        resume: float = 0.0,
    ) -> None:
        self.seconds = 0.0
        self.steps: list[tuple[int, int]] = []
        done, before = dict.fromkeys(range(len(lengths)), 0), 0
        while done:
            rows = len(done)
            depth = control.depth(rows)
            assert 0 <= depth <= MAX_DEPTH
            drafted, accepted = [0] * depth, [0] * depth
            for row in list(done):
                count, kept = min(depth, lengths[row] - done[row] - 1), 0
                while kept < count and luck(row, done[row] + kept) < share(kept + 1, self.seconds):
                    kept += 1
                for k in range(count):
                    drafted[k] += 1
                    accepted[k] += k < kept
                done[row] += kept + 1
                if done[row] >= lengths[row]:
                    del done[row]
            wobble = random.Random(f"{len(self.steps)}/{depth}").gauss(0, noise)
            seconds = cost(rows, depth, self.seconds) * math.exp(wobble)
            if depth and not before:
                seconds *= 1 + resume
            self.seconds += seconds
            self.steps.append((rows, depth))
            before = depth
            control.observe(rows, depth, seconds, drafted, accepted)


def tail(longest: int = 768, rows: int = 32) -> list[int]:
    return [max(4, round(longest * ((i + 1) / rows) ** 3)) for i in range(rows)]


def processor(rows: int, depth: int, _: float) -> float:
    """Two cores: what drafts verify costs as much as anything else but at few rows."""
    return 0.030 + 0.0075 * rows * (depth + 1) + depth * (0.004 + 0.0012 * rows)


def accelerator(rows: int, depth: int, _: float) -> float:
    """Flat until 40 tokens saturate it."""
    return 0.008 * max(1.0, rows * (depth + 1) / 40) + depth * 0.0012 + 0.0002


def eager(rows: int, depth: int, _: float) -> float:
    """Bound by launching kernels: the batch costs nothing."""
    return 0.038 + 0.008 * depth + 1e-5 * rows * depth


def dear(rows: int, depth: int, _: float) -> float:
    """Drafting never pays."""
    return processor(rows, 0, 0) * (1 + 1.5 * depth)


def slower_later(rows: int, depth: int, seconds: float) -> float:
    """Something else takes half of the machine after a while."""
    return processor(rows, depth, 0) * (2 if seconds > 8 else 1)


COSTS = {"processor": processor, "accelerator": accelerator, "eager": eager, "dear": dear, "slower": slower_later}
SHARES: dict[str, Share] = {
    "good": lambda depth, _: (0.9, 0.85, 0.8)[depth - 1],
    "middling": lambda depth, _: (0.5, 0.4, 0.3)[depth - 1],
    "poor": lambda depth, _: 0.05,
    "falling": lambda depth, seconds: 0.9 if seconds < 6 else 0.2,
    "rising": lambda depth, seconds: 0.1 if seconds < 6 else 0.9,
}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("cost", COSTS)
def test_never_five_percent_behind_off_or_any_fixed_depth(cost: str, share: str) -> None:
    def run(control: DepthControl) -> float:
        return Simulation(control, tail(), COSTS[cost], SHARES[share]).seconds

    fixed = {k: run(FixedDepth(k)) for k in range(MAX_DEPTH + 1)}
    assert run(AdaptiveDepth(MAX_DEPTH)) <= 1.05 * min(fixed.values()), fixed


@pytest.mark.parametrize("share", ["good", "middling", "poor"])
@pytest.mark.parametrize("cost", ["processor", "accelerator", "eager", "dear"])
def test_noise_and_a_price_for_resuming(cost: str, share: str) -> None:
    def run(control: DepthControl) -> float:
        return Simulation(control, tail(), COSTS[cost], SHARES[share], noise=0.05, resume=0.25).seconds

    fixed = {k: run(FixedDepth(k)) for k in range(MAX_DEPTH + 1)}
    assert run(AdaptiveDepth(MAX_DEPTH)) <= 1.05 * min(fixed.values()), fixed


class Oracle:
    """Knows the costs and the shares, and takes the best depth for each number of rows."""

    def __init__(self, cost: Cost, share: Share) -> None:
        self.cost, self.share = cost, share

    def depth(self, rows: int) -> int:
        rates, tokens, survive = [], 1.0, 1.0
        for k in range(MAX_DEPTH + 1):
            survive *= self.share(k, 0.0) if k else 1.0
            tokens += survive if k else 0.0
            rates.append(tokens / self.cost(rows, k, 0.0))
        return rates.index(max(rates))

    def observe(self, rows: int, depth: int, seconds: float, drafted: object, accepted: object) -> None:
        pass


@pytest.mark.parametrize("cost", ["processor", "accelerator"])
def test_near_the_best_that_can_be_had_and_better_than_any_fixed_depth(cost: str) -> None:
    """Depths cross within these batches, so adapting has to gain."""

    def run(control: DepthControl) -> Simulation:
        return Simulation(control, tail(1500), COSTS[cost], SHARES["good"])

    adaptive = run(AdaptiveDepth(MAX_DEPTH))
    assert adaptive.seconds <= 1.03 * run(Oracle(COSTS[cost], SHARES["good"])).seconds
    assert adaptive.seconds < 0.995 * min(run(FixedDepth(k)).seconds for k in range(MAX_DEPTH + 1))


def test_what_was_learnt_serves_the_next_batch() -> None:
    control = AdaptiveDepth(MAX_DEPTH)
    Simulation(control, tail(), eager, SHARES["good"])
    second = Simulation(control, [80] * 32, eager, SHARES["good"])
    best = min(Simulation(FixedDepth(k), [80] * 32, eager, SHARES["good"]).seconds for k in range(MAX_DEPTH + 1))
    assert second.seconds <= 1.05 * best


def test_exploration_is_bounded_and_rare_where_drafting_does_not_pay() -> None:
    steps = Simulation(AdaptiveDepth(MAX_DEPTH), [2000] * 8, dear, SHARES["poor"]).steps
    tried = [index for index, (_, depth) in enumerate(steps) if depth]
    assert 0 < len(tried) < 0.02 * len(steps)


def test_off_is_left_again_when_acceptance_comes_back() -> None:
    share: Share = lambda depth, seconds: 0.02 if seconds < 10 else 0.95  # noqa: E731
    steps = Simulation(AdaptiveDepth(MAX_DEPTH), [1500], eager, share).steps
    assert [depth for _, depth in steps[100:200]].count(0) > 80
    assert [depth for _, depth in steps[-100:]].count(0) < 20


def test_acceptance_is_counted_where_all_before_were_accepted() -> None:
    acceptance = Acceptance(3)
    for _ in range(100):
        acceptance.observe([40, 40], [30, 12])
    # Depth 3 was never tried and is believed to be like depth 2.
    assert acceptance.tokens() == pytest.approx([1, 1.75, 2.05, 2.05 + 0.3 * 0.4], abs=0.02)
    # What depth 1 loses, the deeper ones lose with it.
    for _ in range(100):
        acceptance.observe([40], [10])
    assert acceptance.tokens()[1:3] == pytest.approx([1.25, 1.35], abs=0.03)
    acceptance.observe([], [])
    acceptance.observe([0, 0], [0, 0])
    assert acceptance.tokens()[1] == pytest.approx(1.25, abs=0.03)


def test_a_change_of_acceptance_is_seen_before_it_is_averaged_out() -> None:
    acceptance = Acceptance(1)
    for _ in range(200):
        acceptance.observe([1], [1])
    for _ in range(25):
        acceptance.observe([1], [0])
    assert acceptance.tokens()[1] < 1.4


def test_doubt_grows_while_nothing_is_drafted() -> None:
    acceptance = Acceptance(1)
    for _ in range(200):
        acceptance.observe([8], [2])
    believed, hoped = acceptance.tokens()[1], acceptance.tokens(1.0)[1]
    assert believed == pytest.approx(1.25, abs=0.01) and believed < hoped < believed + 0.05
    for _ in range(300):
        acceptance.observe([], [])
    assert acceptance.tokens()[1] == believed
    assert acceptance.tokens(1.0)[1] > hoped + 0.2


def test_same_observations_same_depths() -> None:
    runs = [Simulation(AdaptiveDepth(MAX_DEPTH), tail(), processor, SHARES["falling"], 0.1).steps for _ in range(2)]
    assert runs[0] == runs[1]


def test_limits() -> None:
    assert {depth for _, depth in Simulation(AdaptiveDepth(0), [30], eager, SHARES["good"]).steps} == {0}
    assert {depth for _, depth in Simulation(FixedDepth(2), [30], eager, SHARES["good"]).steps} == {2}
    for wrong in ({"max_depth": -1}, {"max_depth": 1, "exploration": 1.0}, {"max_depth": 1, "exploration": -0.1}):
        with pytest.raises(ValueError, match=r"must"):
            AdaptiveDepth(**wrong)  # type: ignore[arg-type]
