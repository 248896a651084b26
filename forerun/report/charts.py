"""Curves over steps as inline SVG: gaps where a value is unknown, marks where it is not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from forerun.report.elements import append, tag
from forerun.report.numbers import shown, tick_labels, ticks
from forerun.report.run_files import Point

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 10, 26
COLORS, DASHES = 8, 4
# A line is thinned out to so many points at most, which is more than a screen's columns.
MOST_POINTS = 1200
# From so many points on a running mean is drawn over the curve.
SMOOTH_FROM = 120


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        label: for the legend.
        points: (step, value), value None for unknown.
        color, dash: index of its colour and of its kind of line.
    """

    label: str
    points: Sequence[Point]
    color: int = 0
    dash: int = 0

    @property
    def style(self) -> str:
        return f"c{self.color % COLORS} d{self.dash % DASHES}"


@dataclass(frozen=True)
class _Frame:
    low_x: float
    high_x: float
    low_y: float
    high_y: float

    @classmethod
    def around(cls, series: Sequence[Series]) -> _Frame | None:
        """None where there is not one finite value."""
        known = [(step, value) for one in series for step, value in one.points if value is not None]
        finite = [value for _, value in known if math.isfinite(value)]
        if not finite:
            return None
        steps = [step for step, _ in known]
        low, high = min(finite), max(finite)
        pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        if not math.isfinite(pad) or not math.isfinite(high + pad) or not math.isfinite(low - pad):
            return None
        # Shares and times begin at 0 where 0 is near.
        low_y = 0.0 if 0 <= low < 0.4 * high else low - pad
        return cls(min(steps), max(steps), low_y, high + pad)

    def x(self, step: float) -> float:
        span = self.high_x - self.low_x
        return LEFT + (WIDTH - LEFT - RIGHT) * ((step - self.low_x) / span if span else 0.5)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ((value - self.low_y) / (self.high_y - self.low_y))


