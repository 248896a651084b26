"""What two runs of the same work log alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Times, and how many groups happen to be ready when an asynchronous step begins.
_MEASURED = ("time/", "tokens_per_second", "rollout_tokens_per_second", "queue_depth")


def repeatable(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a step, less those that a clock decides."""
    return {name: value for name, value in metrics.items() if not name.startswith(_MEASURED)}


def repeatable_metrics(run: Path) -> list[dict[str, Any]]:
    """A run's metrics, step by step, less those that a clock decides."""
    return [repeatable(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
