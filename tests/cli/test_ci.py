"""The CI's check of a demo summary lets a good one pass and names each thing that is wrong with a bad one."""

from __future__ import annotations

import copy
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.report.summary import Summary

CHECK = runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "check_summary.py"))


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    summary = Summary(tmp_path, seeds={"seed": 0})
    summary.add("load", parameters=10)
    summary.add("sft", held_out={"before": 0.1, "after": 0.3})
    summary.add("rollout", batch_1={"text_identical": True, "acceptance_length": 1.3, "speed_up": 0.9})
    summary.add("rl", steps=[{"reward": 0.5}], drafter_in_sync=[1.0, 1.0])
    summary.add("export", digest_equal=True)
    for phase in CHECK["PHASES"]:
        summary.wall_seconds[phase] = 1.0
    loaded: dict[str, Any] = json.loads(summary.write().read_text())
    return loaded


def test_a_good_summary_passes(good: dict[str, Any], tmp_path: Path) -> None:
    assert CHECK["complaints"](good) == []
    assert CHECK["main"]([str(tmp_path / "summary.json")]) == 0


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda s: s.pop("versions"), "versions is missing"),
        (lambda s: s["figures"].pop("rl"), "figures.rl is missing"),
        (lambda s: s["wall_seconds"].pop("sft"), "wall_seconds.sft is missing"),
        (lambda s: s["figures"]["rollout"]["batch_1"].update(text_identical=False), "text_identical is false"),
        (lambda s: s["figures"]["rl"].update(drafter_in_sync=[1.0, 0.0]), "drafter_in_sync[1] is 0.0"),
        (lambda s: s["figures"]["rl"]["steps"][0].update(reward="nan"), "steps[0].reward is nan"),
        (lambda s: s["figures"]["rollout"]["batch_1"].update(acceptance_length=1.0), "no draft was ever accepted"),
        (lambda s: s["figures"]["rollout"]["batch_1"].pop("acceptance_length"), "no acceptance_length is given"),
    ],
)
def test_a_bad_summary_is_named(
    good: dict[str, Any],
    spoil: Callable[[dict[str, Any]], object],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = copy.deepcopy(good)
    spoil(bad)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(bad))
    assert CHECK["main"]([str(path)]) == 1
    assert complaint in capsys.readouterr().err
