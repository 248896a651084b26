"""The last words of a run name what is there."""

from __future__ import annotations

from pathlib import Path

from forerun.engines.checkpoint_directory import STATE_FILE
from forerun.launch.closing import closing_words


def test_checkpoints_are_named_if_there_are_any(tmp_path: Path) -> None:
    assert closing_words(tmp_path).splitlines()[0] == f"model: {tmp_path / 'model'}"
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / STATE_FILE).touch()
    expected = f"model: {tmp_path / 'model'}; checkpoints: checkpoint-2, checkpoint-10 in {tmp_path}"
    assert closing_words(tmp_path).splitlines()[0] == expected
