"""The RL loop: it improves a policy, isolation keeps the trunk, splits change nothing, runs resume."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import forerun
from forerun.data.prompts import Prompt
from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import named_weights
from forerun.rewards.protocol import RewardRequest, RewardResult
from forerun.rollout.protocol import Completion, Request
from forerun.trainers.prompt_files import check_ground_truth
from forerun.trainers.rl import RLTrainer
from tests.trainers.tiny import make_tokenizer
from tests.trainers.tiny_rl import MTP, PROMPTS, assert_same, settings, trainer, trunk, weights


def test_the_policy_improves(tmp_path: Path) -> None:
    made = trainer(settings(tmp_path, "optim.lr=3e-2"))
    rewards = [float(made.step(PROMPTS)["reward_mean"] or 0.0) for _ in range(30)]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    # Chance is one word in twelve; a policy that ignored the prompt would reach a quarter.
    assert first < 0.15
    assert last > 0.4, rewards


@pytest.mark.parametrize(
    "change",
    [
        ["algorithm.loss_agg_mode=seq-mean-token-mean", "ppo_mini_batch_size=2", "ppo_epochs=2"],
        ["algorithm.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.norm_adv_by_std_in_grpo=false"],
    ],
)
def test_the_policy_improves_in_other_set_ups(tmp_path: Path, change: list[str]) -> None:
    made = trainer(settings(tmp_path, "optim.lr=3e-2", *change))
    rewards = [float(made.step(PROMPTS)["reward_mean"] or 0.0) for _ in range(20)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15, rewards


def test_a_step_reports_what_happened(tmp_path: Path) -> None:
    made = trainer(settings(tmp_path, *MTP, "mtp.num_layers=2"))
    metrics = made.step(PROMPTS)
    rewards = [sample.reward.score for sample in made.samples]
    assert len(rewards) == 32 and metrics["reward_mean"] == pytest.approx(sum(rewards) / 32)
    assert 0 < metrics["entropy"] <= math.log(len(make_tokenizer())) + 1e-6  # type: ignore[operator]
    # The same weights sampled and were trained, so the two implementations must agree.
    assert metrics["log_prob_gap_max"] < 1e-4  # type: ignore[operator]
    assert metrics["pg_clipfrac"] == 0 and metrics["ratio_mean"] == pytest.approx(1)
    assert metrics["spec_num_draft_tokens"] is None and metrics["acceptance_length"] is None
    for name in ("grad_norm", "mtp_grad_norm", "mtp/depth_1/loss", "mtp/depth_2/loss", "mtp_loss"):
        assert metrics[name] > 0, name  # type: ignore[operator]
    parts = [metrics[f"time/{part}"] for part in ("rollout", "reward", "train", "sync")]
    assert sum(parts) <= metrics["time/step"]  # type: ignore[arg-type, operator]
    assert sum(sample.advantage for sample in made.samples) == pytest.approx(0, abs=1e-4)


def test_nearly_overlong_responses_are_penalised(tmp_path: Path) -> None:
    buffer = ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=1"]
    plain, shaped = trainer(settings(tmp_path)), trainer(settings(tmp_path, *buffer))
    plain.step(PROMPTS)
    shaped.step(PROMPTS)
    limit = shaped.config.rollout.max_response_length
    full = [len(sample.completion.token_ids) == limit for sample in shaped.samples]
    assert any(full)
    for before, after, penalised in zip(plain.samples, shaped.samples, full, strict=True):
        assert after.reward.score == before.reward.score - penalised


def test_temperature_reaches_the_trainers_log_probs(tmp_path: Path) -> None:
    made = trainer(settings(tmp_path, "rollout.temperature=0.5"))
    metrics = made.step(PROMPTS)
    assert metrics["log_prob_gap_max"] < 1e-4  # type: ignore[operator]


def test_isolated_head_leaves_the_policy_of_training_without_mtp(tmp_path: Path) -> None:
    plain, isolated = trainer(settings(tmp_path)), trainer(settings(tmp_path, *MTP))
    joint = trainer(settings(tmp_path, *MTP, "mtp.detach_encoder=false"))
    before = dict(weights(isolated))
    for made in (plain, isolated, joint):
        made.alarms.on_alarm = "warn"
        for _ in range(3):
            made.step(PROMPTS)
    assert_same(weights(plain), trunk(isolated))
    moved = [name for name, _ in isolated.engine.drafter_weights()]
    assert moved and all(not torch.equal(before[name], weights(isolated)[name]) for name in moved)
    assert any(not torch.equal(tensor, trunk(joint)[name]) for name, tensor in weights(plain).items())


def test_a_micro_batch_split_changes_no_update(tmp_path: Path) -> None:
    whole = trainer(settings(tmp_path, *MTP, "micro_batch_size=32"))
    split = trainer(settings(tmp_path, *MTP, "micro_batch_size=3"))
    one, many = whole.step(PROMPTS), split.step(PROMPTS)
    for name in ("loss", "mtp_loss", "grad_norm", "mtp_grad_norm", "entropy"):
        assert one[name] == pytest.approx(many[name], rel=1e-3, abs=1e-6), name


def test_a_run_resumes_bit_identically(tmp_path: Path) -> None:
    def run(directory: str, steps: int) -> RLTrainer:
        config = settings(tmp_path, *MTP, "trainer.save_freq=2", "train_batch_size=2", "ppo_mini_batch_size=2")
        config.trainer.output_dir, config.trainer.total_steps = str(tmp_path / directory), steps
        made = trainer(config)
        made.train()
        return made

    straight = run("straight", 5)
    run("stopped", 3)
    for name in ("metrics.jsonl", "samples.jsonl"):  # as if it had been killed after step 4, not saved
        with (tmp_path / "stopped" / name).open("a") as file:
            file.write('{"step": 4}\n')
    torch.manual_seed(77)
    resumed = run("stopped", 5)
    assert_same(weights(straight), weights(resumed))
    logged = [json.loads(line) for line in (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [1, 2, 3, 4, 5]
    exported = forerun.load(tmp_path / "stopped" / "model")
    assert_same(dict(named_weights(exported)), weights(resumed))
    samples = [json.loads(line) for line in (tmp_path / "stopped" / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {1, 2, 3, 4, 5} and all("response" in s for s in samples)


@pytest.mark.parametrize(("outside", "sleeps"), [(True, True), (True, False), (False, True)])
def test_an_engine_outside_finds_the_memory_that_torch_keeps_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: bool, sleeps: bool
) -> None:
    more = ["rollout.engine=vllm", "rollout.base_url=http://127.0.0.1:9"] if outside else []
    more += [] if sleeps else ["rollout.free_cache_engine=false"]
    made = trainer(settings(tmp_path, *more))
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("given back"))
    monkeypatch.setattr(made.rollout, "update_weights", lambda *_: events.append("woken"))
    made.sync()
    assert events == (["given back", "woken"] if outside else ["woken"])
    events.clear()
    monkeypatch.setattr(made.rollout, "wake", lambda: events.append("woken"))
    monkeypatch.setattr(made.rollout, "sleep", lambda: events.append("asleep"))
    made.generate(PROMPTS)
    assert events == (["given back"] * outside + ["woken", "asleep"] if sleeps else [])


def test_held_out_prompts_are_answered_greedily(tmp_path: Path) -> None:
    made = trainer(settings(tmp_path), eval_prompts=PROMPTS[:2])
    assert made.evaluate() == made.evaluate()
    assert made.evaluate().keys() >= {"val/reward_mean", "val/response_length_mean"}


def test_held_out_prompts_are_sampled_where_that_is_wanted(tmp_path: Path) -> None:
    made = trainer(settings(tmp_path, "rollout.val_kwargs={n: 5, temperature: 1.0}"), eval_prompts=PROMPTS[:2])
    asked: list[Request] = []
    generate = made.rollout.generate

    def watch(requests: list[Request], *more: Any) -> list[Completion]:
        asked.extend(requests)
        return generate(requests, *more)

    made.rollout.generate = watch  # type: ignore[method-assign]
    found = made.evaluate()
    assert [request.sampling.temperature for request in asked] == [1.0] * 10
    assert len({request.sampling.seed for request in asked}) == 10
    assert found["val/reward_best"] > found["val/reward_mean"]  # type: ignore[operator]
    with pytest.raises(UsageError, match=r"rollout\.val_kwargs\.temperature=0 is greedy, which n, top_p and"):
        settings(tmp_path, "rollout.val_kwargs.n=4")


@pytest.mark.parametrize("before", [True, False])
def test_held_out_figures_before_the_first_step_unless_they_are_not_wanted(tmp_path: Path, before: bool) -> None:
    config = settings(tmp_path, "trainer.total_steps=1", f"trainer.val_before_train={str(before).lower()}")
    trainer(config, eval_prompts=PROMPTS[:2]).train()
    logged = [json.loads(line) for line in Path(config.trainer.output_dir, "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if "val/reward_mean" in line] == ([0, 1] if before else [1])


def test_a_ground_truth_that_the_reward_needs_is_missed_before_the_model_is_loaded(tmp_path: Path) -> None:
    bare = Prompt([{"role": "user", "content": "hm"}], None, "tiny", place="p.jsonl, line 7")
    for function in ("math", "auto", "exact_match"):
        said = rf"1 of 2 prompts have no ground truth for reward\.function={function} .*p\.jsonl, line 7"
        with pytest.raises(UsageError, match=said):
            check_ground_truth([PROMPTS[0], bare], function)
    check_ground_truth([bare], "mine.py:score")
    task = replace(bare, extra_info={"task": "gcd", "entry": {}}, data_source="reasoning_gym/gcd")
    check_ground_truth([task], "auto")
    for other in (replace(task, data_source="tiny"), replace(task, extra_info={"task": "gcd"})):
        with pytest.raises(UsageError, match="1 of 1 prompts have no ground truth"):
            check_ground_truth([other], "auto")
    with pytest.raises(UsageError, match="1 of 1 prompts have no ground truth"):
        trainer(settings(tmp_path), prompts=[bare], reward=None)


def test_long_prompts_stop_the_run_or_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = Prompt([{"role": "user", "content": "say " + "a " * 30}], "a", "tiny")
    said = (
        "5 of 9 prompts have more tokens than rollout.max_prompt_length=16 "
        "(prompt 4: 31; prompt 5: 31; p 9: 31; and 2 more)"
    )
    longs = [long, long, replace(long, place="p 9"), long, long]
    with pytest.raises(UsageError) as refused:
        trainer(settings(tmp_path), prompts=[*PROMPTS, *longs])
    assert str(refused.value) == f"{said}: set rollout.max_prompt_length=31, or data.on_too_long=skip"
    kept = trainer(settings(tmp_path, "data.on_too_long=skip"), prompts=[*PROMPTS, *longs])
    assert kept.prompts == PROMPTS and caplog.messages == [f"{said}: they are left out"]
    with pytest.raises(UsageError, match=r"^1 of 1 prompts .*: set rollout\.max_prompt_length=31$"):
        trainer(settings(tmp_path, "data.on_too_long=skip"), prompts=[long])
    empty = replace(long, messages=[{"role": "user", "content": ""}])
    with pytest.raises(UsageError, match=r"^2 of 6 prompts cannot be used: prompt 4 has no tokens.*; prompt 5 has no"):
        trainer(settings(tmp_path), prompts=[*PROMPTS, empty, empty])


def test_a_reward_that_fails_costs_its_samples_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        def __init__(self, every: int) -> None:
            self.every = every

        def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
            failure = RewardResult(0.0, "exception", "ZeroDivisionError: division by zero")
            return [failure if i % self.every == 0 else RewardResult(1.0) for i in range(len(requests))]

    metrics = trainer(settings(tmp_path), reward=Fails(2)).step(PROMPTS)
    assert metrics["reward_events"] == 16 and metrics["reward_mean"] == 0.5
    with pytest.raises(ForerunError, match=r"failed on all 32 responses \(exception: ZeroDivisionError.*\): mend"):
        trainer(settings(tmp_path), reward=Fails(1)).step(PROMPTS)
    assert "reward exception, counted as 0: ZeroDivisionError" in caplog.text
