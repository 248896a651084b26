"""What a run found, in one `summary.json`: figures, seeds, wall times, versions and the machine."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from forerun import __version__
from forerun.errors import ForerunError
from forerun.report.atomic import write_text

SUMMARY = "summary.json"

Figure = Any
"""A number, text, True/False, None ("cannot be known here"), or a list or mapping of figures."""


class Summary:
    """Collects a run's figures by phase and writes them, whole, as often as one likes.

        summary = Summary(out, seeds={"seed": 0})
        with summary.phase("rollout"):
            summary.add("rollout", acceptance_length=1.43, plain={"tokens_per_second": 18.1})
        summary.write()

    Attributes:
        figures: phase -> name -> figure.
        wall_seconds: phase -> seconds, of phases that ended; a phase run again counts as it ran last.

    Args:
        output_dir: where `summary.json` goes. One that is there already is continued: its figures and wall times are
            kept until they are given anew, so that a resumed run still reports the phases it did not repeat.

    Raises:
        ForerunError: an existing summary.json cannot be read.
    """

    def __init__(self, output_dir: str | Path, seeds: Mapping[str, int] | None = None) -> None:
        self.path = Path(output_dir) / SUMMARY
        self.seeds = dict(seeds or {})
        self.figures: dict[str, dict[str, Figure]] = {}
        self.wall_seconds: dict[str, float] = {}
        if self.path.exists():
            earlier = read_summary(self.path)
            self.figures.update(earlier.get("figures", {}))
            self.wall_seconds.update(earlier.get("wall_seconds", {}))

    def add(self, phase: str, /, **figures: Figure) -> None:
        """Set figures of `phase`; a mapping given again is merged into what is there, everything else is replaced."""
        _merge(self.figures.setdefault(phase, {}), figures)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase that is begun anew, and write the summary when it ends well."""
        start = time.monotonic()
        yield
        self.wall_seconds[name] = time.monotonic() - start
        self.write()

    def as_dict(self) -> dict[str, Any]:
        """Everything, as it stands in the file; numbers that JSON has no word for are the strings "nan", "inf"."""
        return _plain(
            {
                "figures": self.figures,
                "seeds": self.seeds,
                "wall_seconds": self.wall_seconds,
                "total_wall_seconds": sum(self.wall_seconds.values()),
                "versions": versions(),
                "machine": machine(),
            }
        )

    def write(self) -> Path:
        """Write `summary.json`; returns its path.

        Raises:
            ForerunError: it cannot be written; an earlier one stays as it was.
        """
        write_text(self.path, json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n")
        return self.path


def read_summary(path: str | Path) -> dict[str, Any]:
    """A `summary.json` as `Summary.as_dict` gave it.

    Raises:
        ForerunError: it is not there, or not a summary.
    """
    try:
        loaded = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ForerunError(f"cannot read {path}: {str(error).splitlines()[0]}; move it away to start afresh") from error
    if not isinstance(loaded, dict):
        raise ForerunError(f"{path} is not a summary: move it away to start afresh")
    return loaded


def versions() -> dict[str, str | None]:
    """Versions of what decides a run's figures; None for what is not installed. Nothing is imported for it."""
    found: dict[str, str | None] = {"forerun": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "numpy", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, str | int | None]:
    """CPU model, usable cores, memory in bytes, system; None for what the system does not tell."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    try:
        memory: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        memory = None
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def _merge(into: dict[str, Figure], new: Mapping[str, Figure]) -> None:
    for name, value in new.items():
        if isinstance(value, Mapping):
            inner = into.get(name)
            into[name] = inner = dict(inner) if isinstance(inner, Mapping) else {}
            _merge(inner, value)
        else:
            into[name] = value


def _plain(value: Figure) -> Any:
    """Figures as JSON has them: numpy and torch scalars as numbers, paths as text, non-finite numbers as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # a numpy or torch scalar
        return _plain(value.item())
    raise TypeError(f"a figure must be a number, text, list or mapping, not {type(value).__name__}")
