"""`check_lossless` finds every fault that is put into a real engine, names the right check, and passes the right engine
as often as it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import forerun
from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import MTPCarrier
from forerun.rollout.chi_square import POWER, same_distribution, survival, uniform_fit
from forerun.rollout.counts import statistics_faults, totals_faults
from forerun.rollout.lossless import LosslessReport, check_lossless
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.native.sampler import Judged, Sampler
from forerun.rollout.protocol import Completion, Request, SamplingParams, SpeculationTotals
from forerun.speculative import rules
from forerun.speculative.depth_control import FixedDepth
from forerun.speculative.drafter import Drafts
from forerun.speculative.sampling import sample
from tests.rollout import tiny

PROMPTS = tiny.prompts(4)
SAMPLING = SamplingParams(max_tokens=12)
Change = Callable[[Completion], Completion]


@pytest.fixture(scope="module")
def model() -> MTPCarrier:
    return tiny.carrier()


class Wrapped:
    """A native engine whose answers are tampered with."""

    def __init__(self, inner: NativeEngine, change: Change) -> None:
        self.__dict__.update(inner=inner, change=change)

    def generate(self, requests: Sequence[Request], on_finish: Any = None) -> list[Completion]:
        return [self.change(c) for c in self.inner.generate(requests, on_finish)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)


def engine_of(model: MTPCarrier, k: int = 2, **settings: Any) -> NativeEngine:
    return NativeEngine(model, products="linear", num_speculative_tokens=k, max_num_seqs=256, **settings)


def failures(report: LosslessReport) -> set[str]:
    return {check.name for check in report.failed}


@pytest.mark.parametrize("rule", ["rejection", "match"])
def test_the_right_engine_passes(model: MTPCarrier, rule: str) -> None:
    engine = engine_of(model, acceptance=rule)
    for with_model, seed in ((model, 0), (model, 10_000), (model, 20_000), (None, 30_000)):
        report = check_lossless(engine, PROMPTS, model=with_model, sampling=SAMPLING, samples=200, seed=seed)
        report.raise_for_failures()
        assert [check.outcome for check in report.checks] == ["passed"] * 7, str(report)
    assert engine.num_speculative_tokens == 2


def test_every_sampling_setting_belongs_to_the_distribution(model: MTPCarrier) -> None:
    stops = tuple(range(0, tiny.VOCAB, 6))
    for settings in (
        {"temperature": 0.7, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 1.3, "top_k": 9, "min_tokens": 3, "stop_token_ids": stops},
        {"repetition_penalty": 1.5, "logit_bias": {3: 2.0, 7: -4.0}},
    ):
        sampling = SamplingParams(max_tokens=9, **settings)  # type: ignore[arg-type]
        report = check_lossless(engine_of(model), PROMPTS, model=model, sampling=sampling, samples=200)
        assert [check.outcome for check in report.checks] == ["passed"] * 7, str(report)


# Faults of the rules, put into the real engine

rejection, greedy = rules.rejection, rules.greedy


def too_ready(target: Tensor, drafts: Tensor, counts: Tensor, q: Tensor, u: Tensor, *rest: Any) -> rules.Verdict:
    return rejection(target, drafts, counts, q, 0.6 * u, *rest)


def next_from_the_target(
    target: Tensor, drafts: Tensor, counts: Tensor, q: Tensor, u: Tensor, next_u: Tensor, *rest: Any
) -> rules.Verdict:
    """Samples p where (p - q)+ is due."""
    accepted = rejection(target, drafts, counts, q, u, next_u, *rest).num_accepted
    at = accepted[:, None]
    probs = target.gather(1, at[..., None].expand(-1, 1, target.shape[2])).squeeze(1)
    return rules.Verdict(accepted, sample(probs, next_u.gather(1, at).squeeze(1)))


def another_q(target: Tensor, drafts: Tensor, counts: Tensor, q: Tensor | None, *rest: Any) -> rules.Verdict:
    """Drafts were sampled from another distribution than the ratio takes them to be from."""
    return rejection(target, drafts, counts, None if q is None else (q**2 / (q**2).sum(-1, keepdim=True)), *rest)


def one_number_for_both(
    target: Tensor, drafts: Tensor, counts: Tensor, q: Tensor | None, u: Tensor, next_u: Tensor, *rest: Any
) -> rules.Verdict:
    """The number that refused a draft chooses the token after it, too."""
    return rejection(target, drafts, counts, q, u, torch.cat([u, next_u[:, u.shape[1] :]], dim=1), *rest)


def likely_enough(target: Tensor, drafts: Tensor, counts: Tensor, uniforms: Tensor) -> rules.Verdict:
    """Keeps whatever is not unlikely."""
    inside = torch.arange(drafts.shape[1]) < counts[:, None]
    kept = (target[:, :-1].gather(2, drafts[..., None]).squeeze(2) > 0.005) & inside
    accepted = kept.long().cumprod(1).sum(1)
    return rules.Verdict(accepted, sample(target, uniforms).gather(1, accepted[:, None]).squeeze(1))


def second_best_will_do(target: Tensor, drafts: Tensor, counts: Tensor) -> rules.Verdict:
    """Greedy that takes the target's second choice as well."""
    changed = target.clone()
    if drafts.shape[1]:
        likely = (target[:, :-1].topk(2, dim=-1).indices == drafts[..., None]).any(-1)
        ones = torch.nn.functional.one_hot(drafts, target.shape[2]).to(target)
        changed[:, :-1] = torch.where(likely[..., None], ones, target[:, :-1])
    return greedy(changed, drafts, counts)


