"""What a decode step costs for a number of rows and of drafts: learnt from measured steps, asked about any other.

Two layers. A law fitted to everything seen, affine in rows * (k + 1) tokens to verify and in k passes of the drafter,
carries over to batch sizes and depths that were never run. On top of it lie corrections from the steps of the same
depth at about the same number of rows, because real costs have corners that no law has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# A cell averages about its last so many steps: costs change as contexts grow and other work comes and goes.
_CELL_STEPS = 16.0
# A measurement above its cell's mean counts at most as this much more (log): steps are interrupted, never hastened.
_LARGEST_RISE = 0.3
# Numbers of rows are told apart by so many grades per doubling of rows + 3 (one row more changes a step's tokens less
# than a step's fixed cost), and a measurement speaks for about this many on either side.
_GRADES = 8
_OFFSET = 3
_REACH = 2.3
_NEAR = tuple((d, math.exp(-0.5 * (d / _REACH) ** 2)) for d in range(-6, 7))
# Weight of the law against corrections, in steps.
_LAW_WEIGHT = 3.0
# What a pass of the drafter costs beyond verifying its draft, as a share of a step's fixed and per-token costs, where
# measurements do not say; and how firmly that is believed.
_DRAFTER_SHARE = 0.1
_BELIEF = 0.03
_REFIT_STEPS = 16
# To the fit, no step is so many times shorter or longer than a typical one: squares must stay within a float's digits.
_SPREAD = 1e3


@dataclass
class _Cell:
    """Steps of about one number of rows at one depth.

    Attributes:
        log_seconds, rows: means over these steps.
        steps: how many they stand for.
        seen: when the last of them was.
        law: log seconds by the law, as last fitted.
    """

    log_seconds: float
    rows: float
    steps: float
    seen: int
    law: float = 0.0


class StepCosts:
    """Seconds of a step as a function of (rows, depth).

    Args:
        half_life: steps after which an old measurement counts half.
    """

    def __init__(self, half_life: float) -> None:
        self._rate = math.log(2) / half_life
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._now = 0
        self._law = (0.0, 0.0, 0.0, 0.0)
        self._floor = 0.0
        self._fitted: int | None = None

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self._cells)

    def observe(self, rows: int, depth: int, seconds: float, weight: float = 1.0) -> None:
        """Note a step; `weight` below 1 for one that may not be typical."""
        self._now += 1
        measured = math.log(max(seconds, 1e-9))
        key = (_grade(rows), depth)
        cell = self._cells.get(key)
        if cell is None:
            self._cells[key] = _Cell(measured, rows, weight, self._now)
            self._fitted = None
            return
        steps = cell.steps * self._fading(cell)
        share = weight / (steps + weight)
        cell.log_seconds += share * min(measured - cell.log_seconds, _LARGEST_RISE)
        cell.rows += share * (rows - cell.rows)
        cell.steps = min(steps + weight, _CELL_STEPS)
        cell.seen = self._now

    def predict(self, rows: int, depth: int) -> tuple[float, float]:
        """(seconds of a step, measured steps that speak for it). Nothing was measured: seconds mean nothing."""
        if self._fitted is None or self._now - self._fitted >= _REFIT_STEPS:
            self._fit()
        grade = _grade(rows)
        total = correction = 0.0
        for distance, nearness in _NEAR:
            cell = self._cells.get((grade + distance, depth))
            if cell is not None:
                weight = cell.steps * self._fading(cell) * nearness
                total += weight
                correction += weight * (cell.log_seconds - cell.law)
        return self._by_law(rows, depth) * math.exp(correction / (total + _LAW_WEIGHT)), total

    def _fading(self, cell: _Cell) -> float:
        return math.exp(-self._rate * (self._now - cell.seen))

    def _by_law(self, rows: float, depth: int) -> float:
        return max(sum(a * x for a, x in zip(self._law, _features(rows, depth), strict=True)), self._floor)

    def _fit(self) -> None:
        """Weighted least squares on relative errors, with a ridge that makes it solvable from the first step on."""
        self._fitted = self._now
        cells = [(key, cell, cell.steps * self._fading(cell)) for key, cell in self._cells.items()]
        typical = math.exp(sum(c.log_seconds * w for _, c, w in cells) / sum(w for _, _, w in cells))
        widest = max(cell.rows for _, cell, _ in cells)
        # Ridge on each coefficient, in units in which all four are shares of a typical step.
        units = (typical, typical / widest, typical, typical / widest)
        beliefs = (_BELIEF / 100, _BELIEF / 100, _BELIEF, _BELIEF)
        matrix = [[beliefs[i] if i == j else 0.0 for j in range(4)] for i in range(4)]
        target = [0.0] * 4
        for (_, depth), cell, weight in cells:
            seconds = min(max(math.exp(cell.log_seconds), typical / _SPREAD), typical * _SPREAD)
            x = [f * u / seconds for f, u in zip(_features(cell.rows, depth), units, strict=True)]
            for i in range(4):
                target[i] += weight * x[i]
                for j in range(4):
                    matrix[i][j] += weight * x[i] * x[j]
        shares = _solve(matrix, target)
        self._law = (shares[0] * units[0], shares[1] * units[1], shares[2] * units[2], shares[3] * units[3])
        self._floor = 0.2 * math.exp(min(c.log_seconds for _, c, _ in cells))
        for (_, depth), cell, _ in cells:
            cell.law = math.log(self._by_law(cell.rows, depth))


def _grade(rows: int) -> int:
    return round(_GRADES * math.log2(rows + _OFFSET))


def _features(rows: float, depth: int) -> tuple[float, float, float, float]:
    """Fixed part, tokens, and how the drafter's fixed and per-row part differ from what is assumed of them."""
    share = _DRAFTER_SHARE * depth
    return 1 + share, rows * (depth + 1 + share), depth, rows * depth


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """x with matrix @ x = target, for a positive definite matrix (elimination without pivoting); both are used up."""
    size = len(target)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            target[j] -= factor * target[i]
            for column in range(i, size):
                matrix[j][column] -= factor * matrix[i][column]
    for i in reversed(range(size)):
        target[i] = (target[i] - sum(matrix[i][j] * target[j] for j in range(i + 1, size))) / matrix[i][i]
    return target