def chart(title: str, series: Sequence[Series], unit: str = "") -> Element:
    """A figure with legend. Its readout follows the pointer or the arrow keys where scripts run (page.js)."""
    heading = tag("h3", title, tag("small", f" {unit}") if unit else None)
    frame = _Frame.around(series)
    if frame is None:
        said = ", ".join(f"{one.label}: {_words(one.points)}" for one in series)
        return tag("figure", tag("figcaption", heading), tag("p", f"No finite value ({said}).", class_="muted"))
    drawn = [_thinned(one.points) for one in series]
    window = {_window(points) for points in drawn} - {1}
    svg = tag("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=_summary(title, series))
    append(svg, *_axes(frame))
    for one, points in zip(series, drawn, strict=True):
        append(svg, _curve(one, points, frame))
    append(svg, tag("line", class_="cursor", x1="-9", x2="-9", y1=str(TOP), y2=str(HEIGHT - BOTTOM)))
    note = None
    if window:
        note = tag(
            "p", f"Thick: running mean over {_span(series, max(window))} steps; thin: each step.", class_="muted"
        )
    return tag(
        "figure",
        tag("figcaption", heading),
        svg,
        tag(
            "div",
            tag("p", "last values", class_="at"),
            tag("ul", *(_legend(one) for one in series), class_="legend"),
            class_="readout",
        ),
        note,
        class_="chart",
        role="group",
        tabindex="0",
        aria_label=f"{title}; arrow keys move through the steps",
        data_chart=json.dumps(_data(frame, drawn), separators=(",", ":")),
    )


def _data(frame: _Frame, drawn: Sequence[Sequence[Point]]) -> dict[str, object]:
    """What page.js needs: where steps lie, and the values as text. Unknown values are null."""
    return {
        "x": [frame.low_x, frame.high_x, LEFT, WIDTH - RIGHT],
        "series": [[[step, None if value is None else shown(value)] for step, value in points] for points in drawn],
    }


def _axes(frame: _Frame) -> list[Element]:
    made = []
    values = ticks(frame.low_y, frame.high_y)
    for value, label in zip(values, tick_labels(values), strict=True):
        y = f"{frame.y(value):.1f}"
        made.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        made.append(tag("text", label, x=LEFT - 6, y=y, dy="0.35em", text_anchor="end"))
    whole = [step for step in ticks(frame.low_x, frame.high_x) if step == round(step)]
    for step in whole or [frame.low_x]:
        # Labels at the edges stay inside.
        anchor = "end" if frame.x(step) > WIDTH - RIGHT - 20 else "middle"
        made.append(tag("text", f"{step:,.0f}", x=f"{frame.x(step):.1f}", y=HEIGHT - 8, text_anchor=anchor))
    return made


def _curve(series: Series, points: Sequence[Point], frame: _Frame) -> Element:
    group = tag("g", class_=f"series {series.style}")
    window = _window(points)
    if window > 1:
        append(group, *_lines(points, frame, "raw"))
    append(group, *_lines(_running_mean(points, window), frame, "line"))
    for step, value in points:
        if value is not None and not math.isfinite(value):
            append(group, _mark(series, step, value, frame))
    return group


def _lines(points: Sequence[Point], frame: _Frame, kind: str) -> list[Element]:
    """One path for each stretch of known, finite values; one alone is a dot."""
    made, stretch = [], list[str]()

    def end() -> None:
        if len(stretch) == 1:
            x, y = stretch[0].split(" ")
            made.append(tag("circle", class_="dot", cx=x, cy=y, r="2.5"))
        elif stretch:
            made.append(tag("path", class_=kind, d="M" + "L".join(stretch)))
        stretch.clear()

    for step, value in points:
        if value is None or not math.isfinite(value):
            end()
        else:
            stretch.append(f"{frame.x(step):.1f} {frame.y(value):.1f}")
    end()
    return made


def _mark(series: Series, step: int, value: float, frame: _Frame) -> Element:
    """A cross at the edge that the value is beyond; nan at the lower one."""
    y = TOP + 5 if value == math.inf else HEIGHT - BOTTOM - 5
    x = frame.x(step)
    cross = f"M{x - 4:.1f} {y - 4}l8 8m0 -8l-8 8"
    return tag("path", tag("title", f"{series.label}: {value} at step {step}"), class_="nonfinite", d=cross)


def _legend(series: Series) -> Element:
    sample = tag("svg", tag("path", class_="line", d="M1 6H23"), viewBox="0 0 24 12", aria_hidden="true")
    last = next((value for _, value in reversed(series.points) if value is not None), None)
    swatch = tag("span", sample, class_=f"series swatch {series.style}")
    return tag("li", swatch, tag("span", series.label), " ", tag("b", shown(last)))


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most about MOST_POINTS: of each bucket the least, the largest, and one that is unknown or not finite."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) / (MOST_POINTS // 3))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        finite = [point for point in bucket if point[1] is not None and math.isfinite(point[1])]
        odd = [point for point in bucket if point[1] is None or not math.isfinite(point[1])]
        chosen = {*odd[:1]}
        if finite:
            chosen |= {min(finite, key=lambda p: p[1] or 0.0), max(finite, key=lambda p: p[1] or 0.0)}
        kept += sorted(chosen, key=lambda point: point[0])
    return kept


def _window(points: Sequence[Point]) -> int:
    """Points that the running mean is over; 1 for none."""
    return len(points) // 40 | 1 if len(points) >= SMOOTH_FROM else 1


def _running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of the finite values among `window` points around each; gaps stay gaps."""
    if window == 1:
        return list(points)
    half = window // 2
    smooth: list[Point] = []
    for index, (step, value) in enumerate(points):
        if value is None or not math.isfinite(value):
            smooth.append((step, value))
            continue
        near = [v for _, v in points[max(0, index - half) : index + half + 1] if v is not None and math.isfinite(v)]
        smooth.append((step, math.fsum(near) / len(near)))
    return smooth


def _span(series: Sequence[Series], window: int) -> str:
    """Steps that a window of points spans, roughly."""
    longest = max((one.points for one in series), key=len)
    thinned = _thinned(longest)
    return f"{max(window, round(window * len(longest) / len(thinned))):,}"


def _words(points: Sequence[Point]) -> str:
    values = {shown(value) if value is not None else "unknown" for _, value in points}
    return " and ".join(sorted(values)) if len(values) < 4 else "none of them finite"


def _summary(title: str, series: Sequence[Series]) -> str:
    """For who cannot see it: first and last value of each curve."""
    parts = []
    for one in series:
        known = [point for point in one.points if point[1] is not None]
        if known:
            (first, a), (last, b) = known[0], known[-1]
            parts.append(f"{one.label} from {shown(a)} at step {first} to {shown(b)} at step {last}")
    return f"{title} by step: {'; '.join(parts)}"
