"""The RL loop with the native engine drafting: what is reported, synced, checked and repeated."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.config import RLConfig
from forerun.engines.torch_engine import TorchEngine
from forerun.errors import ForerunError, UsageError
from forerun.rollout.native.engine import NativeEngine
from forerun.trainers.alarms import AlarmError, Alarms
from forerun.trainers.rl import RLTrainer
from forerun.trainers.rollout_engines import make_rollout_engine
from tests.trainers.tiny_rl import MTP, PROMPTS, assert_same, settings, trainer, trunk, weights

DRAFT = [*MTP, "mtp.enable_rollout=true", "mtp.num_speculative_tokens=2", "rollout.deterministic=true"]


def speculative(config: RLConfig, **objects: Any) -> RLTrainer:
    """A trainer whose rollout engine is the one that the configuration names."""
    plain = trainer(config, **objects)
    plain.rollout = make_rollout_engine(config, plain.engine)
    return plain


def test_a_speculative_step_reports_its_drafts(tmp_path: Path) -> None:
    made = speculative(settings(tmp_path, *DRAFT))
    metrics = made.step(PROMPTS)
    completions = [sample.completion for sample in made.samples]
    drafted = sum(c.spec_num_draft_tokens or 0 for c in completions)
    accepted = sum(c.spec_num_accepted_tokens or 0 for c in completions)
    steps = sum(c.spec_num_verify_steps or 0 for c in completions)
    assert drafted > accepted > 0
    assert (metrics["spec_num_draft_tokens"], metrics["spec_num_accepted_tokens"]) == (drafted, accepted)
    assert metrics["acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert 0 < metrics["acceptance/depth_2"] < 1 and 0 < metrics["acceptance/depth_1"] <= 1  # type: ignore[operator]
    # The log-probabilities are the target's, not the drafter's.
    assert metrics["log_prob_gap_max"] < 1e-4  # type: ignore[operator]
    assert metrics["drafter_in_sync"] == 1.0
    assert made.rollout.weight_version == 1
    made.step(PROMPTS)
    assert {v for sample in made.samples for v in sample.completion.weight_versions} == {1}
    assert made.rollout.weight_version == 2


def test_the_rollout_engine_has_the_trained_weights_after_a_step(tmp_path: Path) -> None:
    made = speculative(settings(tmp_path, *DRAFT))
    before = weights(made)
    made.step(PROMPTS)
    assert isinstance(made.rollout, NativeEngine)
    held = made.rollout.runner.weights
    for name, tensor in weights(made).items():
        assert torch.equal(held[name], tensor) and not torch.equal(held[name], before[name]), name


def test_the_policy_improves_with_drafts_and_the_drafter_follows(tmp_path: Path) -> None:
    """A random head that is not trained along cannot foresee what the policy learns to say; one that is, can."""
    lr = ["optim.lr=2e-2", "mtp.loss=soft_ce"]
    trained = speculative(settings(tmp_path, *DRAFT, *lr), init="plain")
    frozen = speculative(settings(tmp_path, *DRAFT, *lr, "mtp.enable_train=false"), init="plain")
    history = [trained.step(PROMPTS) for _ in range(30)]
    without = [frozen.step(PROMPTS) for _ in range(30)]

    def mean(name: str, steps: list[dict[str, float | None]]) -> float:
        return sum(float(step[name] or 0.0) for step in steps) / len(steps)

    assert mean("reward_mean", history[-5:]) > mean("reward_mean", history[:5]) + 0.25
    assert mean("reward_mean", without[-5:]) > mean("reward_mean", without[:5]) + 0.15
    assert mean("acceptance_length", history[-5:]) > mean("acceptance_length", without[-5:]) + 0.5
    assert not trained.alarms.raised


def test_isolation_holds_under_speculative_rollouts(tmp_path: Path) -> None:
    """How the head learns reaches the policy through what is sampled next, and through nothing else."""
    normal = speculative(settings(tmp_path, *DRAFT))
    other = speculative(settings(tmp_path, *DRAFT, "optim.mtp_lr=0.5"))
    # The first update sees the same samples; only the heads learn differently.
    for made in (normal, other):
        made.step(PROMPTS)
    assert_same(trunk(normal), trunk(other))
    name, tensor = next(iter(normal.engine.drafter_weights()))
    assert not torch.equal(tensor, dict(other.engine.drafter_weights())[name])


class ForgetsDrafter(NativeEngine):
    """Takes the trunk's new weights and keeps its old drafter, as engines have done that load the target model only."""

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        drafter = set(self.runner.drafter_names)
        for name, tensor in named_tensors:
            if name not in drafter:
                self.runner.weights[name].copy_(tensor)
        self.weight_version = version


