"""The SGLang engine over a protocol server: real text, log-probs and counts of a tiny model, real updates."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import MTPCarrier, mtp_weight_names, named_weights
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams
from forerun.rollout.sglang import engine as engine_module
from forerun.rollout.sglang import run
from forerun.rollout.sglang import server as server_module
from forerun.rollout.sglang.engine import SGLangEngine
from forerun.rollout.sglang.transport import InRequest
from forerun.rollout.sync import digest
from tests.rollout import tiny
from tests.rollout.sglang_server import SGLangServer, serving


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("sglang") / "model", end_tokens=None)


def saved(path: Path, end_tokens: list[int] | None) -> Path:
    model = tiny.carrier()
    model.config.eos_token_id = model.generation_config.eos_token_id = end_tokens
    model.save_pretrained(path)
    return path


@contextmanager
def served(checkpoint: Path, engine: dict[str, Any] | None = None, **server: Any) -> Iterator[tuple[Any, Any]]:
    """(SGLangServer, SGLangEngine) over a fresh tiny carrier."""
    with ExitStack() as stack:
        made = SGLangServer(tiny.carrier(), checkpoint, **server)
        url = stack.enter_context(serving(made))
        sglang = SGLangEngine(url, **{"timeout_s": 60, **(engine or {})})
        stack.callback(sglang.close)
        yield made, sglang


def native(num_steps: int = 2) -> NativeEngine:
    return NativeEngine(tiny.carrier(), num_speculative_tokens=num_steps, products="linear")


def changed(scale: float = 0.1) -> MTPCarrier:
    """Other weights for the same model."""
    model = tiny.carrier()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def drafter_digest(model: MTPCarrier) -> str:
    names = set(mtp_weight_names(model).values())
    return digest((name, weight) for name, weight in named_weights(model) if name in names)


def assert_same(mine: list[Completion], theirs: list[Completion]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert (a.request_id, a.token_ids, a.finish_reason, a.stop_reason) == (
            b.request_id,
            b.token_ids,
            b.finish_reason,
            b.stop_reason,
        )
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)


# Text, log-probs, counts


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 3},
        {"temperature": 0.7, "seed": 3},
        {"temperature": 0.7, "seed": 3, "top_k": 5},
        {"temperature": 1.3, "seed": 3, "top_k": 9, "top_p": 0.6},
        {"temperature": 1, "seed": 3, "logit_bias": {4: 2.0, 7: -30.0}},
    ],
    ids=str,
)
def test_text_and_log_probs_are_the_native_engines(checkpoint: Path, sampling: dict[str, Any]) -> None:
    asked = tiny.requests(tiny.prompts(5), max_tokens=12, **sampling)
    with served(checkpoint) as (_, engine):
        assert isinstance(engine, RolloutEngine)
        mine, theirs = engine.generate(asked), native().generate(asked)
    assert_same(mine, theirs)
    for a, b in zip(mine, theirs, strict=True):
        if sampling["temperature"] in (0, 1) and "logit_bias" not in sampling:
            assert a.raw_log_probs == pytest.approx(b.raw_log_probs, abs=1e-5)
        else:
            assert a.raw_log_probs is None


def test_min_p_without_drafting_is_renormalised(checkpoint: Path) -> None:
    asked = tiny.requests(tiny.prompts(4), max_tokens=12, seed=1, top_k=20, min_p=0.2)
    with served(checkpoint, num_steps=0) as (_, engine):
        assert_same(engine.generate(asked), native(0).generate(asked))


def test_every_setting_is_sent_under_sglangs_name(checkpoint: Path) -> None:
    sampling = SamplingParams(7, 2, 0.5, 0.9, 4, 0.0, 1.0, {3: -1.5}, 11, (), (5, 6))
    with served(checkpoint, num_steps=2) as (server, engine):
        engine.facts = dataclasses.replace(engine.facts, num_steps=0)  # which alone allows min_tokens
        with pytest.raises(UsageError, match=r"top_p=0\.9 without drafting"):
            engine.generate([Request("a", [1, 2], sampling)])
        engine.generate([Request("a", [1, 2], dataclasses.replace(sampling, top_p=1.0))])
        body = server.calls[-1][1]
    assert body["input_ids"] == [1, 2]
    assert (body["return_logprob"], body["logprob_start_len"], body["top_logprobs_num"]) == (True, -1, 4)
    sent = body["sampling_params"]
    assert {key: sent[key] for key in ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k")} == {
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 4,
    }
    assert (sent["min_p"], sent["logit_bias"], sent["sampling_seed"]) == (0.0, {"3": -1.5}, 11)
    assert (sent["stop_token_ids"], sent["ignore_eos"], sent["stop"]) == ([5, 6], False, [])


@pytest.mark.parametrize(
    ("sampling", "server", "message"),
    [
        ({"repetition_penalty": 1.1}, {}, "what the text holds and not what the prompt"),
        ({"min_p": 0.1, "top_k": 4}, {}, "min_p=0.1 while drafting"),
        ({"min_p": 0.1}, {"num_steps": 0}, "without top_k"),
        ({"top_p": 0.9}, {}, "without top_k"),
        ({"top_p": 0.9, "top_k": 4}, {"num_steps": 0}, "without drafting"),
        ({"min_tokens": 2, "stop_token_ids": (3,)}, {}, "min_tokens=2 while drafting"),
        ({"min_tokens": 2, "stop": ("a",)}, {}, "with stop strings"),
        ({"stop": ("a",)}, {}, "--skip-tokenizer-init"),
        ({"seed": 1}, {"deterministic": False}, "--enable-deterministic-inference"),
        ({"seed": 2**63}, {}, "more than 64 bits"),
    ],
    ids=str,
)
def test_what_sglang_lacks_or_passes_over_is_refused(
    checkpoint: Path, sampling: dict[str, Any], server: dict[str, Any], message: str
) -> None:
    fine = Request("fine", [1], SamplingParams(4, temperature=0))
    with served(checkpoint, **server) as (made, engine):
        with pytest.raises(UsageError, match=message):
            engine.generate([fine, Request("bad", [1], SamplingParams(8, **sampling))])
        assert "/generate" not in made.paths()
        # At temperature 0 the filters change nothing, so they are no reason.
        greedy = SamplingParams(4, temperature=0, top_p=0.9, min_p=0.1)
        assert engine.generate([Request("fine", [1], greedy)])[0].log_probs == [0.0] * 4


def test_end_tokens_of_the_model_have_to_be_named(checkpoint: Path, tmp_path: Path) -> None:
    with served(saved(tmp_path / "model", [2, 9]), end_tokens=(2, 9)) as (_, engine):
        with pytest.raises(UsageError, match=r"lack \[2\]"):
            engine.generate([Request("a", [1], SamplingParams(4, stop_token_ids=(9, 3)))])
        # With none named SGLang is told to pass over its own.
        (alone,) = engine.generate([Request("a", [1], SamplingParams(40, seed=4))])
        assert len(alone.token_ids) == 40 and {2, 9} & set(alone.token_ids)
        (stopped,) = engine.generate([Request("a", [1], SamplingParams(40, seed=4, stop_token_ids=(2, 9)))])
    end = next(i for i, token in enumerate(alone.token_ids) if token in (2, 9))
    assert stopped.token_ids == alone.token_ids[: end + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", alone.token_ids[end])


def test_texts_end_at_the_context(checkpoint: Path) -> None:
    asked = [Request("long", list(range(1, 41)), SamplingParams(500, temperature=0))]
    with served(checkpoint) as (_, engine):
        assert_same(engine.generate(asked), native().generate(asked))
        with pytest.raises(UsageError, match="leaves no room in the context of 96"):
            engine.generate([Request("longer", [1] * 96, SamplingParams(1))])


def test_requests_without_a_seed_get_one_each(checkpoint: Path) -> None:
    asked = [Request(f"r{i}", [1, 2, 3], SamplingParams(16)) for i in range(4)]
    with served(checkpoint, engine={"seed": 1}) as (_, engine):
        first = [tuple(c.token_ids) for c in engine.generate(asked)]
    with served(checkpoint, engine={"seed": 1}) as (_, engine):
        again = [tuple(c.token_ids) for c in engine.generate(asked)]
    assert first == again and len(set(first)) == 4


@pytest.mark.parametrize("style", ["new", "old", "steps", "none"])
def test_counts_under_each_versions_names(checkpoint: Path, style: str) -> None:
    asked = tiny.requests(tiny.prompts(4), max_tokens=14, temperature=0)
    with served(checkpoint, statistics=style) as (_, engine):
        mine = engine.generate(asked)
        totals = engine.speculation_totals()
    theirs = native().generate(asked)
    for a, b in zip(mine, theirs, strict=True):
        if style in ("new", "old"):
            assert a.spec_num_accepted_tokens == b.spec_num_accepted_tokens
            assert a.accepted_per_depth == b.accepted_per_depth
            assert a.spec_num_draft_tokens == 2 * (b.spec_num_verify_steps or 0)
            assert a.drafted_per_depth == [b.spec_num_verify_steps] * 2
        else:
            assert a.spec_num_accepted_tokens is None is a.accepted_per_depth is a.spec_num_draft_tokens
        assert a.spec_num_verify_steps == (None if style == "none" else b.spec_num_verify_steps)
    if style in ("new", "old"):
        assert totals.num_accepted_tokens == sum(b.spec_num_accepted_tokens or 0 for b in theirs) > 0
        assert sum(totals.accepted_per_depth) == totals.num_accepted_tokens
    else:
        assert totals is None


def test_a_server_that_does_not_draft_drafted_nothing(checkpoint: Path) -> None:
    with served(checkpoint, num_steps=0) as (_, engine):
        (c,) = engine.generate([Request("a", [1], SamplingParams(5))])
        assert (c.spec_num_verify_steps, c.spec_num_draft_tokens, c.accepted_per_depth) == (0, 0, [])
        assert engine.speculation_totals().num_draft_tokens == 0
        assert engine.num_speculative_tokens == 0 and engine.drafter_digest() is None
        engine.num_speculative_tokens = 0
        with pytest.raises(UsageError, match="launch another"):
            engine.num_speculative_tokens = 2


# Aborts and failures


def test_an_abort_ends_one_request_and_no_other(checkpoint: Path) -> None:
    asked = [Request(f"r{i}", [i + 1], SamplingParams(3 if i == 5 else 60, temperature=0)) for i in range(12)]
    with served(checkpoint, together=12, awaited_aborts=1) as (_, engine):
        ended = engine.generate(asked, on_finish=lambda c: engine.abort(["r1", "unknown"]))
    whole = native().generate(asked)
    assert [c.finish_reason for c in ended] == ["abort" if i == 1 else "length" for i in range(12)]
    assert_same([c for c in ended if c.request_id != "r1"], [c for c in whole if c.request_id != "r1"])
    cut = ended[1]
    assert len(cut.token_ids) < 60 and cut.token_ids == whole[1].token_ids[: len(cut.token_ids)]
    assert len(cut.log_probs) == len(cut.weight_versions) == len(cut.token_ids)


def test_nothing_joins_a_run_that_is_over(checkpoint: Path) -> None:
    with served(checkpoint) as (_, engine):
        runs: list[Any] = []
        engine.generate(tiny.requests([[5]], max_tokens=2), lambda _: runs.append(engine._run))
        # As a request that comes when the last answer is out and `generate` has not returned.
        assert runs[0].add(tiny.requests([[6]], max_tokens=2), [None]) is False


def test_an_abort_that_was_lost_is_sent_again(checkpoint: Path) -> None:
    asked = [Request(f"r{i}", [i + 1], SamplingParams(80 if i else 1, temperature=0)) for i in range(8)]

    def finish(completion: Completion) -> None:
        if completion.request_id == "r0":
            engine.abort([f"r{i}" for i in range(1, 8)])

    with served(checkpoint, together=8, awaited_aborts=7) as (server, engine):
        server.fail("/abort_request", *["500"] * 7)
        ended = engine.generate(asked, on_finish=finish)
    assert not server.faults["/abort_request"]
    assert [c.finish_reason for c in ended] == ["length", *["abort"] * 7]


@pytest.mark.parametrize(("fault", "message"), [("500", "HTTP 500"), ("drop", "did not answer /generate")])
def test_a_failed_request_ends_the_others(checkpoint: Path, fault: Any, message: str) -> None:
    asked = tiny.requests(tiny.prompts(4), max_tokens=60, temperature=0)
    with served(checkpoint) as (server, engine):
        server.fail("/generate", None, fault)
        with pytest.raises(ForerunError, match=message):
            engine.generate(asked)
        assert server.comes_to_rest()
        assert len(engine.generate(asked)) == 4  # and the engine goes on


def test_a_server_that_hangs_is_left_in_the_end(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request fails, three others hang, and so do the aborts."""
    monkeypatch.setattr(run, "_ABORT_S", 0.2)
    asked = tiny.requests(tiny.prompts(4), max_tokens=6, temperature=0)
    errors: list[str] = []

    def generate() -> None:
        with pytest.raises(ForerunError) as caught:
            engine.generate(asked)
        errors.append(str(caught.value))

    with served(checkpoint, engine={"timeout_s": 3600}) as (made, engine):
        made.fail("/generate", "hang", "hang", "hang", "500")
        made.fail("/abort_request", *["hang"] * 100)
        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        thread.join(30)
        assert errors and "HTTP 500" in errors[0]
        made.faults.clear()
        assert len(engine.generate(asked)) == 4


