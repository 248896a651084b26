"""Asynchronous RL: equal to synchronous where it must be, stale as much as it may be, and whole after any loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.report.metric_names import describe
from tests.trainers.asynchronous.runs import DRAFT, REPEATABLE, asynchronous, closing, synchronous
from tests.trainers.tiny_rl import assert_same, weights


@pytest.mark.parametrize("more", [[], DRAFT], ids=["plain", "drafts"])
def test_without_staleness_it_is_synchronous_training_to_the_bit(tmp_path: Path, more: list[str]) -> None:
    common = ["rollout.deterministic=true", "train_batch_size=2", "ppo_mini_batch_size=2", *more]
    plain = synchronous(tmp_path, *common)
    with closing(asynchronous(tmp_path, *common, *REPEATABLE, "async_training.max_staleness=0")) as made:
        for _ in range(3):
            one, other = plain.turn(pause=False), made.turn(pause=False)
            assert [s.completion for s in made.samples] == [s.completion for s in plain.samples]
            same = ("reward_mean", "loss", "grad_norm", "entropy", "acceptance_length", "log_prob_gap_max")
            assert {name: other[name] for name in same} == {name: one[name] for name in same}
            assert other["staleness_max"] == other["partial_rollout_fraction"] == 0
        assert_same(weights(plain), weights(made))


@pytest.mark.parametrize(("staleness", "interval"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_tokens_are_as_stale_as_the_window_allows(tmp_path: Path, staleness: int, interval: int) -> None:
    window = [f"async_training.max_staleness={staleness}", f"async_training.trigger_parameter_sync_step={interval}"]
    with closing(asynchronous(tmp_path, *REPEATABLE, *window)) as made:
        for step in range(7):
            metrics = made.turn(pause=False)
            # The oldest weights that may sample for a step, among those that the workers get.
            oldest = max(0, -(-(step - staleness) // interval) * interval)
            assert metrics["staleness_mean"] == metrics["staleness_max"] == step - oldest <= staleness
            assert all(describe(name) is not None for name in metrics), metrics
