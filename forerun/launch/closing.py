"""The last words of a run: where its model and its checkpoints are, and what to do with them."""

from __future__ import annotations

import shlex
from pathlib import Path

from forerun.engines.checkpoint_directory import checkpoints, latest_checkpoint
from forerun.trainers.setup import EXPORTED


def closing_words(run_dir: Path) -> str:
    """Some lines, with commands that can be copied.

    Args:
        run_dir: the run's trainer.output_dir.
    """
    model = shlex.quote(str(run_dir / EXPORTED))
    names = ", ".join(path.name for path in checkpoints(run_dir))
    kept = f"; checkpoints: {names} in {shlex.quote(str(run_dir))}" if names else ""
    return (
        f"model: {model}{kept}\n"
        f'next: forerun generate --model {model} --prompt "What is 12 * 7?"\n'
        f"      forerun report {shlex.quote(str(run_dir))}"
    )


def interrupted_words(run_dir: Path) -> str:
    """Of a run that was interrupted: what the same command would do."""
    newest = latest_checkpoint(run_dir)
    if newest is None:
        return (
            "interrupted before its first checkpoint, so nothing is kept: trainer.save_freq=N writes one every N steps"
        )
    return f"interrupted; the same command goes on from {newest}"
