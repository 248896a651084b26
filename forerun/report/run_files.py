"""What a run directory holds, read for people: whatever is missing, torn or foreign becomes a note and no failure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from forerun.errors import UsageError, one_line

METRICS, SAMPLES, ALARMS, CONFIG = "metrics.jsonl", "samples.jsonl", "alarms.jsonl", "config.yaml"
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Point = tuple[int, float | None]


@dataclass
class SampleRow:
    """A response as `trainers.experience.text_table` wrote it; None is what was not known."""

    prompt: str
    response: str
    reward: float | None
    event: str | None
    acceptance_length: float | None
    tokens: list[str] | None
    accepted_draft: list[bool] | None


@dataclass
class AlarmRow:
    """The alarms of one kind: how many there were, from which step to which, and what the last one said."""

    name: str
    count: int
    first: int
    last: int
    message: str


@dataclass
class RunFiles:
    """A run.

    Attributes:
        name: tells it from the others on the page.
        path: of its directory.
        metrics: name -> (step, value) in the order of steps. A value is None where it could not be known.
        samples: step -> responses.
        alarms: one for each kind.
        config: dotted key -> value as YAML writes it; empty where there is none.
        config_text: the file as it is.
        notes: what was missing or could not be read, one line each.
    """

    name: str
    path: Path
    metrics: dict[str, list[Point]] = field(default_factory=dict)
    samples: dict[int, list[SampleRow]] = field(default_factory=dict)
    alarms: list[AlarmRow] = field(default_factory=list)
    config: dict[str, str] = field(default_factory=dict)
    config_text: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int | None:
        """The last step that was logged."""
        return max((points[-1][0] for points in self.metrics.values()), default=None)

    @property
    def kind(self) -> str:
        """ "RL" or "SFT"."""
        reinforced = "reward_mean" in self.metrics or any(key.startswith("rollout.") for key in self.config)
        return "RL" if reinforced else "SFT"


def read_runs(paths: Sequence[str | Path]) -> list[RunFiles]:
    """The runs in these directories, under names that differ.

    Raises:
        UsageError: none given, one given twice, or a directory that is not there or holds no run.
    """
    if not paths:
        raise UsageError("name at least one run directory (a run's trainer.output_dir)")
    directories = [Path(path) for path in paths]
    for directory in directories:
        _check(directory)
    places = [directory.resolve() for directory in directories]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise UsageError(f"{directories[index]} was given twice: name each run directory once")
    return [_read(directory, name) for directory, name in zip(directories, _names(places), strict=True)]


def _is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (METRICS, SAMPLES, ALARMS, CONFIG))


def _check(directory: Path) -> None:
    if not directory.exists():
        raise UsageError(f"{directory} does not exist: name a run's trainer.output_dir")
    if not directory.is_dir():
        raise UsageError(f"{directory} is a file: name the directory that a run wrote (its trainer.output_dir)")
    try:
        if _is_run(directory):
            return
        inside = sorted(str(child) for child in directory.iterdir() if child.is_dir() and _is_run(child))
    except OSError as error:
        raise UsageError(f"cannot read {directory}: {(error.strerror or str(error)).lower()}") from error
    hint = f"did you mean {' or '.join(inside[:3])}?" if inside else "name a run's trainer.output_dir"
    raise UsageError(f"{directory} holds no run, neither {METRICS} nor {CONFIG}: {hint}")


def _names(places: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    longest = max(len(place.parts) for place in places)
    for length in range(1, longest + 1):
        names = ["/".join(part.strip("/") for part in place.parts[-length:]) or "/" for place in places]
        if len(set(names)) == len(names):
            break
    return names


def _read(directory: Path, name: str) -> RunFiles:
    run = RunFiles(name, directory)
    run.metrics = _metrics(_rows(run, METRICS, "no metrics: was jsonl in trainer.logger?"))
    for row in _rows(run, SAMPLES, "no sample completions" if (directory / METRICS).is_file() else None):
        run.samples.setdefault(row["step"], []).append(_sample(row))
    run.samples = dict(sorted(run.samples.items()))
    run.alarms = _alarms(_rows(run, ALARMS, None))
    if run.kind == "SFT" and not run.samples:
        run.notes = [note for note in run.notes if not note.startswith(f"{SAMPLES} is missing")]
    _read_config(run)
    return run


def _rows(run: RunFiles, name: str, missing: str | None) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file that have a step; a note says what was left out."""
    path = run.path / name
    if not path.is_file():
        if missing is not None:
            run.notes.append(f"{name} is missing: {missing}")
        return
    bad = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                row = _row(line)
                if row is not None:
                    yield row
                elif line.strip():
                    bad += 1
    except OSError as error:
        run.notes.append(f"{name} cannot be read: {(error.strerror or str(error)).lower()}")
    if bad:
        run.notes.append(f"{name}: {bad} {'line' if bad == 1 else 'lines'} left out, torn or not of a run's form")


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 2**53 else None


def _metrics(rows: Iterator[dict[str, Any]]) -> dict[str, list[Point]]:
    found: dict[str, dict[int, float | None]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and (value is None or _number(value) is not None):
                # A step that was logged again replaces what it said before.
                found.setdefault(name, {})[row["step"]] = _number(value)
    return {name: sorted(points.items()) for name, points in found.items()}


def _number(value: object) -> float | None:
    """A number as `report.writers` writes them: non-finite ones are words."""
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return None


def _sample(row: Mapping[str, Any]) -> SampleRow:
    def text(name: str) -> str:
        value = row.get(name)
        return value if isinstance(value, str) else "" if value is None else json.dumps(value)

    tokens, flags = row.get("tokens"), row.get("accepted_draft")
    response = text("response")
    whole = isinstance(tokens, list) and all(isinstance(piece, str) for piece in tokens)
    if not whole or "".join(tokens or ()) != response:
        tokens = None
    if not isinstance(flags, list) or tokens is None or len(flags) != len(tokens):
        flags = None
    return SampleRow(
        prompt=text("prompt"),
        response=response,
        reward=_number(row.get("reward")),
        event=text("event") or None,
        acceptance_length=_number(row.get("acceptance_length")),
        tokens=tokens,
        accepted_draft=None if flags is None else [flag is True for flag in flags],
    )


def _alarms(rows: Iterator[dict[str, Any]]) -> list[AlarmRow]:
    found: dict[str, AlarmRow] = {}
    for row in rows:
        name, step = str(row.get("name", "unnamed")), row["step"]
        alarm = found.setdefault(name, AlarmRow(name, 0, step, step, ""))
        alarm.count += 1
        alarm.first, alarm.last = min(alarm.first, step), max(alarm.last, step)
        alarm.message = str(row.get("message", ""))
    return list(found.values())


def _read_config(run: RunFiles) -> None:
    path = run.path / CONFIG
    if not path.is_file():
        run.notes.append(f"{CONFIG} is missing: no configuration to show or compare")
        return
    try:
        run.config_text = path.read_text(encoding="utf-8", errors="replace")
        loaded = OmegaConf.to_container(OmegaConf.create(run.config_text), resolve=False)
    except OSError as error:
        run.notes.append(f"{CONFIG} cannot be read: {(error.strerror or str(error)).lower()}")
    except Exception as error:  # the YAML parser's errors have no common base that OmegaConf exports
        run.notes.append(f"{CONFIG} is not valid YAML: {one_line(error):.120}")
    else:
        run.config = dict(_leaves(loaded))


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
