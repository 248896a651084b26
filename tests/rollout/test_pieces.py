"""A response in pieces is the response: text, limits, stop strings and figures are those of the whole."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from forerun.models.carrier import MTPCarrier
from forerun.rollout.counts import statistics_faults
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.pieces import as_ended, continuation, joined
from forerun.rollout.protocol import Completion, Request, SamplingParams
from tests.rollout import tiny
from tests.rollout.test_native_stopping import STRINGS, TOKENIZERS, first_end


def piece(tokens: list[int], reason: str = "abort", **fields: object) -> Completion:
    values: dict[str, object] = {"log_probs": [-0.5 * t for t in tokens], "raw_log_probs": None}
    values |= {"weight_versions": [1] * len(tokens), "finish_reason": reason, **fields}
    return Completion(request_id="r", prompt_token_ids=[7, 8], token_ids=tokens, **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> MTPCarrier:
    return tiny.carrier()


def interrupted(engine: NativeEngine, request: Request, draw: random.Random, tokenizer: object = None) -> Completion:
    """The request, aborted again and again after some tokens, and written on each time."""
    written: Completion | None = None
    while True:
        asked = request if written is None else continuation(request, written)
        budget = draw.randint(1, 4)
        count = 0

        def cut(name: str, tokens: list[int], limit: int = budget) -> None:
            nonlocal count
            count += len(tokens)
            if count >= limit:
                engine.abort([name])

        (done,) = engine.generate([asked], on_tokens=cut)
        written = done if written is None else joined(request, written, done, tokenizer)  # type: ignore[arg-type]
        written = as_ended(request, written)
        if written.finish_reason != "abort":
            return written


@pytest.mark.parametrize("depth", [0, 2])
def test_a_greedy_text_that_is_interrupted_is_the_one_that_is_not(model: MTPCarrier, depth: int) -> None:
    engine = NativeEngine(model, num_speculative_tokens=depth, products="linear")
    draw, steps = random.Random(3), 0
    for prompt in tiny.prompts(6):
        (whole,) = engine.generate([Request("r", prompt, SamplingParams(max_tokens=20, temperature=0))])
        stop = whole.token_ids[11]
        sampling = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(stop,), min_tokens=draw.choice([0, 3]))
        request = Request("r", prompt, sampling)
        (expected,) = engine.generate([request])
        found = interrupted(engine, request, draw)
        assert found.token_ids == expected.token_ids and found.prompt_token_ids == prompt
        assert (found.finish_reason, found.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-9)
        assert not list(statistics_faults(found, depth))
        steps += found.spec_num_verify_steps or 0
    assert (steps > 0) == (depth > 0)


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_a_stop_string_is_found_across_the_joint(kind: str) -> None:
    make, words = TOKENIZERS[kind]
    tokenizer, draw = make(), random.Random(1)
    across = 0
    for _ in range(300):
        tokens = [draw.randrange(words) for _ in range(draw.randint(2, 16))]
        strings = tuple(draw.sample(STRINGS, 2))
        at, least = draw.randint(1, len(tokens) - 1), draw.randint(0, 2)
        request = Request("r", [7, 8], SamplingParams(max_tokens=16, stop=strings, min_tokens=least))
        flags = [draw.random() < 0.5 for _ in tokens]
        first = piece(tokens[:at], spec_num_draft_tokens=4, accepted_draft=flags[:at])
        rest = piece(tokens[at:], "length", spec_num_draft_tokens=3, accepted_draft=flags[at:])
        whole = joined(request, first, rest, tokenizer)
        ends = first_end(tokenizer, tokens, strings, least)
        size = len(tokens) if ends is None else ends[0]
        assert whole.token_ids == tokens[:size] and whole.accepted_draft == flags[:size]
        assert len(whole.log_probs) == len(whole.weight_versions) == size
        expected = ("length", None) if ends is None else ("stop", ends[1])
        assert (whole.finish_reason, whole.stop_reason) == expected
        # What came behind the end was counted, too: how much of it, nobody knows.
        assert whole.spec_num_draft_tokens == (7 if size == len(tokens) else None)
        across += ends is not None and ends[0] > at
    assert across > 20


def test_what_is_left_is_asked_for_with_a_seed_of_its_own() -> None:
    sampling = SamplingParams(max_tokens=9, min_tokens=4, temperature=0.7, top_k=3, seed=5, logit_bias={1: 2.0})
    request = Request("r", [7, 8], sampling)
    left = continuation(request, piece([1, 2, 3]))
    assert (left.request_id, left.prompt_token_ids) == ("r", [7, 8, 1, 2, 3])
    assert left.sampling == replace(sampling, max_tokens=6, min_tokens=1, seed=left.sampling.seed)
    seeds = {continuation(request, piece([1] * count)).sampling.seed for count in range(9)}
    assert len(seeds) == 9 and 5 in seeds  # nothing written: the request as it was
    assert continuation(request, piece([1] * 6)).sampling.min_tokens == 0
    unseeded = replace(request, sampling=replace(sampling, seed=None))
    assert continuation(unseeded, piece([1])).sampling.seed is None
    with pytest.raises(ValueError, match="all of its 9 tokens"):
        continuation(request, piece([1] * 9))


def test_what_one_piece_does_not_tell_the_whole_does_not() -> None:
    request = Request("r", [7, 8])
    counted = {"spec_num_draft_tokens": 2, "drafted_per_depth": [2, 1], "raw_log_probs": [-1.0]}
    whole = joined(request, piece([1], **counted), piece([2], "stop", stop_reason=2, **counted))
    assert (whole.spec_num_draft_tokens, whole.drafted_per_depth) == (4, [4, 2])
    assert (whole.finish_reason, whole.stop_reason, whole.raw_log_probs) == ("stop", 2, [-1.0, -1.0])
    assert joined(request, piece([1], drafted_per_depth=[1]), piece([2], drafted_per_depth=[])).drafted_per_depth == [1]
    silent = joined(request, piece([1], **counted), piece([2]))
    assert silent.spec_num_draft_tokens is silent.drafted_per_depth is silent.raw_log_probs is None


def test_an_abort_that_comes_at_the_end_is_none() -> None:
    request = Request("r", [7, 8], SamplingParams(max_tokens=3, min_tokens=1, stop_token_ids=(9,)))
    for tokens, reason in (([1, 2, 3], "length"), ([1, 9], "stop"), ([9], "abort"), ([1, 2], "abort"), ([], "abort")):
        ended = as_ended(request, piece(tokens))
        assert ended.finish_reason == reason
        assert ended.stop_reason == (9 if reason == "stop" else None)