def test_a_request_that_waited_too_long_is_aborted(checkpoint: Path) -> None:
    asked = tiny.requests(tiny.prompts(1), max_tokens=6, temperature=0)
    with served(checkpoint, engine={"timeout_s": 2}) as (made, engine):
        made.fail("/generate", "hang")
        with pytest.raises(ForerunError, match=r"did not answer /generate \(nothing came for 2 s\)"):
            engine.generate(asked)
        assert [path for path, _ in made.calls][-1] == "/abort_request"
        engine.client = dataclasses.replace(engine.client, timeout_s=60)
        assert len(engine.generate(asked)) == 1


def test_what_should_come_at_once_is_not_waited_for_long(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(checkpoint, engine={"timeout_s": 3600}) as (made, engine):
        monkeypatch.setattr(engine_module, "_IDLE_S", 0.2)
        made.fail("/flush_cache", "hang")
        with pytest.raises(ForerunError, match=r"did not answer /flush_cache \(nothing came for 0.2 s\)"):
            engine.sleep()
        monkeypatch.setattr(server_module, "_FACTS_S", 0.2)
        made.fail("/server_info", "hang")
        with pytest.raises(ForerunError, match=r"did not answer /server_info \(nothing came for 0.2 s\)"):
            SGLangEngine(engine.client.base_url)


def test_an_error_in_on_finish_ends_the_rest(checkpoint: Path) -> None:
    asked = [Request(f"r{i}", [1], SamplingParams(1 if i == 0 else 60, temperature=0)) for i in range(4)]

    def finish(_: Completion) -> None:
        raise KeyError("mine")

    with served(checkpoint) as (server, engine):
        with pytest.raises(KeyError, match="mine"):
            engine.generate(asked, on_finish=finish)
        assert server.comes_to_rest()
        assert len(engine.generate(asked)) == 4


def test_no_second_generate_and_no_update_meanwhile(checkpoint: Path) -> None:
    errors: list[str] = []

    def finish(_: Completion) -> None:
        for call in (lambda: engine.generate(asked), lambda: engine.update_weights(named_weights(tiny.carrier()), 1)):
            with pytest.raises(ForerunError) as caught:
                call()
            errors.append(str(caught.value))

    asked = [Request("a", [1], SamplingParams(2))]
    with served(checkpoint) as (_, engine):
        engine.generate(asked, on_finish=finish)
        assert len(errors) == 2 and all("already" in error for error in errors)


def test_no_server_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match="did not answer /server_info"):
        SGLangEngine("http://127.0.0.1:9")
    with pytest.raises(UsageError, match="is not the address of a server"):
        SGLangEngine("127.0.0.1:30000")


