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

# What an acceptance estimate remembers: so many of the last drafts, of no more than so many of the last steps. If what
# a shorter memory holds lies so many standard errors away, something has changed, and the shorter one is believed.
_DRAFTS = 3000.0
_STEPS = 150.0
_SHORT = 0.12
_CHANGE = 3.5
# How much the share of drafts that survive may have changed per step in which none was judged.
_DRIFT = 0.001
# Steps after which a measured cost that was not renewed counts half.
_HALF_LIFE = 200.0
# Belief before any draft was judged: share that survives the first depth, worth so many drafts.
_PRIOR_ACCEPTANCE = 0.6
_PRIOR_DRAFTS = 6.0
# An estimate may be off by so many standard errors, a step's cost without any measurement by so much (log).
_ERRORS = 1.0
_COST_DOUBT = 0.5
# Measured steps at about these rows from which on a depth is known here; others are run as trials only.
_KNOWN = 0.7
# Steps whose exploration is paid in advance.
_CREDIT_STEPS = 200.0
_BELIEVED_CREDIT = 3
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
    """Share of drafts that are accepted where all before them were, per depth, with fading memory.

    Args:
        max_depth: deepest depth.
    """

    def __init__(self, max_depth: int) -> None:
        self._long = [(0.0, 0.0)] * max_depth  # reached, accepted
        self._short = [(0.0, 0.0)] * max_depth
        self._seen = [0] * max_depth
        self._now = 0

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Counts of one step, index 0 = depth 1."""
        self._now += 1
        before = drafted[0] if drafted else 0
        for k, (judged, kept) in enumerate(zip(drafted, accepted, strict=True)):
            reached, before = min(before, judged), kept
            if reached == 0 or k >= len(self._long):
                break
            forgotten = max(reached / _DRAFTS, 1 / _STEPS)
            self._long[k] = _fade(self._long[k], forgotten, reached, kept)
            self._short[k] = _fade(self._short[k], forgotten / _SHORT, reached, kept)
            (n, a), (recent, b) = self._long[k], self._short[k]
            error = math.sqrt(max(a / n * (1 - a / n), 0.01) / recent)
            if abs(a / n - b / recent) > _CHANGE * error:
                self._long[k] = self._short[k]
            self._seen[k] = self._now

    def tokens(self, doubt: float = 0.0) -> list[float]:
        """Expected tokens of a row's step with 0..max_depth drafts; `doubt` errors and drifts above belief."""
        tokens, survive, share = [1.0], 1.0, _PRIOR_ACCEPTANCE
        for (reached, kept), seen in zip(self._long, self._seen, strict=True):
            # A depth that was not tried is believed to be like the one before.
            share = (kept + _PRIOR_DRAFTS * share) / (reached + _PRIOR_DRAFTS)
            error = math.sqrt(max(share * (1 - share), 0.01) / (reached + _PRIOR_DRAFTS))
            survive *= min(share + doubt * (error + _DRIFT * (self._now - seen)), 1.0)
            tokens.append(tokens[-1] + survive)
        return tokens


def _fade(counts: tuple[float, float], share: float, judged: int, kept: int) -> tuple[float, float]:
    """Counts less a share of them, and those of one more step."""
    left = max(1 - share, 0.0)
    return counts[0] * left + judged, counts[1] * left + kept


class AdaptiveDepth:
    """The depth from 0 to `max_depth` with the most expected tokens per second, learnt while running.

    It draws no random numbers: the same observations give the same depths. What it learnt stays for the next batch.

    Args:
        max_depth: most drafts per row.
        exploration: share of all seconds that may be lost to trying depths that are not believed best.

    Raises:
        ValueError: a negative depth, or exploration outside [0, 1).
    """

    def __init__(self, max_depth: int, exploration: float = 0.01) -> None:
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
        known = [k for k, (_, steps) in enumerate(predicted) if steps > _KNOWN] or list(range(len(rates)))
        best = max(known, key=rates.__getitem__)
        if self._best in known and rates[best] < rates[self._best] * _SWITCH:
            best = self._best
        self._best, self._best_rate = best, rates[best]
        if self._trial_left > 0:
            self._trial_left -= 1
            return self._trial
        if predicted[best][1] <= _KNOWN:  # nothing was measured hereabouts: running the likeliest is the trial
            return best
        hopes = [
            rows * n / seconds * math.exp(_COST_DOUBT / (1 + 2 * steps))
            for n, (seconds, steps) in zip(self.acceptance.tokens(_ERRORS), predicted, strict=True)
        ]
        promising = [k for k, hope in enumerate(hopes) if k != best and hope > rates[best]]
        if not promising:
            return best
        # Step by step into the unknown: what is one deeper or shallower shows most cheaply whether to go on.
        unknown = [k for k in promising if abs(k - best) == 1 and predicted[k][1] <= _KNOWN]
        hope = max(unknown or promising, key=hopes.__getitem__)
        steps = 2 if self._last_depth == 0 else 1
        loss = steps * predicted[hope][0] * (1 - rates[hope] / rates[best])
        # What is believed better may be tried on more credit: it would have to be wrong to cost anything.
        if self._lost + loss > self._allowance() * (1 if loss > 0 else _BELIEVED_CREDIT):
            return best
        self._trial, self._trial_left = hope, steps - 1
        return hope

    def observe(self, rows: int, depth: int, seconds: float, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """See `DepthControl.observe`."""
        self._steps += 1
        self._elapsed += seconds
        if depth != self._best and self._best_rate > 0:
            self._lost = max(self._lost + seconds - (rows + sum(accepted)) / self._best_rate, 0.0)
        resuming = depth > 0 and self._last_depth == 0
        self._last_depth = depth
        self.costs.observe(rows, depth, seconds, _RESUMING_WEIGHT if resuming else 1.0)
        self.acceptance.observe(drafted, accepted)

    def _allowance(self) -> float:
        """Seconds that trials may have lost by now."""
        return self.exploration * self._elapsed * (1 + _CREDIT_STEPS / max(self._steps, 1))
