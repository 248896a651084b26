"""Chi-square tests that say how small a fault they would have found.

A test's false-alarm rate is the `level` that its caller compares the p-value with. Its power follows from the number of
observations n alone: moving a share d of the probability mass, wherever from and to, raises the statistic's
noncentrality to at least 4 d^2 n (Cauchy-Schwarz: sum (p'-p)^2 / p >= (sum |p'-p|)^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

POWER = 0.9
_SMALLEST_CELL = 10


class ChiSquare(NamedTuple):
    """A test's outcome.

    Attributes:
        p_value: how often a statistic of at least this size comes up if nothing is wrong.
        observations: what was observed in all (for two samples: the size of one that is as good as both).
        detectable: share of the probability mass that, moved, gives a p-value below the level in 9 of 10 runs.
    """

    p_value: float
    observations: float
    detectable: float


def uniform_fit(numbers: Tensor, level: float, bins: int = 20) -> ChiSquare:
    """Are these numbers in [0, 1] spread evenly (Pearson 1900)?

    Args:
        numbers: float [n], independent, n at least 10 * bins.
        level: p-value below which the caller will say no.
    """
    count = len(numbers)
    observed = torch.histc(numbers.double(), bins, 0, 1)
    expected = count / bins
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return _outcome(statistic, bins - 1, count, level)


def same_distribution(samples: Iterable[tuple[Tensor, Tensor]], level: float) -> ChiSquare:
    """Do pairs of samples come from one distribution each? The statistic is summed over the pairs.

    Args:
        samples: pairs of long [n], [m]: what was seen, as numbers of categories. Categories that were seen fewer than
            10 times in a pair are pooled, for the statistic's distribution is known for large counts only.
        level: p-value below which the caller will say no.
    """
    statistic, degrees, observations = 0.0, 0, 0.0
    for ours, theirs in samples:
        size = int(torch.cat([ours, theirs]).max()) + 1
        table = torch.stack([torch.bincount(side, minlength=size) for side in (ours, theirs)]).double()
        total = table.sum(0)
        small = total < _SMALLEST_CELL
        table = torch.cat([table[:, ~small], table[:, small].sum(1, keepdim=True)], dim=1)
        table = table[:, table.sum(0) > 0]
        if table.shape[1] < 2:
            continue
        expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
        statistic += float(((table - expected) ** 2 / expected).sum())
        degrees += table.shape[1] - 1
        observations += len(ours) * len(theirs) / (len(ours) + len(theirs))
    return _outcome(statistic, degrees, observations, level)


def _outcome(statistic: float, degrees: int, observations: float, level: float) -> ChiSquare:
    if degrees == 0:  # one category: nothing can differ
        return ChiSquare(1.0, observations, math.nan)
    return ChiSquare(
        survival(statistic, degrees), observations, math.sqrt(_noncentrality(degrees, level) / (4 * observations))
    )


@cache
def _noncentrality(degrees: int, level: float) -> float:
    """With which the statistic passes the critical value of this level as often as `POWER` says."""
    critical = _root(lambda x: survival(x, degrees) - level)
    return _root(lambda x: POWER - _survival_noncentral(critical, degrees, x))


def survival(statistic: float, degrees: float) -> float:
    """P(X >= statistic) for X chi-square with so many degrees of freedom."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _survival_noncentral(statistic: float, degrees: int, noncentrality: float) -> float:
    """The same for the noncentral one, which is a Poisson mixture of central ones (Johnson et al. 1995, ch. 29)."""
    middle = noncentrality / 2
    j = torch.arange(int(middle + 12 * math.sqrt(middle) + 30), dtype=torch.float64)
    weight = (torch.xlogy(j, torch.tensor(middle, dtype=torch.float64)) - middle - torch.lgamma(j + 1)).exp()
    tails = torch.special.gammaincc(degrees / 2 + j, torch.full_like(j, statistic / 2))
    return float((weight * tails).sum())


def _root(falling: Callable[[float], float]) -> float:
    """Where a falling function of x >= 0 crosses zero."""
    low, high = 0.0, 1.0
    while falling(high) > 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high
