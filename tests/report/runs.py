"""Run directories for the report's tests, as a trainer writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)> & \"quoted\" \x00\ud800"


def write_run(
    directory: Path,
    metrics: Sequence[dict[str, Any]] = (),
    samples: Sequence[dict[str, Any]] = (),
    alarms: Sequence[dict[str, Any]] = (),
    config: str | None = None,
) -> Path:
    """Only the files that are given."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in (("metrics", metrics), ("samples", samples), ("alarms", alarms)):
        if rows:
            (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        (directory / "config.yaml").write_text(config)
    return directory


def rl_run(directory: Path, lift: float = 0.0, seed: int = 0) -> Path:
    """Six steps: acceptance unknown at 3 and 4, an MTP loss that is nan at 2."""
    metrics = [
        {
            "step": step,
            "reward_mean": 0.125 * step + lift,
            "acceptance_length": None if step in (3, 4) else 1.5 + step / 16,
            "acceptance/depth_1": 0.5,
            "acceptance/depth_2": 0.25,
            "loss": (-1) ** step * 0.5,
            "mtp/depth_1/loss": "nan" if step == 2 else 4.0 / step,
            "entropy": 1.25,
            "log_prob_gap_mean": 1e-6 * step,
            "time/step": 2.0,
            "time/rollout": 1.5,
            "tokens_per_second": 12345.678,
            "custom/<i>": 1.0,
        }
        for step in range(1, 7)
    ]
    tokens = ["The", " answer", "", f" {HOSTILE}", " is 4"]
    samples = [
        {
            "step": step,
            "prompt": HOSTILE,
            "response": "".join(tokens),
            "reward": 1.0,
            "event": None,
            "acceptance_length": 1.5,
            "tokens": tokens,
            "accepted_draft": [False, True, True, True, False],
        }
        for step in (1, 6)
    ]
    alarms = [{"name": "acceptance_never", "step": step, "message": f"said at {step}"} for step in (2, 5)]
    config = f"trainer:\n  seed: {seed}\n  total_steps: 10\n  output_dir: <here>\nrollout:\n  n: 8\n"
    return write_run(directory, metrics, samples, alarms, config)
