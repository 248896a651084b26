"""Every sampling setting, alone and together, against a slow reference that decodes one token at a time in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import UsageError
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Completion, Request, SamplingParams
from tests.rollout import tiny
from tests.rollout.reference import SETTINGS, STOPS, Text, distribution, written


def check(completion: Completion, expected: Text) -> None:
    assert completion.token_ids == expected.token_ids
    assert completion.log_probs == pytest.approx(expected.log_probs, abs=3e-5)
    assert completion.raw_log_probs == pytest.approx(expected.raw_log_probs, abs=3e-5)


def requests(**settings: object) -> list[Request]:
    """Every row of the table at several temperatures, mixed."""
    made = []
    for n, (name, own) in enumerate(SETTINGS.items()):
        for temperature in (0.0, 0.8, 1.3):
            sampling = SamplingParams(**{"max_tokens": 14, "temperature": temperature, "seed": n, **own, **settings})  # type: ignore[arg-type]
            made.append(Request(f"{name} at {temperature}", tiny.prompts(9)[n], sampling))
    return made


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.carrier()


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> dict[str, Text]:
    return {request.request_id: written(model, request) for request in requests()}


@pytest.mark.parametrize("vocabulary", [None, torch.arange(0, tiny.VOCAB, 3)], ids=["full", "reduced"])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_match_and_greedy_write_the_reference_s_text(
    model: PreTrainedModel,
    expected: dict[str, Text],
    k: int,
    vocabulary: Tensor | None,
) -> None:
    engine = NativeEngine(
        model, products="linear", acceptance="match", num_speculative_tokens=k, draft_vocabulary=vocabulary
    )
    completions = engine.generate(requests())
    for completion in completions:
        check(completion, expected[completion.request_id])
        early = completion.token_ids[: SETTINGS["min_tokens"]["min_tokens"]]  # type: ignore[misc]
        if completion.request_id.startswith("min_tokens"):
            assert not set(early) & set(STOPS)
    assert (sum(c.spec_num_accepted_tokens or 0 for c in completions) > 0) == (k > 0)
    reasons = {c.stop_reason for c in completions if c.finish_reason == "stop"}
    assert reasons and reasons <= set(STOPS)


@pytest.mark.parametrize("k", [1, 3])
def test_rejection_reports_the_probabilities_of_the_settings(model: PreTrainedModel, k: int) -> None:
    """Its text is its own, with drafts; each token's log-prob is still that of the reference at that place."""
    engine = NativeEngine(model, products="linear", acceptance="rejection", num_speculative_tokens=k)
    wanted = requests()
    for request, completion in zip(wanted, engine.generate(wanted), strict=True):
        logits = tiny.teacher_forced(model, completion.prompt_token_ids, completion.token_ids)
        for n, token in enumerate(completion.token_ids):
            probs = distribution(logits[n], completion.token_ids[:n], completion.prompt_token_ids, request.sampling)
            assert probs[token] > 0
            assert completion.log_probs[n] == pytest.approx(float(probs[token].log()), abs=3e-5)


@pytest.mark.parametrize("name", ["penalty", "all"])
def test_rejection_keeps_the_distribution_of_the_settings(model: PreTrainedModel, name: str) -> None:
    """Chi-square of the third token, whose distribution hangs on the two before, against exact enumeration."""
    count, prompt = 3000, [7, 8, 9]
    sampling = {**SETTINGS[name], "max_tokens": 3, "min_tokens": 3 if name == "all" else 0, "top_k": 8}
    settings = [SamplingParams(**sampling, seed=seed) for seed in range(count)]  # type: ignore[arg-type]
    engine = NativeEngine(model, products="linear", num_speculative_tokens=2, max_num_seqs=1000)
    drawn = engine.generate([Request(str(n), prompt, s) for n, s in enumerate(settings)])
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    with torch.no_grad():
        for _ in range(3):
            logits = model(torch.tensor([prompt + list(path) for path in paths])).logits[:, -1].double()
            grown: dict[tuple[int, ...], float] = {}
            for (path, mass), row in zip(paths.items(), logits, strict=True):
                probs = distribution(row, list(path), prompt, settings[0])
                grown |= {(*path, int(word)): mass * float(probs[word]) for word in probs.nonzero().flatten()}
            paths = grown
    marginal = torch.zeros(tiny.VOCAB, dtype=torch.float64)
    for path, mass in paths.items():
        marginal[path[2]] += mass
    seen = torch.bincount(torch.tensor([c.token_ids[2] for c in drawn]), minlength=tiny.VOCAB).double()
    assert seen[marginal == 0].sum() == 0
    large = marginal * count >= 5
    chi_square = ((seen - count * marginal) ** 2 / (count * marginal))[large].sum().item()
    assert chi_square < int(large.sum()) + 4.5 * math.sqrt(2 * int(large.sum())) + 8
    assert sum(c.spec_num_accepted_tokens or 0 for c in drawn) > 0


def test_a_perfect_drafter_stays_perfect_under_every_setting() -> None:
    """The draft's logits are the target's, so whatever changes these has to change those, or drafts are refused."""
    engine = NativeEngine(tiny.perfect_carrier(), products="linear", num_speculative_tokens=3)
    for completion in engine.generate(requests(stop_token_ids=(), min_tokens=0)):
        assert completion.accepted_per_depth == completion.drafted_per_depth, completion.request_id
    banning = SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=STOPS, seed=1)
    (completion,) = engine.generate([Request("banning", [1, 2], banning)])
    assert completion.accepted_per_depth == completion.drafted_per_depth == [2, 2, 2]


def test_a_settings_text_does_not_depend_on_the_batch(model: PreTrainedModel) -> None:
    engine = NativeEngine(model, products="linear", num_speculative_tokens=2)
    wanted = requests()
    together = [c.token_ids for c in engine.generate(wanted)]
    engine.max_num_seqs = 1
    assert [engine.generate([request])[0].token_ids for request in wanted] == together


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": {61: 1.0}}, "'r0' has a logit_bias for token ids outside 0..60"),
        ({"logit_bias": {-1: 1.0}}, "'r0' has a logit_bias for token ids outside 0..60"),
        ({"min_tokens": 2, "stop_token_ids": tuple(range(61))}, "'r0' has min_tokens=2, and every token would stop it"),
        ({"stop": ("x",)}, "'r0' has stop strings, for which the engine needs its tokenizer"),
    ],
)
def test_settings_that_cannot_be_are_refused(model: PreTrainedModel, settings: dict[str, object], message: str) -> None:
    engine = NativeEngine(model, products="linear")
    with pytest.raises(UsageError, match=message):
        engine.generate(tiny.requests([[1]], max_tokens=4, **settings))


def test_stop_tokens_beyond_the_vocabulary_change_nothing(model: PreTrainedModel) -> None:
    engine = NativeEngine(model, products="linear")
    plain = engine.generate(tiny.requests([[1]], max_tokens=6, temperature=0))
    beyond = engine.generate(tiny.requests([[1]], max_tokens=6, min_tokens=3, temperature=0, stop_token_ids=(400,)))
    assert plain[0].token_ids == beyond[0].token_ids
