"""Many requests, some of them aborted, unusable, or with a caller that fails: nothing is lost and nothing hangs."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from forerun.errors import ForerunError, UsageError
from forerun.rollout.protocol import Completion, Request, SamplingParams
from tests.rollout.conformance.subjects import Subject, requests, texts

MANY = 200


def mixed(subject: Subject) -> list[Request]:
    """Requests of many lengths and settings."""
    draw = random.Random(6)
    made = []
    for i, prompt in enumerate(subject.prompts(MANY, seed=2)):
        temperature = draw.choice([0.0, 0.7, 1.0])
        made.append(
            Request(f"m{i}", prompt, SamplingParams(max_tokens=draw.randint(1, 24), temperature=temperature, seed=i))
        )
    return made


@pytest.mark.parametrize("where", ["on_finish", "thread"])
def test_many_requests_with_random_aborts_lose_nothing(subject: Subject, where: str) -> None:
    asked = mixed(subject)
    ids = [request.request_id for request in asked]
    whole = {c.request_id: c for c in subject.engine.generate(asked)}
    draw = random.Random(9)
    finished: Counter[str] = Counter()
    ended = threading.Event()

    def note(completion: Completion) -> None:
        finished[completion.request_id] += 1
        if where == "on_finish" and len(finished) < 120:
            # Among them some that are over already, and one that never was.
            subject.engine.abort([draw.choice(ids), "nobody"])

    def interfere() -> None:
        for _ in range(100):  # of the 200, so that many are left however slow the engine is
            if ended.wait(0.02):
                break
            subject.engine.abort([draw.choice(ids)])

    thread = threading.Thread(target=interfere)
    if where == "thread":
        thread.start()
    try:
        done = subject.engine.generate(asked, on_finish=note)
    finally:
        ended.set()
        if where == "thread":
            thread.join()
    assert [c.request_id for c in done] == ids
    assert finished == Counter(ids)
    reasons = Counter(c.finish_reason for c in done)
    assert reasons["length"] > 20 and (reasons["abort"] > 5 or where == "thread"), reasons
    for request, c in zip(asked, done, strict=True):
        assert len(c.log_probs) == len(c.weight_versions) == len(c.token_ids)
        if c.finish_reason != "abort":
            assert len(c.token_ids) == request.sampling.max_tokens
        if "seeds" not in subject.lacks:
            text = whole[c.request_id].token_ids
            assert c.token_ids == (text if c.finish_reason != "abort" else text[: len(c.token_ids)])


def test_an_abort_meets_who_runs_and_nobody_later(subject: Subject) -> None:
    asked = requests(subject.prompts(3), seed=1, max_tokens=10)
    whole = texts(subject.engine.generate(asked))
    subject.engine.abort(["r0", "r1", "r2"])
    done = subject.engine.generate(asked)
    assert [c.finish_reason for c in done] == ["length"] * 3
    if "seeds" not in subject.lacks:
        assert texts(done) == whole


def test_requests_that_join_a_running_call_are_completed_like_the_others(subject: Subject) -> None:
    subject.require("add")
    # vLLM's text on a prompt of one token depends on what else is in the batch, seed or not.
    chosen = [request for request in mixed(subject) if len(request.prompt_token_ids) > 1][:24]
    asked = [replace(r, sampling=replace(r.sampling, max_tokens=2 + 3 * i)) for i, r in enumerate(chosen)]
    whole = {c.request_id: c for c in subject.engine.generate(asked)}
    later = iter([asked[i : i + 3] for i in range(6, 24, 3)])
    finished: Counter[str] = Counter()

    def note(completion: Completion) -> None:
        finished[completion.request_id] += 1
        if (further := next(later, None)) is not None:
            subject.engine.add(further)

    done = subject.engine.generate(asked[:6], on_finish=note)
    assert [c.request_id for c in done] == [request.request_id for request in asked]
    assert finished == Counter(request.request_id for request in asked)
    for request, c in zip(asked, done, strict=True):
        assert (len(c.token_ids), c.finish_reason) == (request.sampling.max_tokens, "length")
        if "seeds" not in subject.lacks:
            assert c.token_ids == whole[c.request_id].token_ids


def test_requests_join_from_another_thread_until_the_call_ends(subject: Subject) -> None:
    subject.require("add")
    asked = mixed(subject)
    refused: list[Request] = []
    taken: list[Request] = []
    started, joined = threading.Event(), threading.Event()

    def join() -> None:
        started.wait()
        for request in asked[20:]:
            try:
                subject.engine.add([request])
            except ForerunError:
                refused.append(request)
            else:
                taken.append(request)
            joined.set()

    def begin(_: Completion) -> None:
        started.set()
        assert joined.wait(60)  # the thread may get its turn late

    thread = threading.Thread(target=join)
    thread.start()
    done = subject.engine.generate(asked[:20], on_finish=begin)
    thread.join()
    # Each was either refused or completed, whenever the call ended.
    assert [c.request_id for c in done] == [request.request_id for request in asked[:20] + taken]
    assert taken + refused == asked[20:] and taken
    assert all(len(c.token_ids) == r.sampling.max_tokens for r, c in zip(asked[:20] + taken, done, strict=True))


def test_what_cannot_join_is_refused_and_those_that_run_go_on(subject: Subject) -> None:
    subject.require("add")
    with pytest.raises(ForerunError, match="not generating"):
        subject.engine.add(requests(subject.prompts(1)))
    asked = requests(subject.prompts(3), seed=1, max_tokens=6)
    asked[0] = replace(asked[0], sampling=replace(asked[0].sampling, max_tokens=2))
    refusals: list[str] = []

    def add_unusable(_: Completion) -> None:
        for bad in (Request("empty", []), asked[2]):
            with pytest.raises(UsageError, match=bad.request_id) as caught:
                subject.engine.add([Request("fine", [3]), bad])
            refusals.append(str(caught.value))

    done = subject.engine.generate(asked, on_finish=lambda c: add_unusable(c) if c.request_id == "r0" else None)
    assert [(c.request_id, len(c.token_ids)) for c in done] == [("r0", 2), ("r1", 6), ("r2", 6)]
    assert len(refusals) == 2 and "\n" not in "".join(refusals)


@pytest.mark.parametrize("fault", ["empty", "long", "twice", "unknown word"])
def test_an_unusable_request_is_refused_before_anything_starts(subject: Subject, fault: str) -> None:
    prompt = {"empty": [], "long": [3] * subject.max_model_len, "twice": [5], "unknown word": [subject.words]}[fault]
    bad = Request("good" if fault == "twice" else "bad", prompt)
    finished: list[Completion] = []
    before = subject.engine.speculation_totals()
    with pytest.raises(UsageError, match=bad.request_id) as caught:
        subject.engine.generate([Request("good", [3], SamplingParams(max_tokens=4)), bad], finished.append)
    assert "\n" not in str(caught.value)
    assert not finished and subject.engine.speculation_totals() == before


UNUSUAL: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "top_p": {"top_k": 20, "top_p": 0.5},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (5,)},
}


@pytest.mark.parametrize("setting", UNUSUAL)
def test_a_setting_that_the_engine_lacks_is_refused_and_any_other_taken(subject: Subject, setting: str) -> None:
    asked = requests([[5, 6]], seed=1, max_tokens=4, **UNUSUAL[setting])
    if any(name == setting for name in subject.lacks):
        with pytest.raises(UsageError, match=setting):
            subject.engine.generate([Request("good", [3], SamplingParams(max_tokens=4)), *asked])
    else:
        assert len(subject.engine.generate(asked)) == 1


def test_a_caller_that_fails_leaves_the_engine_usable(subject: Subject) -> None:
    asked = requests(subject.prompts(9), seed=3, max_tokens=12)
    asked[4] = replace(asked[4], sampling=replace(asked[4].sampling, max_tokens=2))
    whole = texts(subject.engine.generate(asked))

    def fail(completion: Completion) -> None:
        raise RuntimeError(f"the caller stumbled over {completion.request_id}")

    with pytest.raises(RuntimeError, match="stumbled"):
        subject.engine.generate(asked, on_finish=fail)
    done = subject.engine.generate(asked)
    assert [len(c.token_ids) for c in done] == [len(text) for text in whole]
    if "seeds" not in subject.lacks:
        assert texts(done) == whole


def test_nothing_to_do(subject: Subject) -> None:
    assert subject.engine.generate([]) == []