# Weights


def test_a_pause_whose_answer_was_lost_does_not_last(checkpoint: Path) -> None:
    asked = tiny.requests(tiny.prompts(2), max_tokens=6, temperature=0)
    with served(checkpoint, engine={"timeout_s": 5}) as (made, engine):
        made.fail("/pause_generation", "lost")
        with pytest.raises(ForerunError, match="did not answer /pause_generation"):
            engine.update_weights(named_weights(changed()), 1)
        assert engine.weight_version == 0 and len(engine.generate(asked)) == 2


@pytest.mark.parametrize("way", ["request", "gloo"])
@pytest.mark.parametrize("bucket_bytes", [1, 10_000, 2**28])
def test_an_update_reaches_target_and_drafter(checkpoint: Path, way: str, bucket_bytes: int) -> None:
    model, asked = changed(), tiny.requests(tiny.prompts(4), max_tokens=12, temperature=0)
    with served(checkpoint, engine={"transport": way, "bucket_bytes": bucket_bytes}, tp_size=1) as (server, engine):
        before = engine.generate(asked)
        server.calls.clear()
        engine.update_weights(named_weights(model), version=7)
        after = engine.generate(asked)
        fresh = NativeEngine(model, num_speculative_tokens=2, products="linear").generate(asked)
        assert_same(after, fresh)
        assert [c.accepted_per_depth for c in after] == [c.accepted_per_depth for c in fresh]
        assert [c.token_ids for c in after] != [c.token_ids for c in before]
        assert [c.weight_versions for c in after] == [[7] * 12] * 4 and before[0].weight_versions == [0] * 12
        assert engine.weight_version == 7
        assert engine.drafter_digest() == drafter_digest(model)
        call = "/update_weights_from_tensor" if way == "request" else "/update_weights_from_distributed"
        sent = [body for path, body in server.calls if path == call]
        paths = [path for path in server.paths() if path not in (call, "/init_weights_update_group", "/generate")]
    assert paths[:4] == ["/pause_generation", "/begin_weight_update", "/end_weight_update", "/continue_generation"]
    count = len(list(named_weights(model)))
    assert len(sent) == {1: count, 2**28: 1}.get(bucket_bytes, len(sent)) and (bucket_bytes != 10_000 or len(sent) > 2)
    assert [body["flush_cache"] for body in sent] == [False] * (len(sent) - 1) + [True]
    assert [body.get("weight_version") for body in sent] == [None] * (len(sent) - 1) + ["7"]
    assert {body["selector"] for body in sent} == {"all"}


