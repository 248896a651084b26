"""How many tokens to draft in the next step: what an engine asks, and a controller that learns the answer on line.

Whether drafting pays changes within one batch: at 32 rows a processor is busy and drafts cost what they verify, at the
last row of the long tail they are nearly free. `AdaptiveDepth` picks at every step the depth with the most expected
tokens per second.

Why it cannot lose much. A step's loss is its seconds beyond what its tokens take at the best known rate. Steps that are
not believed best are only taken to learn, and only while their losses add up to no more than `exploration` of all
seconds (plus a start-up credit of some steps). What remains is error of the estimates: the depth believed best is
run, so a wrong belief in it dies by measurement, and a wrong disbelief when its doubt has grown and the depth is tried
again; depths whose order noise can hide differ by little. Against that stands what no fixed depth has: another depth
for each number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from forerun.speculative.step_costs import StepCosts

# What an acceptance estimate remembers: the last so many drafts, of no more than the last so many steps.
_DRAFTS = 600.0
_STEPS = 60.0
# How much the share of drafts that survive may have changed per step in which none was judged.
_DRIFT = 0.002
# Steps after which a measured cost that was not renewed counts half.
_HALF_LIFE = 200.0
# Belief before any draft was judged: share that survives the first depth, worth so many drafts.
_PRIOR_ACCEPTANCE = 0.6
_PRIOR_DRAFTS = 3.0
# An estimate may be off by so many standard errors, a step's cost without any measurement by so much (log).
_ERRORS = 1.0
_COST_DOUBT = 0.3
# Steps whose exploration is paid in advance.
_CREDIT_STEPS = 50.0
# The first drafting step after plain ones also feeds the drafter's cache: it counts little, and a trial takes another.
_RESUMING_WEIGHT = 0.2
# What another depth must promise over the present one.
_SWITCH = 1.01


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
            accepted: how many of them were accepted (at depth k: together with all before).
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


class Acceptance:
    """Share of drafts that survive, per depth, with fading memory.

    Args:
        max_depth: deepest depth.
    """

    def __init__(self, max_depth: int) -> None:
        self._drafted = [0.0] * max_depth
        self._accepted = [0.0] * max_depth
        self._seen = [0] * max_depth
        self._now = 0

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Counts of one step, index 0 = depth 1."""
        self._now += 1
        for k, (judged, kept) in enumerate(zip(drafted, accepted, strict=True)):
            if judged == 0 or k >= len(self._drafted):
                continue
            fading = max(1 - max(judged / _DRAFTS, 1 / _STEPS), 0.0)
            self._drafted[k] = self._drafted[k] * fading + judged
            self._accepted[k] = self._accepted[k] * fading + kept
            self._seen[k] = self._now

    def tokens(self, doubt: float = 0.0) -> list[float]:
        """Expected tokens of a row's step with 0..max_depth drafts; `doubt` errors and drifts above what is believed."""
        tokens, survive, ratio = [1.0], 1.0, _PRIOR_ACCEPTANCE
        for k, (judged, kept) in enumerate(zip(self._drafted, self._accepted, strict=True)):
            # A depth that was not tried is believed to lose as much over the one before as that one did.
            share = (kept + _PRIOR_DRAFTS * survive * ratio) / (judged + _PRIOR_DRAFTS)
            error = math.sqrt(max(share * (1 - share), 0.01) / (judged + _PRIOR_DRAFTS))
            drift = _DRIFT * (self._now - self._seen[k])
            share = min(share + doubt * (error + drift), survive)
            ratio, survive = share / survive if survive > 0 else 0.0, share
            tokens.append(tokens[-1] + survive)
        return tokens


class AdaptiveDepth:
    """The depth from 0 to `max_depth` with the most expected tokens per second, learnt while running.

    It draws no random numbers: the same observations give the same depths. What it learnt stays for the next batch.

    Args:
        max_depth: most drafts per row.
        exploration: share of all seconds that may be lost to trying depths that are not believed best.

    Raises:
        ValueError: a negative depth, or exploration outside [0, 1).
    """

    def __init__(self, max_depth: int, exploration: float = 0.02) -> None:
        if max_depth < 0:
            raise ValueError(f"max_depth={max_depth} must not be negative")
        if not 0 <= exploration < 1:
            raise ValueError(f"exploration={exploration} must lie in [0, 1)")
        self.max_depth = max_depth
        self.exploration = exploration
        self.costs = StepCosts(_HALF_LIFE)
        self.acceptance = Acceptance(max_depth)
        self._steps = 0
        self._elapsed = 0.0
        self._lost = 0.0
        self._best = 0
        self._best_rate = 0.0
        self._trial = 0
        self._trial_left = 0
        self._last_depth = 0

    def depth(self, rows: int) -> int:
        """See `DepthControl.depth`."""
        if self.max_depth == 0 or not self.costs:
            return 0
        predicted = [self.costs.predict(rows, k) for k in range(self.max_depth + 1)]
        rates = [rows * n / seconds for n, (seconds, _) in zip(self.acceptance.tokens(), predicted, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] < rates[self._best] * _SWITCH:
            best = self._best
        self._best, self._best_rate = best, rates[best]
        if self._trial_left > 0:
            self._trial_left -= 1
            return self._trial
        hopes = [
            rows * n / seconds * math.exp(_COST_DOUBT / math.sqrt(1 + 4 * steps))
            for n, (seconds, steps) in zip(self.acceptance.tokens(_ERRORS), predicted, strict=True)
        ]
        hopes[best] = 0.0
        hope = max(range(len(hopes)), key=hopes.__getitem__)
        if hopes[hope] <= rates[best]:
            return best
        steps = 2 if self._last_depth == 0 else 1
        loss = steps * predicted[hope][0] * (1 - rates[hope] / rates[best])
        if self._lost + loss > self._allowance():
            return best
        self._trial, self._trial_left = hope, steps - 1
        return hope

    def observe(self, rows: int, depth: int, seconds: float, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """See `DepthControl.observe`."""
        self._steps += 1
        self._elapsed += seconds
        if depth != self._best and self._best_rate > 0:
            tokens = rows * self.acceptance.tokens()[min(depth, self.max_depth)]
            self._lost = max(self._lost + seconds - tokens / self._best_rate, 0.0)
        resuming = depth > 0 and self._last_depth == 0
        self._last_depth = depth
        self.costs.observe(rows, depth, seconds, _RESUMING_WEIGHT if resuming else 1.0)
        self.acceptance.observe(drafted, accepted)

    def _allowance(self) -> float:
        """Seconds that trials may have lost by now."""
        return self.exploration * self._elapsed * (1 + _CREDIT_STEPS / max(self._steps, 1))
