"""`forerun report`: one HTML page on one run, or on several beside each other, that needs nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from xml.etree.ElementTree import Element

from forerun import __version__
from forerun.errors import UsageError
from forerun.report.atomic import write_text
from forerun.report.charts import DASHES, Series, chart
from forerun.report.elements import append, document, tag
from forerun.report.metric_names import describe
from forerun.report.numbers import shown
from forerun.report.panels import SECTIONS
from forerun.report.progress import duration
from forerun.report.run_files import Point, RunFiles, read_runs
from forerun.report.sample_texts import sample_section

# Figures that the table of last and best values holds; all others are in the table below it.
HEADLINES = (
    "reward_mean",
    "val/reward_mean",
    "acceptance_length",
    "acceptance_rate",
    "mtp/acceptance_length",
    "loss",
    "val/loss",
    "mtp/depth_1/loss",
    "entropy",
    "log_prob_gap_mean",
    "rollout_tokens_per_second",
    "tokens_per_second",
    "time/step",
)


def write_report(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page on these run directories to `out`; returns its path.

    Raises:
        UsageError: a directory that holds no run or was given twice, or `out` is a directory.
        ForerunError: `out` cannot be written.
    """
    out = Path(out)
    if out.is_dir():
        raise UsageError(f"--out {out} is a directory: name a file, such as {out / 'report.html'}")
    write_text(out, render(read_runs(run_dirs)))
    return out


def render(runs: Sequence[RunFiles]) -> str:
    """The page as HTML."""
    style, script = _asset("page.css"), _asset("page.js")
    names = ", ".join(run.name for run in runs)
    main = tag("main", id="main")
    contents: list[tuple[str, str]] = []
    for heading, parts in _sections(runs):
        place = heading.lower().replace(" ", "-")
        contents.append((place, heading))
        main.append(tag("section", tag("h2", heading, id=place), *parts, aria_labelledby=place))
    links = (tag("li", tag("a", heading, href=f"#{place}")) for place, heading in contents)
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    body = tag(
        "body",
        tag("a", "Skip to the figures", href="#main", class_="skip"),
        tag(
            "header",
            tag("h1", names),
            tag("p", f"Report by forerun {__version__}, {written}", class_="muted"),
            tag("nav", tag("ul", *links), aria_label="Sections"),
        ),
        main,
        tag("script", script),
    )
    # Nothing is loaded from anywhere, and no script runs but the one below.
    policy = (
        f"default-src 'none'; img-src data:; style-src {_source(style)}; script-src {_source(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{names} - forerun report"),
        tag("link", rel="icon", href="data:,"),
        tag("style", style),
    )
    return document(tag("html", head, body, lang="en"))