def test_every_rank_gets_its_payload(checkpoint: Path) -> None:
    with served(checkpoint, tp_size=3) as (server, engine):
        engine.update_weights(named_weights(changed()), 1)
        bodies = [body for path, body in server.calls if path == "/update_weights_from_tensor"]
        assert [len(body["serialized_named_tensors"]) for body in bodies] == [3]


def broken(model: MTPCarrier, fault: str) -> tuple[list[tuple[str, Tensor]], str]:
    named = [(name, weight.clone()) for name, weight in named_weights(model)]
    mtp = set(mtp_weight_names(model).values())
    match fault:
        case "trunk only":
            return [(n, w) for n, w in named if n not in mtp], r"drafter's \d+ weights are missing"
        case "missing":
            return [(n, w) for n, w in named if not n.endswith("layers.1.mlp.up_proj.weight")], "up_proj"
        case "unknown":
            return [*named, ("model.layers.9.x", torch.zeros(2))], "no place in the model"
        case "shape":
            return [*named[:-1], (named[-1][0], named[-1][1][:1])], "has shape"
        case "twice":
            return [*named, named[3]], "sent twice"
        case _:
            return [*named[:-1], (named[-1][0], named[-1][1].long())], "not a floating dtype"


@pytest.mark.parametrize("fault", ["trunk only", "missing", "unknown", "shape", "twice", "integers"])
def test_a_faulty_update_is_not_begun(checkpoint: Path, fault: str) -> None:
    asked = tiny.requests(tiny.prompts(3), max_tokens=8, temperature=0)
    named, message = broken(changed(), fault)
    with served(checkpoint) as (server, engine):
        before = engine.generate(asked)
        server.calls.clear()
        with pytest.raises(ForerunError, match=message):
            engine.update_weights(iter(named), version=3)
        assert not server.calls and engine.weight_version == 0
        assert_same(engine.generate(asked), before)