def test_a_drafter_in_another_precision_is_in_sync(tmp_path: Path) -> None:
    made = speculative(settings(tmp_path, *DRAFT))
    assert isinstance(made.engine, TorchEngine)
    made.rollout = NativeEngine(made.engine.model, dtype=torch.bfloat16, products="linear")
    assert made.step(PROMPTS)["drafter_in_sync"] == 1.0 and not made.alarms.raised


@pytest.mark.parametrize("on_alarm", ["stop", "warn"])
def test_a_drafter_that_was_not_synced_is_caught(
    tmp_path: Path, on_alarm: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = speculative(settings(tmp_path, *DRAFT, f"trainer.on_alarm={on_alarm}"))
    assert isinstance(made.rollout, NativeEngine)
    made.rollout.__class__ = ForgetsDrafter
    if on_alarm == "stop":
        with pytest.raises(AlarmError, match=r"drafter_digest_mismatch at step 1: .* does not cover the MTP tensors"):
            made.step(PROMPTS)
        return
    assert made.step(PROMPTS)["drafter_in_sync"] == 0.0
    made.step(PROMPTS)
    assert caplog.text.count("drafter_digest_mismatch") == 1
    assert len(made.alarms.raised) == 2


def test_an_update_without_the_drafter_is_refused_by_the_engine(tmp_path: Path) -> None:
    made = speculative(settings(tmp_path, *DRAFT))
    with pytest.raises(ForerunError, match="MTP"):
        made.rollout.update_weights(trunk(made).items(), 1)


def test_a_speculative_run_resumes_bit_identically(tmp_path: Path) -> None:
    def run(directory: str, steps: int) -> RLTrainer:
        config = settings(tmp_path, *DRAFT, "trainer.save_freq=1", "train_batch_size=2", "ppo_mini_batch_size=2")
        config.trainer.output_dir, config.trainer.total_steps = str(tmp_path / directory), steps
        made = speculative(config)
        made.train()
        return made

    straight = run("straight", 4)
    run("stopped", 2)
    torch.manual_seed(77)
    assert_same(weights(straight), weights(run("stopped", 4)))


def test_greedy_acceptance_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rejection or match"):
        RLTrainer(settings(tmp_path, *DRAFT, "mtp.acceptance=greedy"))


def test_acceptance_of_exactly_one_rings_only_after_many_drafts() -> None:
    alarms = Alarms("stop", vocab_size=100)
    alarms.acceptance(1, 300, 0)
    alarms.acceptance(2, None, None)
    alarms.acceptance(3, 200, 1)
    alarms.acceptance(4, 500, 0)
    with pytest.raises(AlarmError, match=r"acceptance_never at step 5: acceptance length is exactly 1\.00 over 600"):
        alarms.acceptance(5, 100, 0)


def test_mtp_loss_alarm_knows_warm_up_and_loss_kind() -> None:
    high = {"mtp/depth_1/loss": 4.0, "mtp/depth_2/loss": 4.7, "mtp/depth_3/loss": None}
    Alarms("stop", vocab_size=100, warmup_steps=5).mtp_loss(5, high)
    Alarms("stop", vocab_size=100, loss="tv", warmup_steps=5).mtp_loss(6, high)
    with pytest.raises(AlarmError, match="mtp/depth_2/loss"):
        Alarms("stop", vocab_size=100, warmup_steps=5).mtp_loss(6, high)
