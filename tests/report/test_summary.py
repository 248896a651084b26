"""summary.json holds what was found, whole and valid."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import forerun
from forerun.errors import ForerunError
from forerun.report.summary import Summary, read_summary


def test_round_trip(tmp_path: Path) -> None:
    summary = Summary(tmp_path, seeds={"seed": 3})
    with summary.phase("rollout"):
        summary.add("rollout", acceptance_length=1.5, per_depth=[3, np.int64(1)], text_identical=True)
        summary.add("rollout", plain={"tokens_per_second": np.float32(2.0)}, unknown=None)
        summary.add("rollout", plain={"tokens": torch.tensor(5)}, path=tmp_path, odd=math.nan)
    loaded = read_summary(tmp_path / "summary.json")
    assert loaded["figures"] == {
        "rollout": {
            "acceptance_length": 1.5,
            "per_depth": [3, 1],
            "text_identical": True,
            "plain": {"tokens_per_second": 2.0, "tokens": 5},
            "unknown": None,
            "path": str(tmp_path),
            "odd": "nan",
        }
    }
    assert loaded["seeds"] == {"seed": 3}
    assert loaded["wall_seconds"].keys() == {"rollout"} and loaded["wall_seconds"]["rollout"] >= 0
    assert loaded["versions"]["forerun"] == forerun.__version__ and loaded["versions"]["torch"] is not None
    assert loaded["machine"]["cores"] >= 1


def test_a_resumed_run_reports_the_phases_it_did_not_repeat(tmp_path: Path) -> None:
    first = Summary(tmp_path)
    with first.phase("sft"):
        first.add("sft", loss=1.0, split={"held_out": 5})
    second = Summary(tmp_path)
    with second.phase("rl"):
        second.add("rl", reward=0.5)
    second.add("sft", loss=0.5)
    second.write()
    loaded = read_summary(tmp_path / "summary.json")
    assert loaded["figures"] == {"sft": {"loss": 0.5, "split": {"held_out": 5}}, "rl": {"reward": 0.5}}
    assert loaded["wall_seconds"].keys() == {"sft", "rl"}
    assert loaded["total_wall_seconds"] == pytest.approx(sum(loaded["wall_seconds"].values()))


def test_a_phase_that_fails_leaves_the_earlier_ones_on_disk(tmp_path: Path) -> None:
    summary = Summary(tmp_path)
    with summary.phase("sft"):
        summary.add("sft", loss=1.0)
    with pytest.raises(RuntimeError), summary.phase("rl"):
        raise RuntimeError
    assert read_summary(tmp_path / "summary.json")["wall_seconds"].keys() == {"sft"}


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_summary_is_not_overwritten_silently(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content, encoding="latin-1")
    with pytest.raises(ForerunError, match="move it away"):
        Summary(tmp_path)


def test_a_figure_of_another_kind_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    summary = Summary(tmp_path)
    summary.add("sft", loss=1.0)
    summary.write()
    before = (tmp_path / "summary.json").read_text()
    summary.add("sft", model=object())
    with pytest.raises(TypeError, match="not object"):
        summary.write()
    assert (tmp_path / "summary.json").read_text() == before
    assert json.loads(before)["figures"] == {"sft": {"loss": 1.0}}