@pytest.mark.parametrize(
    ("path", "faults"),
    [
        ("/update_weights_from_tensor", [None, "500"]),
        ("/update_weights_from_tensor", [None, "drop"]),
        ("/end_weight_update", ["500", "500"]),
        ("/continue_generation", ["drop"]),
    ],
)
def test_after_a_failure_midway_only_a_whole_update_helps(checkpoint: Path, path: str, faults: list[Any]) -> None:
    model, asked = changed(), tiny.requests(tiny.prompts(3), max_tokens=8, temperature=0)
    with served(checkpoint, engine={"bucket_bytes": 10_000}) as (server, engine):
        server.fail(path, *faults)
        with pytest.raises(ForerunError, match="weight update 4 broke off"):
            engine.update_weights(named_weights(model), version=4)
        assert engine.weight_version == 0
        for _ in range(2):
            with pytest.raises(ForerunError, match="holds half of an update"):
                engine.generate(asked)
        with pytest.raises(ForerunError, match="missing"):
            engine.update_weights(list(named_weights(model))[:-1], version=5)
        with pytest.raises(ForerunError, match="holds half of an update"):
            engine.generate(asked)
        engine.update_weights(named_weights(model), version=6)
        fresh = NativeEngine(model, num_speculative_tokens=2, products="linear").generate(asked)
        assert_same(engine.generate(asked), fresh)
        assert engine.weight_version == 6 and engine.drafter_digest() == drafter_digest(model)


