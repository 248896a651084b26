"""The native engine writes what the model alone would write, drafts or not, whatever the batch."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import ForerunError, UsageError
from forerun.models.attach import attach
from forerun.models.carrier import named_weights
from forerun.mtp.config import MTPConfig
from forerun.rollout.native.sequence import Running
from forerun.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams
from tests.rollout import tiny
from tests.rollout.tiny import engine_of


def texts(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


@pytest.mark.parametrize("kind", list(tiny.KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_text_equals_transformers_for_any_batch_and_k(kind: str, dtype: torch.dtype) -> None:
    model = tiny.carrier(kind, dtype=dtype)
    rows = tiny.prompts(7)
    expected = [tiny.generated(model, row, 20) for row in rows]
    engine = engine_of(model)
    accepted = 0
    for engine.max_num_seqs, depths in ((1, (0, 2)), (3, (1, 5)), (8, (0, 2, 5))):
        for engine.num_speculative_tokens in depths:
            completions = engine.generate(tiny.requests(rows, max_tokens=20, temperature=0))
            assert texts(completions) == expected
            accepted += sum(c.spec_num_accepted_tokens or 0 for c in completions)
    assert accepted > 0  # otherwise the verification of several positions was never at stake


@pytest.mark.parametrize("words", [[5], list(range(0, 61, 3))], ids=["one word", "a third"])
def test_a_reduced_draft_vocabulary_changes_no_greedy_text(words: list[int]) -> None:
    model = tiny.carrier()
    rows = tiny.prompts(4)
    expected = [tiny.generated(model, row, 15) for row in rows]
    engine = engine_of(model, draft_vocabulary=torch.tensor(words), num_speculative_tokens=3)
    assert texts(engine.generate(tiny.requests(rows, max_tokens=15, temperature=0))) == expected


def test_a_model_without_mtp_decodes_plainly() -> None:
    model = tiny.trunk()
    rows = tiny.prompts(3)
    engine = engine_of(model, num_speculative_tokens=3)
    completions = engine.generate(tiny.requests(rows, max_tokens=10, temperature=0))
    assert texts(completions) == [tiny.generated(model, row, 10) for row in rows]
    assert all(c.spec_num_draft_tokens == 0 and c.acceptance_length is None for c in completions)


@pytest.mark.parametrize("rule", ["rejection", "match"])
@pytest.mark.parametrize("k", [0, 3])
def test_a_seeded_text_depends_on_its_seed_alone(rule: str, k: int) -> None:
    engine = engine_of(tiny.carrier(), acceptance=rule, num_speculative_tokens=k)
    rows = tiny.prompts(6)
    wanted = tiny.requests(rows, max_tokens=15, seed=11)
    together = texts(engine.generate(wanted))
    assert texts(engine.generate(wanted)) == together
    engine.max_num_seqs = 2
    others = [Request("x", [1, 2], SamplingParams(max_tokens=9)), *reversed(wanted)]
    assert texts(engine.generate(others))[:0:-1] == together
    # A shorter text is the beginning of the longer one.
    if k == 0:
        shorter = texts(engine.generate(tiny.requests(rows, max_tokens=6, seed=11)))
        assert shorter == [text[:6] for text in together]
    assert texts(engine.generate(tiny.requests(rows, max_tokens=15, seed=500))) != together


def test_unseeded_requests_follow_the_engine_s_seed() -> None:
    wanted = tiny.requests(tiny.prompts(3), max_tokens=12)
    engine = engine_of(tiny.carrier(), seed=5)
    first, second = texts(engine.generate(wanted)), texts(engine.generate(wanted))
    assert first != second
    again = engine_of(tiny.carrier(), seed=5)
    assert [texts(again.generate(wanted)), texts(again.generate(wanted))] == [first, second]


def test_match_writes_the_plain_text_for_any_k() -> None:
    engine = engine_of(tiny.carrier(), acceptance="match")
    wanted = tiny.requests(tiny.prompts(12), max_tokens=30, seed=3, temperature=0.7, top_p=0.9)
    engine.num_speculative_tokens = 0
    plain = texts(engine.generate(wanted))
    for engine.num_speculative_tokens in (1, 4):
        completions = engine.generate(wanted)
        assert texts(completions) == plain
    assert sum(c.spec_num_accepted_tokens or 0 for c in completions) > 0


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 7},
        {"temperature": 1.4, "top_p": 0.8},
        {"temperature": 0.0},
    ],
)
def test_log_probs_equal_teacher_forced_ones_up_to_the_last_token(k: int, sampling: dict[str, float]) -> None:
    model = tiny.carrier("qwen2")
    engine = engine_of(model, num_speculative_tokens=k)
    for c in engine.generate(tiny.requests(tiny.prompts(5), max_tokens=13, seed=1, **sampling)):
        logits = tiny.teacher_forced(model, c.prompt_token_ids, c.token_ids)
        tokens = torch.tensor(c.token_ids)[:, None]
        raw = logits.log_softmax(-1).gather(1, tokens).squeeze(1)
        torch.testing.assert_close(torch.tensor(c.raw_log_probs, dtype=torch.float64), raw, rtol=0, atol=2e-5)
        if sampling["temperature"] == 0:
            assert c.log_probs == [0.0] * 13
            continue
        scaled = logits / sampling["temperature"]
        kept = torch.ones_like(scaled, dtype=torch.bool)
        for row, ranked in enumerate(scaled.argsort(-1, descending=True)):
            if "top_k" in sampling:
                kept[row, ranked[int(sampling["top_k"]) :]] = False
            if "top_p" in sampling:
                mass = scaled[row].softmax(-1)[ranked].cumsum(0)
                kept[row, ranked[1:][mass[:-1] >= sampling["top_p"]]] = False
        expected = scaled.masked_fill(~kept, -math.inf).log_softmax(-1).gather(1, tokens).squeeze(1)
        torch.testing.assert_close(torch.tensor(c.log_probs, dtype=torch.float64), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("vocabulary", [None, torch.arange(0, 61, 2)], ids=["full", "reduced"])
@pytest.mark.parametrize("rule", ["rejection", "match"])
def test_sampled_text_has_the_model_s_distribution(rule: str, vocabulary: torch.Tensor | None) -> None:
    """Chi-square of the second and third token over many requests against exact marginals."""
    model = tiny.carrier()
    prompt, count = [7, 8, 9], 3000
    engine = engine_of(model, acceptance=rule, num_speculative_tokens=2, max_num_seqs=1000, draft_vocabulary=vocabulary)
    sampling = [SamplingParams(max_tokens=3, temperature=1.5, top_k=12, seed=i) for i in range(count)]
    drawn = engine.generate([Request(str(i), prompt, s) for i, s in enumerate(sampling)])

    def following(contexts: list[list[int]]) -> torch.Tensor:
        logits = model(torch.tensor(contexts)).logits[:, -1] / 1.5
        best = logits.topk(12)
        return torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(-1))

    with torch.no_grad():
        paths = {tuple(prompt): 1.0}
        for position in range(3):
            grown: dict[tuple[int, ...], float] = {}
            marginal = torch.zeros(tiny.VOCAB, dtype=torch.float64)
            for (path, mass), probs in zip(paths.items(), following([list(p) for p in paths]), strict=True):
                marginal += mass * probs
                for word in probs.nonzero().flatten().tolist():
                    grown[(*path, word)] = mass * float(probs[word])
            paths = grown
            observed = torch.bincount(
                torch.tensor([c.token_ids[position] for c in drawn]), minlength=tiny.VOCAB
            ).double()
            assert observed[marginal == 0].sum() == 0
            large = marginal * count >= 5
            cells = int(large.sum())
            chi_square = ((observed - count * marginal) ** 2 / (count * marginal))[large].sum().item()
            assert chi_square < cells + 4.5 * math.sqrt(2 * cells) + 8
    assert sum(c.spec_num_accepted_tokens or 0 for c in drawn) > 0


def test_a_perfect_drafter_has_every_draft_accepted() -> None:
    engine = engine_of(tiny.perfect_carrier(), num_speculative_tokens=3)
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        # The first token comes from the prompt's forward; 12 = 3 full steps of 4.
        for completion in engine.generate(tiny.requests(tiny.prompts(4), max_tokens=13, **sampling)):
            assert completion.drafted_per_depth == completion.accepted_per_depth == [3, 3, 3]
            assert completion.spec_num_verify_steps == 3
            assert completion.acceptance_length == 4.0
        # 10 = 2 full steps and one that the limit leaves 1 draft.
        for completion in engine.generate(tiny.requests(tiny.prompts(4), max_tokens=11, **sampling)):
            assert completion.drafted_per_depth == completion.accepted_per_depth == [3, 2, 2]


def test_accepted_drafts_lie_where_the_steps_put_them() -> None:
    engine = engine_of(tiny.carrier(), num_speculative_tokens=3)
    steps: dict[str, list[int]] = {}
    append = Running.append

    def noting(self: Running, *given: Any) -> int:
        taken = append(self, *given)
        steps.setdefault(self.request.request_id, []).append(taken)
        return taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Running, "append", noting)
        completions = engine.generate(tiny.requests(tiny.prompts(9), max_tokens=17, seed=4))
    assert any(sum(c.accepted_draft or []) for c in completions)
    for c in completions:
        ends = list(itertools.accumulate(steps[c.request_id]))
        assert c.accepted_draft is not None and ends[-1] == len(c.token_ids)
        # Without a stop every step ends with a token of the target's own, and holds accepted drafts before it.
        own = {end - 1 for end in ends}
        assert [not flag for flag in c.accepted_draft] == [place in own for place in range(len(c.token_ids))]


def test_counts_add_up_to_the_tokens() -> None:
    engine = engine_of(tiny.carrier(), num_speculative_tokens=3)
    stop = tuple(range(0, tiny.VOCAB, 15))
    reasons = set()
    for c in engine.generate(tiny.requests(tiny.prompts(9), max_tokens=17, seed=4, stop_token_ids=stop)):
        assert c.spec_num_accepted_tokens == sum(c.accepted_per_depth or [])
        assert c.spec_num_draft_tokens == sum(c.drafted_per_depth or [])
        assert all(a <= d for a, d in zip(c.accepted_per_depth or [], c.drafted_per_depth or [], strict=True))
        # One token from the prompt's forward, one per verify step unless its last draft was the stop, and the accepted
        # ones; a last step without room for a draft is not a verify step.
        counted = 1 + (c.spec_num_verify_steps or 0) + (c.spec_num_accepted_tokens or 0)
        assert len(c.token_ids) - counted in (-1, 0, 1)
        flags = c.accepted_draft or []
        assert len(flags) == len(c.token_ids) and not flags[0]
        assert sum(flags) == c.spec_num_accepted_tokens
        assert (c.token_ids[-1] in stop) == (c.finish_reason == "stop")
        assert not set(c.token_ids[:-1]) & set(stop)
        reasons.add(c.finish_reason)
    assert reasons == {"stop", "length"}


def test_a_stop_inside_accepted_drafts_ends_the_text_there() -> None:
    model = tiny.perfect_carrier()
    engine = engine_of(model, num_speculative_tokens=4)
    whole = tiny.generated(model, [1, 2, 3], 12)
    stop = whole[2]
    (completion,) = engine.generate(
        [Request("a", [1, 2, 3], SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(stop,)))]
    )
    assert completion.token_ids == whole[: whole.index(stop) + 1]
    assert completion.finish_reason == "stop"
    assert completion.drafted_per_depth == completion.accepted_per_depth


def test_the_context_limits_a_text() -> None:
    model = tiny.carrier()
    engine = engine_of(model, num_speculative_tokens=3, max_model_len=20)
    (completion,) = engine.generate([Request("a", [1] * 12, SamplingParams(max_tokens=50, temperature=0))])
    assert completion.token_ids == tiny.generated(model, [1] * 12, 8)
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_prefill_in_chunks_changes_nothing(chunk: int) -> None:
    model = tiny.carrier()
    rows = tiny.prompts(6)
    wanted = tiny.requests(rows, max_tokens=12, seed=2)
    whole = engine_of(model, num_speculative_tokens=2).generate(wanted)
    pieces = engine_of(model, num_speculative_tokens=2, prefill_chunk_size=chunk).generate(wanted)
    assert texts(pieces) == texts(whole)
    assert [c.accepted_per_depth for c in pieces] == [c.accepted_per_depth for c in whole]


def test_finished_completions_arrive_early_and_results_keep_the_order() -> None:
    engine = engine_of(tiny.carrier(), num_speculative_tokens=1, max_num_seqs=2)
    lengths = [9, 2, 5, 1]
    wanted = [
        Request(f"r{n}", [3, 4], SamplingParams(max_tokens=length, temperature=0)) for n, length in enumerate(lengths)
    ]
    seen: list[str] = []
    completions = engine.generate(wanted, on_finish=lambda c: seen.append(c.request_id))
    assert [len(c.token_ids) for c in completions] == lengths
    assert sorted(seen) == ["r0", "r1", "r2", "r3"]
    assert seen[0] == "r1"
    assert isinstance(engine, RolloutEngine)
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "'bad' has an empty prompt"), ([1] * 96, "'bad' has a prompt of 96 tokens"), ([61], "'bad' holds token ids")],
)
def test_unusable_prompts_name_their_request(prompt: list[int], message: str) -> None:
    engine = engine_of(tiny.carrier())
    finished: list[Completion] = []
    with pytest.raises(UsageError, match=message):
        engine.generate([Request("good", [1]), Request("bad", prompt)], on_finish=finished.append)
    assert not finished


def test_greedy_acceptance_refuses_a_temperature() -> None:
    engine = engine_of(tiny.carrier(), acceptance="greedy", num_speculative_tokens=1)
    with pytest.raises(UsageError, match="'r0' has temperature=1"):
        engine.generate(tiny.requests([[1]], max_tokens=4))
    assert len(engine.generate(tiny.requests([[1]], max_tokens=4, temperature=0))) == 1


@pytest.mark.parametrize("repeat", [False, True])
def test_drafting_with_several_layers_or_one_repeated(repeat: bool) -> None:
    model = tiny.carrier(layers=2, repeat=repeat)
    rows = tiny.prompts(3)
    engine = engine_of(model, num_speculative_tokens=3)
    completions = engine.generate(tiny.requests(rows, max_tokens=9, temperature=0))
    assert texts(completions) == [tiny.generated(model, row, 9) for row in rows]
    assert all(c.drafted_per_depth and c.drafted_per_depth[2] for c in completions)


def test_non_finite_logits_are_reported() -> None:
    model = tiny.carrier()
    engine = engine_of(model)
    engine.runner.weights["model.norm.weight"][0] = math.nan
    with pytest.raises(ForerunError, match="'r0': the model's logits are not finite"):
        engine.generate(tiny.requests([[1, 2]], max_tokens=3))


def test_a_broken_drafter_costs_acceptance_and_no_correctness() -> None:
    model = tiny.carrier()
    engine = engine_of(model, num_speculative_tokens=2)
    assert engine.runner.block is not None
    engine.runner.block.layers[0].hidden_norm.weight[0] = math.nan
    greedy = engine.generate(tiny.requests([[1, 2]], max_tokens=8, temperature=0))
    assert texts(greedy) == [tiny.generated(model, [1, 2], 8)]
    (sampled,) = engine.generate(tiny.requests([[1, 2]], max_tokens=8, seed=0))
    assert sampled.spec_num_accepted_tokens == 0 and len(sampled.token_ids) == 8


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(UsageError, match="between 2 and"):
        engine_of(tiny.carrier(), max_model_len=4096)


def test_a_model_that_names_no_context_needs_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.carrier()
    monkeypatch.delattr(type(model.config), "max_position_embeddings")  # its class's default
    del model.config.max_position_embeddings
    with pytest.raises(UsageError, match="no max_position_embeddings: add it, or give max_model_len"):
        engine_of(model)
    assert engine_of(model, max_model_len=20).max_model_len == 20


def test_a_model_whose_forward_fails_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    model = tiny.carrier().train()
    model.config._attn_implementation = "flash_attention_2"
    monkeypatch.setattr(model, "forward", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        engine_of(model)
    assert model.training and model.config._attn_implementation == "flash_attention_2"


def test_bfloat16_text_with_drafts_is_its_plain_text_up_to_ties() -> None:
    """Verifying several positions at once rounds differently, which may decide a near tie and nothing else."""
    exact = tiny.carrier(dtype=torch.float32).to(torch.bfloat16).float()  # the same weights, computed in float32
    engine = engine_of(exact, dtype=torch.bfloat16)
    assert engine.runner.head.weight.dtype == torch.bfloat16
    wanted = tiny.requests(tiny.prompts(12), max_tokens=20, temperature=0)
    plain = engine.generate(wanted)
    engine.num_speculative_tokens = 3
    drafted = engine.generate(wanted)
    assert sum(c.spec_num_accepted_tokens or 0 for c in drafted) > 0
    equal = 0
    for ours, theirs in zip(drafted, plain, strict=True):
        logits = tiny.teacher_forced(exact, ours.prompt_token_ids, ours.token_ids)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ours.token_ids)[:, None]).squeeze(1)
        error = (torch.tensor(ours.raw_log_probs) - expected).abs()
        assert error.max() < 0.25 and error.mean() < 0.04
        different = [n for n, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)) if a != b]
        equal += not different
        if different:
            n = different[0]
            assert abs(logits[n, ours.token_ids[n]] - logits[n, theirs.token_ids[n]]) < 0.25
    assert equal >= 8


@pytest.mark.model
def test_smollm2_greedy_text_equals_transformers(smollm2_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = attach(AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval(), MTPConfig(True))
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    questions = ["What is 17 + 25?", "Name three colours.", "Who wrote Hamlet?"]
    rows = [tokenizer(q).input_ids for q in questions]
    expected = [tiny.generated(model.eval(), row, 16) for row in rows]
    engine = engine_of(model, draft_vocabulary=torch.arange(8192), max_num_seqs=3)
    for engine.num_speculative_tokens in (0, 2):
        assert texts(engine.generate(tiny.requests(rows, max_tokens=16, temperature=0))) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_a_restricted_drafters_head_follows_the_update_with_its_bias(tied: bool) -> None:
    model = tiny.trunk(tied=tied)
    head = torch.nn.Linear(32, tiny.VOCAB, dtype=torch.float64)
    if tied:
        head.weight = model.get_input_embeddings().weight
    model.set_output_embeddings(head)
    carrier = attach(model, MTPConfig(True)).eval()
    words = torch.tensor([3, 5, 8])
    engine = engine_of(carrier, draft_vocabulary=words)
    with torch.no_grad():
        for parameter in carrier.parameters():
            parameter.add_(0.5)
    assert not torch.equal(engine.runner.head.bias, head.bias)  # a copy of its own
    engine.update_weights(named_weights(carrier), 1)
    assert torch.equal(engine.runner.draft_head.weight, head.weight[words])
    assert torch.equal(engine.runner.draft_head.bias, head.bias[words])


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1e-39}, {"logit_bias": {3: 1e39}}, {"repetition_penalty": 1e-40}],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_leave_no_distribution_are_an_error(settings: dict[str, object]) -> None:
    engine = engine_of(tiny.carrier(dtype=torch.float32), num_speculative_tokens=2)
    with pytest.raises(ForerunError, match="'r0': its temperature, penalty or biases leave no distribution"):
        engine.generate(tiny.requests([[1, 2, 3]], max_tokens=4, **settings))
    assert len(engine.generate(tiny.requests([[1, 2, 3]], max_tokens=4))[0].token_ids) == 4


@pytest.mark.parametrize("settings", [{"stop": "abc"}, {"seed": 2**70}, {"seed": 1.5}, {"seed": True}])
def test_a_setting_of_another_type_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        SamplingParams(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"acceptance": "typical"}, {"depth_control": "Auto"}])
def test_an_unknown_rule_or_control_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        engine_of(tiny.carrier(), **settings)
