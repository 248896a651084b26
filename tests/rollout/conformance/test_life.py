"""An engine over time: weight updates arrive whole or not at all, a stale drafter shows, sleep changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.carrier import named_weights
from forerun.rollout.protocol import Completion, SamplingParams, SpeculationTotals
from forerun.rollout.sync import digest
from tests.rollout.conformance.subjects import Subject, requests, texts

GREEDY = SamplingParams(max_tokens=16, temperature=0)


def greedy(subject: Subject) -> list[Completion]:
    return subject.engine.generate(requests(subject.prompts(6), max_tokens=16, temperature=0))


def counts_of(subject: Subject) -> tuple[list[Completion], float]:
    """Greedy texts, and the share of drafts accepted, per request where that is reported, else in all."""
    before = subject.engine.speculation_totals() or SpeculationTotals()
    done = greedy(subject)
    if all(c.spec_num_draft_tokens for c in done):
        return done, sum(c.spec_num_accepted_tokens or 0 for c in done) / sum(
            c.spec_num_draft_tokens or 0 for c in done
        )
    after = subject.engine.speculation_totals()
    assert after is not None, "neither the requests nor the engine say what was drafted"
    drafted = after.num_draft_tokens - before.num_draft_tokens
    return done, (after.num_accepted_tokens - before.num_accepted_tokens) / drafted


def missing(weights: list[tuple[str, Tensor]], name: str) -> Iterator[tuple[str, Tensor]]:
    return ((n, t) for n, t in weights if n != name)


def misshapen(weights: list[tuple[str, Tensor]], name: str) -> Iterator[tuple[str, Tensor]]:
    return ((n, t[:-1] if n == name else t) for n, t in weights)


def unknown(weights: list[tuple[str, Tensor]], name: str) -> Iterator[tuple[str, Tensor]]:
    return ((f"{n}.else" if n == name else n, t) for n, t in weights)


@pytest.mark.parametrize("fault", [missing, misshapen, unknown])
@pytest.mark.parametrize("part", ["trunk", "drafter"])
def test_a_faulty_update_is_refused_and_changes_nothing(subject: Subject, part: str, fault: object) -> None:
    before, version = texts(greedy(subject)), subject.engine.weight_version
    fingerprint = None if "digest" in subject.lacks else subject.engine.drafter_digest()
    changed = list(named_weights(subject.perturbed(trunk=True, drafter=True)))
    # The last one: everything before it would have been taken.
    name = [n for n, t in changed if (n in subject.drafter_names()) == (part == "drafter") and t.dim() > 1][-1]
    with pytest.raises(ForerunError) as caught:
        subject.engine.update_weights(fault(changed, name), version + 100)  # type: ignore[operator]
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert subject.engine.weight_version == version
    assert texts(greedy(subject)) == before
    if fingerprint is not None:
        assert subject.engine.drafter_digest() == fingerprint


def test_an_update_is_taken_over_and_every_token_tells_its_version(subject: Subject) -> None:
    before, version = greedy(subject), subject.engine.weight_version
    assert {v for c in before for v in c.weight_versions} == {version}
    own, other = subject.model, subject.perturbed(trunk=True, drafter=True)
    with subject.holding(other, version + 7):
        assert subject.engine.weight_version == version + 7
        done = greedy(subject)
        assert {v for c in done for v in c.weight_versions} == {version + 7}
        subject.model = other
        try:
            regrets = [float(score.regret.max()) for score in subject.scores(done, GREEDY)]
        finally:
            subject.model = own
        assert max(regrets) <= 2 * subject.log_prob_tolerance
        assert texts(done) != texts(before)
    assert texts(greedy(subject)) == texts(before)


def test_a_stale_drafter_shows_in_digest_and_acceptance_and_in_no_text(subject: Subject) -> None:
    before, rate = counts_of(subject)
    fresh = None if "digest" in subject.lacks else subject.engine.drafter_digest()
    with subject.holding(subject.perturbed(trunk=False, drafter=True), subject.engine.weight_version + 1):
        done, stale_rate = counts_of(subject)
        assert texts(done) == texts(before)
        assert stale_rate < 0.7 * rate
        if fresh is not None:
            assert subject.engine.drafter_digest() != fresh
    assert counts_of(subject)[1] == pytest.approx(rate)
    if fresh is not None:
        assert subject.engine.drafter_digest() == fresh


def test_the_digest_is_the_trainer_s(subject: Subject) -> None:
    subject.require("digest")
    ours = ((n, t) for n, t in named_weights(subject.model) if n in subject.drafter_names())
    assert subject.engine.drafter_digest() == digest(ours, subject.model.dtype)


def test_sleep_keeps_text_acceptance_and_drafter(subject: Subject) -> None:
    subject.require("sleep")
    before, rate = counts_of(subject)
    assert rate > 0
    for _ in range(2):
        subject.engine.sleep()
        with pytest.raises(ForerunError, match="sleep"):
            greedy(subject)
        subject.engine.wake()
        after, rate_after = counts_of(subject)
        assert texts(after) == texts(before)
        assert rate_after == pytest.approx(rate)


def test_weights_may_change_while_it_sleeps(subject: Subject) -> None:
    subject.require("sleep")
    before = texts(greedy(subject))
    other = subject.perturbed(trunk=True, drafter=True)
    version = subject.engine.weight_version
    subject.engine.sleep()
    with subject.holding(other, version + 1):
        subject.engine.wake()
        assert texts(greedy(subject)) != before
    assert torch.tensor(texts(greedy(subject))).equal(torch.tensor(before))