@pytest.mark.parametrize("path", ["/pause_generation", "/begin_weight_update"])
def test_an_update_that_could_not_begin_leaves_the_old_weights(checkpoint: Path, path: str) -> None:
    asked = tiny.requests(tiny.prompts(3), max_tokens=8, temperature=0)
    with served(checkpoint) as (server, engine):
        before = engine.generate(asked)
        server.fail(path, "drop")
        with pytest.raises(ForerunError, match="did not answer"):
            engine.update_weights(named_weights(changed()), version=4)
        assert_same(engine.generate(asked), before)


def test_a_stale_drafter_shows_in_the_digest_and_in_acceptance(checkpoint: Path) -> None:
    model = changed()
    asked = tiny.requests(tiny.prompts(4), max_tokens=16, temperature=0)
    with served(checkpoint, updates_drafter=False) as (_, engine):
        engine.update_weights(named_weights(tiny.carrier()), version=1)  # the same weights: nothing is stale yet
        assert engine.drafter_digest() == drafter_digest(tiny.carrier())
        engine.update_weights(named_weights(model), version=2)
        assert engine.drafter_digest() not in (None, drafter_digest(model))
        stale = engine.generate(asked)
    fresh = NativeEngine(model, num_speculative_tokens=2, products="linear").generate(asked)
    assert [c.token_ids for c in stale] == [c.token_ids for c in fresh]  # still lossless
    assert [c.accepted_per_depth for c in stale] != [c.accepted_per_depth for c in fresh]


def test_weights_changed_behind_our_back_show_in_the_digest(checkpoint: Path) -> None:
    with served(checkpoint) as (server, engine):
        engine.update_weights(named_weights(tiny.carrier()), version=1)
        with torch.no_grad():
            server.weights[next(iter(server.drafter_names))].mul_(2)
        assert engine.drafter_digest() not in (None, drafter_digest(tiny.carrier()))


def test_an_older_server_without_sessions(checkpoint: Path) -> None:
    model, asked = changed(), tiny.requests(tiny.prompts(3), max_tokens=8, temperature=0)
    fresh = NativeEngine(model, num_speculative_tokens=2, products="linear").generate(asked)
    with served(checkpoint, sessions=False) as (server, engine):
        assert engine.drafter_digest() is None
        engine.update_weights(named_weights(model), version=3)
        after = engine.generate(asked)
        assert_same(after, fresh)
        assert set(after[0].weight_versions) == {3}
        assert all("selector" not in body for path, body in server.calls if "from_tensor" in path)
        assert engine.drafter_digest() is None
    with served(checkpoint, engine={"transport": "gloo"}, sessions=False) as (_, engine):
        before = engine.generate(asked)
        with pytest.raises(ForerunError, match="leaves the draft worker's weights as they are"):
            engine.update_weights(named_weights(model), version=3)
        assert_same(engine.generate(asked), before)


