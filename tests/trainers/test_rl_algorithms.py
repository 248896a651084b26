"""Every estimator and correction in the RL loop: splits change nothing, runs resume, each does what it says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.data.prompts import Prompt
from forerun.engines.torch_engine import TorchEngine
from forerun.errors import ForerunError, UsageError
from forerun.rewards.protocol import RewardRequest, RewardResult
from forerun.rollout.protocol import Completion, Request
from forerun.trainers.experience import sample_batches
from forerun.trainers.rl import RLTrainer
from tests.logged import repeatable_metrics
from tests.trainers.tiny import make_model
from tests.trainers.tiny_rl import MTP, PROMPTS, PlainRollout, assert_same, settings, trainer, weights

CORRECTION = "algorithm.rollout_correction"
OFF_POLICY = ["ppo_mini_batch_size=2", "ppo_epochs=2"]
SET_UPS = {
    "grpo": [],
    "dr_grpo": ["algorithm.norm_adv_by_std_in_grpo=false", "algorithm.loss_agg_mode=seq-mean-token-sum-norm"],
    "rloo": ["algorithm.adv_estimator=rloo", "algorithm.loss_agg_mode=token-sum"],
    "dapo": [
        "algorithm.clip_ratio_high=0.28",
        "algorithm.filter_groups.enable=true",
        "reward.overlong_buffer.enable=true",
        "reward.overlong_buffer.len=2",
        "reward.overlong_buffer.penalty_factor=0.1",
        "data.gen_batch_size=3",
        *OFF_POLICY,
    ],
    "gspo": ["algorithm.loss_mode=gspo", "algorithm.loss_agg_mode=seq-mean-token-mean", *OFF_POLICY],
    "kl_loss": ["algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1", *OFF_POLICY],
    "entropy": ["algorithm.entropy_coeff=0.1", *OFF_POLICY],
    "kl_in_reward": ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.2", *OFF_POLICY],
    "token_tis": [f"{CORRECTION}.rollout_is=token"],
    "sequence_icepop": [f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_threshold=0.7_1.4"],
    "rejection": [
        f"{CORRECTION}.rollout_rs=token_k1,seq_mean_k2",
        f"{CORRECTION}.rollout_rs_threshold=0.75_1.33,0.05",
        "algorithm.loss_agg_mode=seq-mean-token-mean",
    ],
    "bypass": [f"{CORRECTION}.bypass_mode=true"],
}


class GappyRollout(PlainRollout):
    """Reports log-probs that are off by up to half a nat, each in its own way, as another implementation's might."""

    def generate(
        self, requests: Sequence[Request], on_finish: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        done = super().generate(requests, on_finish)
        for completion, request in zip(done, requests, strict=True):
            draw = torch.Generator().manual_seed(request.sampling.seed or 0)
            gaps = torch.rand(len(completion.token_ids), generator=draw) - 0.5
            assert completion.raw_log_probs is not None
            completion.raw_log_probs = [p + float(gap) for p, gap in zip(completion.raw_log_probs, gaps, strict=True)]
        return done


def make(tmp_path: Path, *overrides: str, **objects: object) -> RLTrainer:
    return trainer(settings(tmp_path, *overrides), rollout=GappyRollout(make_model()), **objects)


def first_gradient(made: RLTrainer) -> dict[str, Tensor]:
    """What the engine steps on in the first optimizer step of one RL step."""
    assert isinstance(made.engine, TorchEngine)
    found: dict[str, Tensor] = {}
    model, step = made.engine.model, made.engine.step

    def recorded() -> dict[str, float]:
        if not found:
            found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return step()

    made.engine.step = recorded  # type: ignore[method-assign]
    made.step(made._draw())
    return found


@pytest.mark.parametrize("name", SET_UPS)
def test_a_micro_batch_split_changes_no_gradient(tmp_path: Path, name: str) -> None:
    whole = first_gradient(make(tmp_path, *SET_UPS[name], "micro_batch_size=32"))
    assert sum(float(gradient.abs().sum()) for gradient in whole.values()) > 0
    for division in ("micro_batch_size=3", "ppo_max_token_len_per_gpu=50"):
        split = first_gradient(make(tmp_path, *SET_UPS[name], division))
        for parameter, gradient in whole.items():
            torch.testing.assert_close(split[parameter], gradient, rtol=1e-4, atol=1e-6)


def test_rows_hold_as_many_responses_as_have_room_in_so_many_tokens(tmp_path: Path) -> None:
    """Each response once, with its own advantage, and no two rows that would go into one."""
    limit = 50
    made = make(tmp_path, f"ppo_max_token_len_per_gpu={limit}")
    made.step(PROMPTS)
    batches = sample_batches(made.samples, made.config.micro_batch_size, 1.0, made.config.max_row_length)
    lengths = sorted(batch.input_ids.shape[1] for batch in batches)
    assert all(batch.input_ids.shape[0] == 1 for batch in batches) and lengths[-1] <= limit < sum(lengths[:2])
    found: list[int] = []
    for batch in batches:
        for document in range(int(batch.document_ids.max()) + 1):
            here = (batch.document_ids == document) & batch.loss_mask
            if here.any():
                (index,) = batch.extras["sample"][here].unique().tolist()
                sample = made.samples[index]
                assert batch.input_ids[here].tolist() == sample.completion.token_ids
                assert batch.extras["advantages"][here].tolist() == pytest.approx([sample.advantage] * int(here.sum()))
                found.append(index)
    assert sorted(found) == list(range(len(made.samples))) and len(batches) < len(made.samples) / 2


@pytest.mark.parametrize("name", ["rloo", "dapo", "kl_loss", "kl_in_reward", "rejection"])
def test_a_run_resumes_bit_identically(tmp_path: Path, name: str) -> None:
    def run(directory: str, steps: int) -> RLTrainer:
        output = [f"trainer.output_dir={tmp_path / directory}", f"trainer.total_steps={steps}", "trainer.save_freq=2"]
        made = make(tmp_path, *SET_UPS[name], *output)
        made.train()
        return made

    straight = run("straight", 4)
    run("stopped", 2)
    torch.manual_seed(77)
    resumed = run("stopped", 4)
    assert_same(weights(straight), weights(resumed))
    assert straight.order.state_dict() == resumed.order.state_dict()
    assert repeatable_metrics(tmp_path / "straight") == repeatable_metrics(tmp_path / "stopped")


# ---- what each does, and what it leaves alone


def test_where_all_responses_are_truncated_the_block_alone_learns(tmp_path: Path) -> None:
    made = trainer(settings(tmp_path, "algorithm.mask_truncated_completions=true", "optim.weight_decay=0", *MTP))
    generate = made.rollout.generate
    made.rollout.generate = lambda *asked: [  # type: ignore[method-assign]
        replace(completion, finish_reason="length") for completion in generate(*asked)
    ]
    before = weights(made)
    metrics = made.step(PROMPTS)
    assert metrics["response_clip_ratio"] == 1 and metrics["loss"] == 0
    moved = {name for name, tensor in weights(made).items() if not torch.equal(tensor, before[name])}
    assert moved and all("mtp" in name for name in moved)


def test_dual_clip_is_idle_on_policy_and_bounds_what_an_old_policy_punishes(tmp_path: Path) -> None:
    one = ["algorithm.clip_ratio_c=1.01"]
    assert_same(first_gradient(make(tmp_path, *one)), first_gradient(make(tmp_path, "algorithm.clip_ratio_c=null")))
    # bypass takes the rollout's gappy log-probs for the old policy's, so ratios reach exp(0.5).
    bypass = SET_UPS["bypass"]
    clipped = make(tmp_path, *bypass, *one).step(PROMPTS)
    free = make(tmp_path, *bypass, "algorithm.clip_ratio_c=null").step(PROMPTS)
    assert free["pg_clipfrac_lower"] == 0 < clipped["pg_clipfrac_lower"]  # type: ignore[operator]
    assert clipped["loss"] < free["loss"]  # type: ignore[operator]


def test_weights_matter_only_where_there_is_a_gap(tmp_path: Path) -> None:
    for name in ("token_tis", "sequence_icepop"):
        exact = first_gradient(trainer(settings(tmp_path, *SET_UPS[name])))
        plain = first_gradient(trainer(settings(tmp_path)))
        for parameter, gradient in plain.items():
            torch.testing.assert_close(exact[parameter], gradient, rtol=1e-3, atol=1e-5)
        gappy, alone = first_gradient(make(tmp_path, *SET_UPS[name])), first_gradient(make(tmp_path))
        assert any(not torch.allclose(gappy[parameter], alone[parameter], rtol=0.05) for parameter in alone)


def test_rejection_tells_what_it_rejected(tmp_path: Path) -> None:
    rejected = make(tmp_path, *SET_UPS["rejection"]).step(PROMPTS)["rollout_rs_masked_fraction"]
    assert rejected is not None and 0 < rejected < 1
    without_gap = trainer(settings(tmp_path, *SET_UPS["rejection"])).step(PROMPTS)
    assert without_gap["rollout_rs_masked_fraction"] == 0


def test_the_kl_loss_is_that_of_the_policy_the_run_began_with(tmp_path: Path) -> None:
    made = trainer(settings(tmp_path, "algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.5"))
    start = weights(made)
    first, second = made.step(PROMPTS), made.step(PROMPTS)
    assert first["kl_loss"] == 0
    assert second["kl_loss"] > 0  # type: ignore[operator]
    for metrics in (first, second):
        assert metrics["loss"] == pytest.approx(metrics["pg_loss"] + 0.5 * metrics["kl_loss"], abs=1e-6)  # type: ignore[operator]
    reference = made.update.reference
    assert isinstance(reference, TorchEngine)
    assert_same(dict(reference.named_weights()), start)
    assert any(not torch.equal(tensor, start[name]) for name, tensor in weights(made).items())


def test_without_kl_terms_no_copy_is_kept_and_at_its_start_k3_pulls_nowhere(tmp_path: Path) -> None:
    plain = trainer(settings(tmp_path))
    assert plain.update.reference is None
    pulled = trainer(settings(tmp_path, "algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=10"))
    for (name, one), two in zip(first_gradient(plain).items(), first_gradient(pulled).values(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6, msg=name)


def test_kl_in_the_reward_lowers_each_response_s_reward_by_its_own(tmp_path: Path) -> None:
    """Against a reference of another seed; the advantages are those of the rewards less 0.2 x the response's KL."""
    reference = TorchEngine(make_model(seed=9))
    overrides = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.2", "algorithm.adv_estimator=rloo"]
    made = trainer(settings(tmp_path, *overrides), reference=reference)
    ours = TorchEngine(make_model())  # as the trainer's policy is before the step
    metrics = made.step(PROMPTS)
    rewards, means = [], []
    for sample in made.samples:
        (batch,) = sample_batches([sample], 1, 1.0)
        ((policy, _),), ((other, _),) = ours.log_probs([batch]), reference.log_probs([batch])
        kl = float((policy - other).sum())
        rewards.append(sample.reward.score - 0.2 * kl)
        means.append(kl / len(sample.completion.token_ids))
    for sample, reward in zip(made.samples, rewards, strict=True):
        others = [r for s, r in zip(made.samples, rewards, strict=True) if s.group == sample.group and s is not sample]
        assert sample.advantage == pytest.approx(reward - sum(others) / len(others), abs=1e-4)
    # On policy a token's loss is minus its advantage: the update took those.
    lengths = [len(sample.completion.token_ids) for sample in made.samples]
    expected = -sum(s.advantage * length for s, length in zip(made.samples, lengths, strict=True)) / sum(lengths)
    assert metrics["loss"] == pytest.approx(expected, abs=1e-6) and abs(expected) > 1e-4
    assert metrics["reward_kl_penalty"] == pytest.approx(sum(means) / len(means), abs=1e-4)
    assert metrics["reward_mean"] == pytest.approx(sum(s.reward.score for s in made.samples) / len(made.samples))


# ---- dynamic sampling


class Judge:
    """Rewards that differ within a group for the words given, and are 1 for every other prompt."""

    def __init__(self, words: str) -> None:
        self.words = words

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        turns = itertools.cycle([0.0, 1.0])
        return [
            RewardResult(next(turns) if r.ground_truth in self.words else 1.0, fields={"size": float(len(r.response))})
            for r in requests
        ]


FILTER = ["algorithm.filter_groups.enable=true", "data.shuffle=false"]


def words(made: RLTrainer) -> list[str]:
    return [sample.prompt.ground_truth for sample in made.samples[:: made.config.rollout.n]]


def test_groups_without_a_difference_are_dropped_and_others_drawn(tmp_path: Path) -> None:
    """Four prompts a b c d in turn, of which b and c count; three groups are wanted, two prompts drawn at a time."""
    sizes = ["train_batch_size=3", "ppo_mini_batch_size=3", "data.gen_batch_size=2"]
    made = trainer(settings(tmp_path, *FILTER, *sizes), reward=Judge("bc"))
    metrics = made.step(made._draw())
    # [a b] [c d] [a b]: the third informative group is b again, with other responses.
    assert words(made) == ["b", "c", "b"] and len(made.samples) == 3 * 8
    assert (metrics["num_gen_batches"], metrics["kept_groups"]) == (3, 0.5)
    assert made.order.state_dict()["epoch"] == 1 and made.order.state_dict()["position"] == 2
    assert made.samples[0].completion.token_ids != made.samples[16].completion.token_ids
    # Metrics are of all that was sampled, the update of what was kept.
    assert metrics["reward_mean"] == pytest.approx(0.75) and metrics["informative_groups"] == 0.5
    assert metrics["target_count"] == sum(len(sample.completion.token_ids) for sample in made.samples)


def test_what_is_sampled_beyond_the_batch_is_dropped(tmp_path: Path) -> None:
    sizes = ["train_batch_size=1", "ppo_mini_batch_size=1", "data.gen_batch_size=4"]
    made = trainer(settings(tmp_path, *FILTER, *sizes), reward=Judge("bcd"))
    metrics = made.step(made._draw())
    assert words(made) == ["b"] and metrics["num_gen_batches"] == 1 and metrics["kept_groups"] == 0.75


def test_at_the_limit_a_step_trains_on_what_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit = "algorithm.filter_groups.max_num_gen_batches=2"
    made = trainer(settings(tmp_path, *FILTER, limit), reward=Judge("b"))
    metrics = made.step(made._draw())
    assert words(made) == ["b", "b"] and metrics["num_gen_batches"] == 2
    assert "training on 2 of 4 groups: max_num_gen_batches=2 is reached" in caplog.text
    hopeless = trainer(settings(tmp_path, *FILTER, limit), reward=Judge(""))
    before = weights(hopeless)
    with pytest.raises(ForerunError, match=r"step 1: in 2 generation batches no group had different values of reward"):
        hopeless.step(hopeless._draw())
    assert_same(weights(hopeless), before)


def test_groups_are_judged_by_the_metric_that_was_named(tmp_path: Path) -> None:
    """The overlong penalty makes rewards differ, not the function's own score; a field of its dict may serve too."""
    buffer = ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=2"]

    class One:
        def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
            return [RewardResult(1.0) for _ in requests]

    limit = "algorithm.filter_groups.max_num_gen_batches=1"
    by_reward = trainer(settings(tmp_path, *FILTER, *buffer, limit), reward=One())
    by_reward.step(by_reward._draw())
    assert by_reward.samples
    by_score = trainer(settings(tmp_path, *FILTER, *buffer, limit, "algorithm.filter_groups.metric=acc"), reward=One())
    with pytest.raises(ForerunError, match="no group had different values of acc"):
        by_score.step(by_score._draw())
    by_size = trainer(settings(tmp_path, *FILTER, limit, "algorithm.filter_groups.metric=size"), reward=Judge(""))
    by_size.step(by_size._draw())
    assert by_size.samples
    unknown = trainer(settings(tmp_path, *FILTER, "algorithm.filter_groups.metric=style"), reward=Judge("a"))
    with pytest.raises(UsageError, match=r"metric=style: .* no such field; there are acc, reward, size"):
        unknown.step(unknown._draw())


def test_numbers_that_a_reward_returns_become_metrics(tmp_path: Path) -> None:
    made = trainer(settings(tmp_path), reward=Judge("a"), eval_prompts=PROMPTS[:1])
    metrics = made.step(PROMPTS)
    sizes = [len(sample.text) for sample in made.samples]
    assert metrics["reward/size"] == pytest.approx(sum(sizes) / len(sizes))
    assert made.evaluate()["val/reward/size"] >= 0  # type: ignore[operator]


def test_prompts_keep_ground_truths_of_any_type(tmp_path: Path) -> None:
    seen = []

    class Notes:
        def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
            seen.extend(request.ground_truth for request in requests)
            return [RewardResult(float(i % 2)) for i in range(len(requests))]

    prompts = [Prompt([{"role": "user", "content": "say a"}], ["a", 1, None], "tiny")] * 4
    trainer(settings(tmp_path), prompts=prompts, reward=Notes()).step(prompts)
    assert seen == [["a", 1, None]] * 32