@pytest.mark.parametrize(
    ("rule", "fault", "found"),
    [
        ("rejection", too_ready, {"distribution"}),
        ("rejection", next_from_the_target, {"distribution"}),
        ("rejection", another_q, {"distribution"}),
        ("rejection", one_number_for_both, {"distribution"}),
        ("match", likely_enough, {"distribution"}),
        ("greedy", second_best_will_do, {"greedy text"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_lossy_rule_is_found(
    model: MTPCarrier, monkeypatch: pytest.MonkeyPatch, rule: str, fault: Any, found: set[str]
) -> None:
    engine = engine_of(model, acceptance="match" if rule == "match" else "rejection")
    monkeypatch.setattr(rules, rule, fault)
    report = check_lossless(engine, PROMPTS, model=model, sampling=SAMPLING, samples=400)
    # Where numbers are mixed up, the longest row of a step can have a say in the others' text.
    assert failures(report) - {"seeds"} == found, str(report)
    with pytest.raises(ForerunError, match=f"^speculation is not lossless: {min(found)}: [^\n]*$"):
        report.raise_for_failures()


@pytest.mark.parametrize("fault", [too_ready, next_from_the_target, one_number_for_both], ids=lambda f: f.__name__)
def test_a_lossy_rule_is_found_without_the_model(
    model: MTPCarrier, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    monkeypatch.setattr(rules, "rejection", fault)
    report = check_lossless(engine_of(model), PROMPTS[:1], sampling=SAMPLING, samples=1500)
    assert failures(report) - {"seeds"} == {"distribution"}, str(report)


# Faults of what is reported


def shifted(c: Completion) -> Completion:
    return replace(c, log_probs=c.log_probs[1:] + c.log_probs[:1], raw_log_probs=None)


def zeros(c: Completion) -> Completion:
    return replace(c, log_probs=[0.0] * len(c.token_ids))


def without_the_last(c: Completion) -> Completion:
    return replace(c, log_probs=c.log_probs[:-1])


def one_more_accepted(c: Completion) -> Completion:
    return replace(c, spec_num_accepted_tokens=(c.spec_num_accepted_tokens or 0) + 1)


def depths_swapped(c: Completion) -> Completion:
    return replace(c, accepted_per_depth=(c.accepted_per_depth or [])[::-1])


def none_counted(c: Completion) -> Completion:
    return replace(c, spec_num_accepted_tokens=0, accepted_per_depth=[0, 0])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (shifted, {"log-probs"}),
        (zeros, {"log-probs"}),
        (without_the_last, {"statistics"}),
        (one_more_accepted, {"statistics"}),
        (depths_swapped, {"statistics"}),
        (none_counted, {"acceptance", "statistics"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_false_report_is_found(model: MTPCarrier, change: Change, found: set[str]) -> None:
    engine = Wrapped(engine_of(model), change)
    report = check_lossless(engine, PROMPTS, model=model, sampling=SAMPLING, samples=200)
    assert failures(report) == found, str(report)


def test_the_draft_s_log_probs_are_found(model: MTPCarrier, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Sampler.judge

    def with_the_draft_s(self: Sampler, logits: Tensor, drafts: Drafts, *rest: Any) -> Judged:
        judged = judge(self, logits, drafts, *rest)
        if drafts.probs is not None:
            q = drafts.probs.gather(2, drafts.tokens[..., None]).squeeze(2).log().tolist()
            for row, count in enumerate(judged.accepted):
                judged.raw_log_probs[row][:count] = q[row][:count]
        return judged

    monkeypatch.setattr(Sampler, "judge", with_the_draft_s)
    report = check_lossless(engine_of(model), PROMPTS, model=model, sampling=SAMPLING, samples=200)
    assert failures(report) == {"log-probs"}, str(report)


class Asked(Wrapped):
    """Asks the engine for something else than it was asked for."""

    def __init__(self, inner: NativeEngine, change: Change = lambda c: c, **settings: Any) -> None:
        super().__init__(inner, change)
        self.__dict__["settings"] = settings

    def generate(self, requests: Sequence[Request], on_finish: Any = None) -> list[Completion]:
        given = [replace(r, sampling=replace(r.sampling, **self.settings)) for r in requests]
        return [self.change(c) for c in self.inner.generate(given)]


@pytest.mark.parametrize(
    ("settings", "change", "words"),
    [
        ({"stop_token_ids": ()}, lambda c: c, "a stop token is token"),
        ({"stop_token_ids": ()}, lambda c: replace(c, token_ids=c.token_ids[:1]), "ended as 'length'"),
        ({"max_tokens": 14}, lambda c: c, "max_tokens=12"),
        ({"max_tokens": 5}, lambda c: c, "ended as 'length' after 5 tokens"),
        ({"max_tokens": 5}, lambda c: replace(c, finish_reason="stop"), "ended as 'stop' without a stop token"),
        ({}, lambda c: replace(c, finish_reason="abort"), "ended as 'abort'"),
        ({}, lambda c: replace(c, request_id="greedy-0"), "not one for each in the same order"),
        ({}, lambda c: replace(c, prompt_token_ids=[1]), "the answer is to another prompt"),
    ],
)
def test_texts_that_do_not_end_where_they_must_are_found(
    model: MTPCarrier, settings: dict[str, Any], change: Change, words: str
) -> None:
    sampling = replace(SAMPLING, stop_token_ids=(3, 17, 40))
    report = check_lossless(Asked(engine_of(model), change, **settings), PROMPTS, sampling=sampling, samples=200)
    assert failures(report) == {"answers"} and words in str(report), str(report)


def test_a_full_context_ends_a_text(model: MTPCarrier) -> None:
    engine = engine_of(model, max_model_len=14)
    report = check_lossless(engine, PROMPTS, model=model, sampling=SAMPLING, samples=200)
    assert not report.failed, str(report)


class Forgetful(Wrapped):
    """Draws from a stream of its own, whatever the seed."""

    calls = 0

    def generate(self, requests: Sequence[Request], on_finish: Any = None) -> list[Completion]:
        type(self).calls += 1000
        return self.inner.generate(
            [replace(r, sampling=replace(r.sampling, seed=self.calls + i)) for i, r in enumerate(requests)], on_finish
        )


class Unfiltered(Wrapped):
    """Passes over top_k."""

    def generate(self, requests: Sequence[Request], on_finish: Any = None) -> list[Completion]:
        return self.inner.generate([replace(r, sampling=replace(r.sampling, top_k=0)) for r in requests], on_finish)


def test_forgotten_seeds_and_filters_are_found(model: MTPCarrier) -> None:
    report = check_lossless(
        Forgetful(engine_of(model), lambda c: c), PROMPTS, model=model, sampling=SAMPLING, samples=200
    )
    assert failures(report) == {"seeds"}, str(report)
    sampling = replace(SAMPLING, top_k=5)
    report = check_lossless(
        Unfiltered(engine_of(model), lambda c: c), PROMPTS, model=model, sampling=sampling, samples=200
    )
    assert failures(report) == {"distribution", "log-probs"}, str(report)
    assert "should never have been sampled" in str(report)


def test_a_broken_drafter_is_found_and_loses_nothing(model: MTPCarrier) -> None:
    engine = engine_of(model)
    assert engine.runner.block is not None
    with torch.no_grad():
        engine.runner.weights[next(n for n in engine.runner.drafter_names if "norm" in n)][0] = math.nan
    report = check_lossless(engine, PROMPTS, model=model, sampling=SAMPLING, samples=200)
    assert failures(report) == {"acceptance"}, str(report)
    idle = engine_of(model, depth_control=FixedDepth(0))
    report = check_lossless(idle, PROMPTS, model=model, sampling=SAMPLING, samples=200)
    assert failures(report) == {"acceptance"} and "nothing was drafted" in str(report)


class Fixed(Wrapped):
    """Drafts as it was launched to, and says so."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise UsageError("start another one")

    def speculation_totals(self) -> None:
        return None


def test_what_cannot_be_compared_is_skipped_with_the_reason(model: MTPCarrier) -> None:
    silent: Change = lambda c: replace(c, spec_num_draft_tokens=None, spec_num_accepted_tokens=None)  # noqa: E731
    fixed = Fixed(engine_of(model), silent)
    report = check_lossless(fixed, PROMPTS, sampling=SAMPLING, samples=200, seeds=False)
    outcomes = {check.name: check.outcome for check in report.checks}
    assert (outcomes.pop("answers"), outcomes.pop("statistics")) == ("passed", "passed")
    assert set(outcomes.values()) == {"skipped"} and "(start another one)" in str(report)
    report.raise_for_failures()
    report = check_lossless(fixed, PROMPTS, baseline=engine_of(model, 0), sampling=SAMPLING, samples=200)
    found = {check.name for check in report.checks if check.outcome == "passed"}
    assert found == {"answers", "statistics", "greedy text", "log-probs", "distribution", "seeds"}


def test_more_prompts_than_samples(model: MTPCarrier) -> None:
    prompts = [[1 + i % 50, 2] for i in range(210)]
    sampling = SamplingParams(max_tokens=4)
    report = check_lossless(engine_of(model), prompts, sampling=sampling, samples=200, seeds=False)
    assert not report.failed, str(report)
    assert "skipped distribution: too few texts of each prompt" in str(report)


def test_unusable_calls_say_what_to_give(model: MTPCarrier) -> None:
    engine = engine_of(model)
    with pytest.raises(UsageError, match="at least one prompt"):
        check_lossless(engine, [])
    for prompts in (["text"], [1, 2]):
        with pytest.raises(UsageError, match="a list of token ids for each prompt"):
            check_lossless(engine, prompts)  # type: ignore[arg-type]
    for samples in (3, 512.0, "512"):
        with pytest.raises(UsageError, match=f"samples={samples!r} cannot judge"):
            check_lossless(engine, PROMPTS, samples=samples)  # type: ignore[arg-type]
    for settings in ({"false_alarm_rate": 0.0}, {"false_alarm_rate": math.nan}, {"log_prob_tolerance": math.nan}):
        with pytest.raises(UsageError, match=r"must (lie between 0 and 1|be a number)"):
            check_lossless(engine, PROMPTS, **settings)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="temperature above 0"):
        check_lossless(engine, PROMPTS, sampling=SamplingParams(temperature=0))
    with pytest.raises(UsageError, match="num_speculative_tokens"):
        check_lossless(engine_of(model, 0), PROMPTS)
    assert forerun.check_lossless is check_lossless


# The tests' own error rates


def test_the_chi_square_distribution_is_the_textbook_s() -> None:
    for degrees, critical in ((1, 3.841), (4, 9.488), (19, 30.144)):
        assert survival(critical, degrees) == pytest.approx(0.05, abs=1e-4)


def test_false_alarms_come_as_often_as_the_level_says_and_faults_are_found_as_often_as_stated() -> None:
    runs, level, size = 600, 0.05, 500
    generator = torch.Generator().manual_seed(1)
    alarms = {"uniform": 0, "same": 0}
    found = {"uniform": 0, "same": 0}
    p = (-torch.arange(40) / 8).double().exp()
    p /= p.sum()
    for _ in range(runs):
        numbers = torch.rand(size, generator=generator, dtype=torch.float64)
        fit = uniform_fit(numbers, level)
        alarms["uniform"] += fit.p_value < level
        # So much of the mass of the upper half goes to the lower one.
        moved = (numbers > 0.5) & (torch.rand(size, generator=generator) < 2 * fit.detectable)
        found["uniform"] += uniform_fit(torch.where(moved, numbers - 0.5, numbers), level).p_value < level
        ours, theirs = torch.multinomial(p.expand(2, -1), size, True, generator=generator)
        same = same_distribution([(ours, theirs)], level)
        alarms["same"] += same.p_value < level
        # The more probable half of the mass loses so much to the other half.
        moved = (ours < 5) & (torch.rand(size, generator=generator) < same.detectable / p[:5].sum())
        found["same"] += same_distribution([(torch.where(moved, ours + 5, ours), theirs)], level).p_value < level
    for count in alarms.values():
        assert abs(count - level * runs) < 4.5 * math.sqrt(level * (1 - level) * runs), alarms
    for count in found.values():
        assert count > runs * POWER - 4.5 * math.sqrt(POWER * (1 - POWER) * runs), found


def test_impossible_counts_are_named() -> None:
    right = Completion("a", [1], [5, 6, 7, 8], [-1.0] * 4, None, "length", [0] * 4, None, 3, 1, 2, [2, 1], [1, 0])
    assert list(statistics_faults(right, 2)) == []
    for change in (
        {"log_probs": [-1.0] * 3},
        {"raw_log_probs": [-1.0] * 5},
        {"weight_versions": []},
        {"spec_num_accepted_tokens": 4, "accepted_per_depth": None},
        {"spec_num_verify_steps": 1},
        {"spec_num_verify_steps": 4},
        {"drafted_per_depth": [1, 2]},
        {"drafted_per_depth": [1, 1, 1]},
        {"accepted_per_depth": [0, 1]},
        {"accepted_per_depth": [1, 1]},
        {"drafted_per_depth": [3, 0], "spec_num_accepted_tokens": 2, "accepted_per_depth": [1, 1]},
    ):
        assert list(statistics_faults(replace(right, **change), 2)), change  # type: ignore[arg-type]
    totals = SpeculationTotals(2, 3, 1, [1, 0])
    assert list(totals_faults([right], totals)) == []
    for field, value in (
        ("num_verify_steps", 1),
        ("num_draft_tokens", 2),
        ("num_accepted_tokens", 0),
        ("num_accepted_tokens", 4),
        ("accepted_per_depth", [1, 1]),
    ):
        assert list(totals_faults([right], replace(totals, **{field: value}))), field  # type: ignore[arg-type]
