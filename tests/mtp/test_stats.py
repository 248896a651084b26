"""Statistics add up exactly and say None, not NaN, where nothing was seen."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from forerun.mtp.config import MTPConfig
from forerun.mtp.stats import FIELDS, MTPStats


def some(scale: float) -> MTPStats:
    stats = MTPStats.zeros(2)
    stats.add(1, count=10 * scale, loss=torch.tensor(25.0 * scale), label_hits=4 * scale)
    stats.add(1, teacher_count=10 * scale, trunk_hits=6 * scale, overlap=5.5 * scale)
    stats.add(1, chain_count=10 * scale, chain_hits=6 * scale)
    stats.add(2, count=8 * scale, loss=32.0 * scale, label_hits=2 * scale)
    stats.add(2, teacher_count=8 * scale, trunk_hits=4 * scale, overlap=3 * scale)
    stats.add(2, chain_count=8 * scale, chain_hits=2 * scale)
    return stats


EXPECTED = {
    "mtp/depth_1/loss": 2.5,
    "mtp/depth_1/label_top1": 0.4,
    "mtp/depth_1/trunk_top1": 0.6,
    "mtp/depth_1/expected_acceptance": 0.55,
    "mtp/depth_2/loss": 4.0,
    "mtp/depth_2/label_top1": 0.25,
    "mtp/depth_2/trunk_top1": 0.5,
    "mtp/depth_2/expected_acceptance": 0.375,
    "mtp/acceptance_length": 1 + 0.6 + 0.25,
}


def test_figures() -> None:
    assert some(1).compute() == pytest.approx(EXPECTED)


def test_merging_weighs_by_counts() -> None:
    figures = some(1).merge(some(3)).merge(MTPStats.zeros(2)).compute()
    assert figures == pytest.approx(EXPECTED)


def test_an_empty_depth_is_none() -> None:
    stats = MTPStats.zeros(2)
    stats.add(1, count=2, loss=math.log(2), label_hits=0)
    figures = stats.compute()
    assert figures["mtp/depth_1/loss"] == pytest.approx(math.log(2) / 2)
    assert figures["mtp/depth_1/trunk_top1"] is None
    assert figures["mtp/depth_2/loss"] is None
    assert figures["mtp/acceptance_length"] is None


def _reduce(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    reduced = some(float(rank + 1)).reduce()
    assert reduced.compute() == pytest.approx(EXPECTED)
    assert reduced.sums[0, FIELDS.index("count")] == 30
    dist.destroy_process_group()


def test_reducing_over_ranks(tmp_path: Path) -> None:
    mp.spawn(_reduce, args=(str(tmp_path / "store"),), nprocs=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "mse"}, "mtp.loss='mse' is not one of ce, soft_ce, tv"),
        ({"mask_rule": "all"}, "mtp.mask_rule='all'"),
        ({"num_layers": 0}, "mtp.num_layers=0 must be at least 1"),
        ({"mtp_loss_scaling_factor": -1.0}, "must not be negative"),
        ({"loss_top_k": 0}, "mtp.loss_top_k=0"),
        ({"enable_train": True}, "mtp.enable_train=true needs mtp.enable=true"),
        ({"enable_rollout": True}, "mtp.enable_rollout=true needs mtp.enable=true"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MTPConfig(**settings)
