"""A short version of `python -m tests.kills`: a killed run loses no checkpoint and ends where it would have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills.runs import Verb, kill_and_compare


@pytest.mark.parametrize("verb", ["sft", "rl"])
def test_a_run_that_is_killed_ends_where_it_would_have(tmp_path: Path, verb: Verb) -> None:
    tally = kill_and_compare(verb, tmp_path, kills=5, steps=16)
    assert tally.kills == 5 and tally.checkpoints_compared >= 5
