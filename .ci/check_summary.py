"""Check a demo's summary.json: `python .ci/check_summary.py SUMMARY.json`. Exit code 1 names what is wrong.

Figures that depend on the machine (times, rates, speed-ups) are only checked to be there and finite. What must hold on
every machine must hold here: identical text, equal digests, a drafter in sync, drafts that are sometimes accepted.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PHASES = ("load", "sft", "rollout", "rl", "export")
# A figure whose name holds one of these words states something that is true or the run is wrong.
CLAIMS = ("identical", "equal", "in_sync", "same", "matches")


def complaints(summary: dict[str, Any]) -> list[str]:
    """Everything that is wrong with a summary, one line each."""
    found = []
    for section in ("figures", "seeds", "wall_seconds", "versions", "machine"):
        if not summary.get(section):
            found.append(f"{section} is missing or empty")
    figures = summary.get("figures") or {}
    for phase in PHASES:
        if not figures.get(phase):
            found.append(f"figures.{phase} is missing or empty")
        if not (summary.get("wall_seconds") or {}).get(phase, 0) > 0:
            found.append(f"wall_seconds.{phase} is missing")
    claims = lengths = 0
    for name, value in _leaves(figures, "figures"):
        key = name.rpartition(".")[2].partition("[")[0]
        if value in ("nan", "inf", "-inf") or (isinstance(value, float) and not math.isfinite(value)):
            found.append(f"{name} is {value}")
        elif isinstance(value, bool | int | float) and any(word in key for word in CLAIMS):
            claims += 1
            if not value:
                found.append(f"{name} is {str(value).lower()}")
        elif key == "acceptance_length" and isinstance(value, float | int):
            lengths += 1
            if not value > 1:
                found.append(f"{name} is {value}: no draft was ever accepted")
    if not claims:
        found.append("no figure says that text or weights are identical")
    if not lengths:
        found.append("no acceptance_length is given")
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{name}[{index}]")
    else:
        yield name, value


def main(arguments: Sequence[str]) -> int:
    found = complaints(json.loads(Path(arguments[0]).read_text()))
    for line in found:
        print(f"{arguments[0]}: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
