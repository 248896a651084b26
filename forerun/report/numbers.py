"""Numbers as people read them."""

from __future__ import annotations

import math


def shown(value: float | None) -> str:
    """Four significant digits; whole numbers whole, with thousands apart; unknown is a dash, nan and inf are words."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        return f"{value:.3g}"
    if value == round(value) or abs(value) >= 1e3:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def ticks(low: float, high: float) -> list[float]:
    """Round numbers that span [low, high], at most 5 inside it: steps of 1, 2 or 5 times a power of ten."""
    span, most = high - low, 5
    if not span > 0:
        return [low]
    magnitude = 10.0 ** math.floor(math.log10(span / most))
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if span / (magnitude * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_labels(values: list[float]) -> list[str]:
    """Labels with as many digits as tell neighbours apart."""
    if len(values) < 2:
        return [shown(value) for value in values]
    step = values[1] - values[0]
    largest = max(abs(value) for value in values)
    if largest >= 1e6 or largest < 1e-3:
        return ["0" if abs(value) < step / 2 else f"{value:.3g}" for value in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:,.{digits}f}" for value in values]
