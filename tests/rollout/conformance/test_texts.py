"""What an engine writes: the target's own text, ended where it was asked to, with the target's log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun import check_lossless
from forerun.rollout.counts import statistics_faults
from forerun.rollout.protocol import Request, SamplingParams
from tests.rollout.conformance.subjects import Subject, accepted, requests, texts


def test_speculation_is_lossless(subject: Subject) -> None:
    """Greedy text and sampled distribution against the model and, where drafting can be switched off, against that."""
    depth = subject.engine.num_speculative_tokens
    report = check_lossless(
        subject.engine,
        subject.prompts(4),
        model=subject.model,
        sampling=SamplingParams(max_tokens=8),
        samples=256,
        log_prob_tolerance=subject.log_prob_tolerance,
        seeds="seeds" not in subject.lacks,
    )
    report.raise_for_failures()
    found = {check.name: check.outcome for check in report.checks}
    assert {found[name] for name in ("greedy text", "log-probs", "distribution", "statistics")} == {"passed"}, report
    assert subject.engine.num_speculative_tokens == depth


def test_greedy_text_is_the_model_s(subject: Subject) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=0)
    asked = requests(subject.prompts(7), max_tokens=20, temperature=0)
    done = subject.engine.generate(asked)
    assert [c.request_id for c in done] == [r.request_id for r in asked]
    assert [len(c.token_ids) for c in done] == [20] * 7
    for score in subject.scores(done, sampling):
        assert float(score.regret.max()) <= 2 * subject.log_prob_tolerance


def test_a_seeded_text_does_not_know_its_neighbours(subject: Subject) -> None:
    subject.require("seeds")
    asked = requests(subject.prompts(5), seed=11, max_tokens=15)
    together = texts(subject.engine.generate(asked))
    strangers = requests(subject.prompts(4, seed=8), seed=900, name="s", max_tokens=9, temperature=0.5)
    mixed = subject.engine.generate([*strangers, *reversed(asked)])
    assert texts(mixed)[:3:-1] == together
    assert texts(subject.engine.generate(asked[2:3])) == together[2:3]
    other = [replace(r, sampling=replace(r.sampling, seed=(r.sampling.seed or 0) + 500)) for r in asked]
    assert texts(subject.engine.generate(other)) != together


def test_a_stop_token_ends_the_text_and_belongs_to_it(subject: Subject) -> None:
    prompts = subject.prompts(5)
    whole = texts(subject.engine.generate(requests(prompts, max_tokens=16, temperature=0)))
    for prompt, text in zip(prompts, whole, strict=True):
        stop = text[7]
        sampling = SamplingParams(max_tokens=16, temperature=0, stop_token_ids=(stop,))
        (done,) = subject.engine.generate([Request("a", prompt, sampling)])
        assert done.token_ids == text[: text.index(stop) + 1]
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
        assert len(done.log_probs) == len(done.token_ids)


def test_no_stop_token_is_sampled_too_early(subject: Subject) -> None:
    subject.require("min_tokens")
    stops = tuple(range(0, subject.words, 3))
    sampling = SamplingParams(max_tokens=16, min_tokens=5, stop_token_ids=stops)
    done = subject.engine.generate(
        requests(subject.prompts(12), seed=3, max_tokens=16, min_tokens=5, stop_token_ids=stops)
    )
    assert all(not set(c.token_ids[:5]) & set(stops) for c in done)
    assert all(c.token_ids[-1] in stops for c in done if c.finish_reason == "stop")
    assert min(len(c.token_ids) for c in done) > 5 and {c.finish_reason for c in done} >= {"stop"}
    for score in subject.scores(done, sampling):
        assert float(score.outside.max()) <= 0


def test_a_stop_string_ends_the_text_with_the_token_that_completes_it(subject: Subject) -> None:
    subject.require("stop strings")
    assert subject.tokenizer is not None
    (prompt,) = subject.prompts(1)
    (text,) = texts(subject.engine.generate(requests([prompt], max_tokens=16, temperature=0)))
    # From inside one word into the next.
    written = subject.tokenizer.decode(text)
    middle = subject.tokenizer.decode(text[:6])
    string = written[len(middle) - 1 : len(middle) + 2]
    ends = next(n for n in range(1, 17) if string in subject.tokenizer.decode(text[:n]))
    sampling = SamplingParams(max_tokens=16, temperature=0, stop=("never written", string))
    (done,) = subject.engine.generate([Request("a", prompt, sampling)])
    assert done.token_ids == text[:ends]
    assert (done.finish_reason, done.stop_reason) == ("stop", string)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_max_tokens_is_exact(subject: Subject, count: int) -> None:
    for done in subject.engine.generate(requests(subject.prompts(4), seed=1, max_tokens=count)):
        assert len(done.token_ids) == count
        assert (done.finish_reason, done.stop_reason) == ("length", None)


def test_the_context_ends_a_text_and_its_last_token_has_its_log_prob(subject: Subject) -> None:
    prompt = [3 + i % (subject.words - 3) for i in range(subject.max_model_len - 5)]
    sampling = SamplingParams(max_tokens=50, seed=4)
    (done,) = subject.engine.generate([Request("a", prompt, sampling)])
    assert len(done.token_ids) == 5 and done.finish_reason == "length"
    (score,) = subject.scores([done], sampling)
    assert (torch.tensor(done.log_probs) - score.log_prob).abs().max() <= subject.log_prob_tolerance


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.4, "top_k": 7},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.7},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5},
        {"logit_bias": {5: 2.0, 9: -3.0}},
    ],
    ids=lambda settings: "+".join(settings) or "plain",
)
def test_log_probs_are_the_teacher_forced_ones(subject: Subject, settings: dict[str, object]) -> None:
    subject.require(*settings)
    sampling = SamplingParams(max_tokens=13, **settings)  # type: ignore[arg-type]
    done = subject.engine.generate(requests(subject.prompts(5), seed=1, max_tokens=13, **settings))
    for c, score in zip(done, subject.scores(done, sampling), strict=True):
        assert float(score.outside.max()) <= 0
        assert (torch.tensor(c.log_probs) - score.log_prob).abs().max() <= subject.log_prob_tolerance
        if c.raw_log_probs is not None:
            assert (torch.tensor(c.raw_log_probs) - score.raw).abs().max() <= subject.log_prob_tolerance


def test_statistics_are_of_the_request_or_none_and_the_totals_grow(subject: Subject) -> None:
    depth = subject.engine.num_speculative_tokens
    before = subject.engine.speculation_totals()
    stops = tuple(range(0, subject.words, 15))
    done = subject.engine.generate(requests(subject.prompts(9), seed=4, max_tokens=17, stop_token_ids=stops))
    after = subject.engine.speculation_totals()
    assert [fault for c in done for fault in statistics_faults(c, depth)] == []
    assert {c.finish_reason for c in done} == {"stop", "length"}
    counts = [c.spec_num_draft_tokens for c in done if c.spec_num_draft_tokens is not None]
    assert counts or after is not None, "neither the requests nor the engine say what was drafted"
    if counts:
        assert 0 < accepted(done) < sum(counts)
    if before is not None and after is not None:
        grown = (
            after.num_verify_steps - before.num_verify_steps,
            after.num_draft_tokens - before.num_draft_tokens,
            after.num_accepted_tokens - before.num_accepted_tokens,
        )
        assert 0 < grown[2] < grown[1] <= depth * grown[0]
        assert grown[1] >= sum(counts) and grown[2] >= accepted(done)
        assert sum(after.accepted_per_depth) == after.num_accepted_tokens