def _asset(name: str) -> str:
    return resources.files("forerun.report").joinpath(name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """How a content security policy names an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _sections(runs: Sequence[RunFiles]) -> Iterator[tuple[str, list[Element]]]:
    yield "Overview", _overview(runs)
    yield "Alarms", _alarms(runs)
    claimed: set[str] = set()
    logged = {name for run in runs for name in run.metrics}
    for heading, panels in SECTIONS:
        charts = []
        for panel in panels:
            if names := panel.names(logged - claimed):
                claimed |= set(names)
                if len(runs) > 1 and len(names) > DASHES:  # more than there are kinds of line
                    charts += [_panel(name, [name], runs) for name in names]
                else:
                    charts.append(_panel(panel.title, names, runs))
        if charts:
            yield heading, [tag("div", *charts, class_="charts")]
    rest = sorted(logged - claimed)
    if rest:
        charts = [_panel(name, [name], runs) for name in rest]
        yield (
            "Other metrics",
            [
                tag(
                    "details",
                    tag("summary", f"{len(charts)} more {'chart' if len(charts) == 1 else 'charts'}"),
                    tag("div", *charts, class_="charts"),
                )
            ],
        )
    if any(run.samples for run in runs):
        yield "Sample completions", [part for run in runs for part in sample_section(run, headed=len(runs) > 1)]
    yield "Configuration", _configuration(runs)


def _panel(title: str, names: Sequence[str], runs: Sequence[RunFiles]) -> Element:
    """One colour for each run where there are several, and a kind of line for each metric; else colours for metrics."""
    series = []
    for index, run in enumerate(runs):
        for number, name in enumerate(names):
            if name in run.metrics:
                several = len(runs) > 1
                label = name if not several else f"{run.name}: {name}" if len(names) > 1 else run.name
                series.append(
                    Series(label, run.metrics[name], *((index, number) if several else (number, number // 8)))
                )
    units = {found.unit if (found := describe(name)) is not None else "" for name in names}
    return chart(title, series, units.pop() if len(units) == 1 else "")


def _overview(runs: Sequence[RunFiles]) -> list[Element]:
    rows = [
        tag(
            "tr",
            tag("th", run.name, scope="row"),
            tag("td", run.kind),
            tag("td", _progress(run)),
            tag("td", _time(run)),
            tag("td", str(run.path)),
        )
        for run in runs
    ]
    head = tag("tr", *(tag("th", text, scope="col") for text in ("run", "kind", "steps", "time in steps", "directory")))
    made = [_table(head, rows, "Runs")]
    made += [
        tag("p", f"{run.name}: {note}" if len(runs) > 1 else note, class_="note") for run in runs for note in run.notes
    ]
    logged = {name for run in runs for name in run.metrics}
    if not logged:
        return [*made, tag("p", "No step is logged yet.")]
    headlines = [name for name in HEADLINES if name in logged]
    others = sorted(logged - set(headlines))
    made.append(tag("h3", "Last and best values"))
    if headlines:
        made.append(_values(headlines, runs))
    if others:
        made.append(tag("details", tag("summary", f"All {len(others)} other metrics"), _values(others, runs)))
    return made


def _progress(run: RunFiles) -> str:
    if run.last_step is None:
        return "none logged"
    total = run.config.get("trainer.total_steps")
    epochs = run.config.get("total_epochs", "null") != "null"  # they set the number of steps
    return f"{run.last_step:,}" + (f" of {total}" if total and not epochs else "")


def _time(run: RunFiles) -> str:
    values = [value for _, value in run.metrics.get("time/step", []) if value is not None and math.isfinite(value)]
    return duration(math.fsum(values)) if values else "-"


def _values(names: Sequence[str], runs: Sequence[RunFiles]) -> Element:
    several = len(runs) > 1
    columns = [f"{run.name}: {what}" if several else what for run in runs for what in ("last", "best")]
    head = tag("tr", *(tag("th", text, scope="col") for text in ("metric", *columns, "unit", "what it says")))
    rows = []
    for name in names:
        known = describe(name)
        better = known.better if known is not None else None
        cells = [cell for run in runs for cell in _last_and_best(run.metrics.get(name, []), better)]
        unit, meaning = (known.unit, known.meaning) if known is not None else ("", "")
        rows.append(
            tag(
                "tr",
                tag("th", name, scope="row"),
                *cells,
                tag("td", unit, class_="unit"),
                tag("td", meaning, class_="meaning"),
            )
        )
    return _table(head, rows, "Last and best values")


def _last_and_best(points: Sequence[Point], better: str | None) -> list[Element]:
    known = [(step, value) for step, value in points if value is not None]
    finite = [point for point in known if math.isfinite(point[1])]
    best = None
    if finite and better is not None:
        best = (max if better == "high" else min)(finite, key=lambda point: point[1])
    last = known[-1] if known else None
    late = last is not None and last[0] != points[-1][0]  # the last steps could not know it
    return [_cell(last, with_step=late), _cell(best, with_step=True)]


def _cell(point: tuple[int, float] | None, with_step: bool) -> Element:
    if point is None:
        return tag("td", shown(None), class_="number")
    step, value = point
    place = tag("span", f" at {step:,}", class_="muted") if with_step else None
    return tag("td", shown(value), place, class_="number")


def _alarms(runs: Sequence[RunFiles]) -> list[Element]:
    made = []
    for run in runs:
        for alarm in run.alarms:
            times = f"once, at step {alarm.first}"
            if alarm.count > 1:
                times = f"{alarm.count} times, steps {alarm.first} to {alarm.last}"
            whose = f"{run.name}: " if len(runs) > 1 else ""
            made.append(
                tag(
                    "div",
                    tag("p", whose, tag("b", alarm.name), f" ({times})"),
                    tag("p", alarm.message),
                    class_="alarm",
                )
            )
    return made or [tag("p", "No alarm was recorded.")]


def _configuration(runs: Sequence[RunFiles]) -> list[Element]:
    made: list[Element] = []
    if len(runs) > 1:
        made += [tag("h3", "What differs"), _differences(runs)]
    for run in runs:
        if run.config_text:
            title = f"config.yaml of {run.name}" if len(runs) > 1 else "config.yaml"
            made.append(tag("details", tag("summary", title), tag("pre", run.config_text, tabindex="0")))
    return made or [tag("p", "No config.yaml was found.")]


def _differences(runs: Sequence[RunFiles]) -> Element:
    runs = [run for run in runs if run.config]
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = [key for key in keys if len({run.config.get(key) for run in runs}) > 1]
    if not differing:
        return tag("p", "Not one setting.")
    head = tag("tr", *(tag("th", text, scope="col") for text in ("setting", *(run.name for run in runs))))
    rows = [
        tag("tr", tag("th", key, scope="row"), *(tag("td", run.config.get(key, "(not set)")) for run in runs))
        for key in differing
    ]
    return _table(head, rows, "Settings that differ")


def _table(head: Element, rows: Sequence[Element], label: str) -> Element:
    """A table that scrolls by itself where the screen is too narrow, by keyboard too."""
    table = tag("table", tag("thead", head))
    append(table, tag("tbody", *rows))
    return tag("div", table, class_="scroll", role="region", aria_label=label, tabindex="0")
