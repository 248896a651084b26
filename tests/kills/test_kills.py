"""A short version of `python -m tests.kills`: a killed run loses no checkpoint and ends where it would have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills.runs import Kind, kill_and_compare


@pytest.mark.parametrize("kind", ["sft", "rl", "async"])
def test_a_run_that_is_killed_ends_where_it_would_have(tmp_path: Path, kind: Kind) -> None:
    tally = kill_and_compare(kind, tmp_path, tries=5, steps=8)
    assert tally.kills >= 1 and tally.checkpoints_compared >= 2