def test_after_an_interrupted_update_only_a_whole_one_helps(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = changed(), tiny.requests(tiny.prompts(3), max_tokens=8, temperature=0)
    send, sent = InRequest.send, 0

    def interrupted(*arguments: Any) -> None:
        nonlocal sent
        sent += 1
        if sent == 2:
            raise KeyboardInterrupt
        send(*arguments)

    with served(checkpoint, engine={"bucket_bytes": 10_000}) as (_, engine):
        with monkeypatch.context() as patch:
            patch.setattr(InRequest, "send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.update_weights(named_weights(model), version=4)
        with pytest.raises(ForerunError, match="holds half of an update"):
            engine.generate(asked)
        engine.update_weights(named_weights(model), version=5)
        assert {version for c in engine.generate(asked) for version in c.weight_versions} == {5}


def test_a_bucket_that_the_server_does_not_receive_is_given_up(checkpoint: Path) -> None:
    with served(checkpoint, engine={"transport": "gloo", "bucket_bytes": 10_000}) as (server, engine):
        server.fail("/update_weights_from_distributed", None, "500")
        started = time.monotonic()
        with pytest.raises(ForerunError, match="broke off"):
            engine.update_weights(named_weights(changed()), version=2)
        assert time.monotonic() - started < 20
        with pytest.raises(ForerunError, match="holds half"):
            engine.generate([Request("a", [1])])


# Sleep


def test_sleep_frees_and_keeps_acceptance(checkpoint: Path) -> None:
    asked = tiny.requests(tiny.prompts(3), max_tokens=8, temperature=0)
    with served(checkpoint) as (server, engine):
        before = engine.generate(asked)
        engine.sleep()
        engine.sleep()
        assert server.released == {"kv_cache"}
        with pytest.raises(ForerunError, match="sleeps"):
            engine.generate(asked)
        engine.update_weights(named_weights(tiny.carrier()), version=2)
        engine.wake()
        engine.wake()
        after = engine.generate(asked)
        assert_same(after, before)
        assert [c.accepted_per_depth for c in after] == [c.accepted_per_depth for c in before]


def test_sleep_waits_for_the_last_step(checkpoint: Path) -> None:
    with served(checkpoint) as (server, engine):
        server.fail("/flush_cache", "500", "500")
        engine.sleep()
        assert server.paths()[-4:] == ["/v1/models", "/weights_checker", "/flush_cache", "/release_memory_occupation"]
        assert not server.faults["/flush_cache"]


@pytest.mark.parametrize("update", ["asleep", "awake"])
def test_released_weights_must_be_sent_again(checkpoint: Path, update: str) -> None:
    asked = tiny.requests(tiny.prompts(3), max_tokens=8, temperature=0)
    with served(checkpoint, engine={"release_weights": True}) as (server, engine):
        before = engine.generate(asked)
        engine.sleep()
        assert server.released == {"kv_cache", "weights"}
        if update == "asleep":
            engine.update_weights(named_weights(tiny.carrier()), version=2)
            engine.wake()
        else:
            engine.wake()
            with pytest.raises(ForerunError, match="gave its weights back while it slept"):
                engine.generate(asked)
            engine.update_weights(named_weights(tiny.carrier()), version=2)
        after = engine.generate(asked)
        assert_same(after, before)
        assert [c.accepted_per_depth for c in after] == [c.accepted_per_depth for c in before]
        assert not server.released


def test_weights_that_the_server_keeps_need_not_be_sent(checkpoint: Path) -> None:
    asked = tiny.requests(tiny.prompts(3), max_tokens=8, temperature=0)
    with served(checkpoint, engine={"release_weights": True}, cpu_backup=True) as (_, engine):
        before = engine.generate(asked)
        engine.sleep()
        engine.wake()
        assert_same(engine.generate(asked), before)
