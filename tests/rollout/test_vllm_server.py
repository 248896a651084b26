"""vLLM behind HTTP, one server for the file: texts, updates, and vLLM's own reload, which leaves the drafter stale."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import forerun
from forerun.errors import ForerunError
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.rollout.client import Client
from forerun.rollout.protocol import Completion, Request, SamplingParams
from forerun.rollout.vllm import VLLMEngine
from tests.oracles import served_models
from tests.oracles.test_vllm import save
from tests.rollout.test_vllm_engine import (
    BUCKET,
    asked,
    check_log_probs,
    disturbed,
    has_ended,
    settings,
    trainers_digest,
    wait_for_end,
)

pytestmark = pytest.mark.oracle

GREEDY = SamplingParams(max_tokens=20, temperature=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mimo") / "model"
    save(served_models.mixed("mimo"), path)
    return path


@pytest.fixture(scope="module")
def engine(vllm_env: Path, checkpoint: Path) -> Iterator[VLLMEngine]:
    # In two processes instead of three, each of which takes seconds to import vLLM.
    launch = settings(vllm_env, num_speculative_tokens=2, engine_args={"distributed_executor_backend": "uni"})
    with VLLMEngine.serve(checkpoint, launch, bucket_bytes=BUCKET) as engine:
        yield engine


@pytest.fixture
def model(checkpoint: Path) -> MTPCarrier:
    model = forerun.load(checkpoint)
    assert isinstance(model, MTPCarrier)
    return model.eval()


def texts(done: list[Completion]) -> list[list[int]]:
    return [text.token_ids for text in done]


def acceptance(done: list[Completion]) -> float:
    return sum(text.spec_num_accepted_tokens or 0 for text in done) / sum(t.spec_num_draft_tokens or 0 for t in done)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(max_tokens=20, seed=1)], ids=["greedy", "sampled"])
def test_texts_log_probs_and_counts(engine: VLLMEngine, model: MTPCarrier, sampling: SamplingParams) -> None:
    before = engine.speculation_totals()
    done = engine.generate(asked(sampling))
    after = engine.speculation_totals()
    assert [text.finish_reason for text in done] == ["length"] * len(done)
    assert all(text.raw_log_probs is not None for text in done)
    check_log_probs(model, done, sampling)
    assert before is not None and after is not None
    grown = after.num_draft_tokens - before.num_draft_tokens, after.num_accepted_tokens - before.num_accepted_tokens
    drafted = sum(text.spec_num_draft_tokens or 0 for text in done)
    accepted = sum(text.spec_num_accepted_tokens or 0 for text in done)
    assert grown == (drafted, accepted) and 0 < accepted < drafted


def test_sixty_requests_with_aborts_lose_nothing(engine: VLLMEngine) -> None:
    wanted = [Request(f"r{i}", [i + 1, i + 2], SamplingParams(max_tokens=1 + 3 * (i % 20), seed=i)) for i in range(60)]
    whole = texts(engine.generate(wanted))
    finished: list[str] = []

    def abort_some(text: Completion) -> None:
        finished.append(text.request_id)
        engine.abort([f"r{(7 * len(finished)) % 60}", "nobody"])

    done = engine.generate(wanted, abort_some)
    assert sorted(finished) == sorted(request.request_id for request in wanted)
    assert {text.finish_reason for text in done} == {"length", "abort"}
    for text, full in zip(done, whole, strict=True):
        assert len(text.log_probs) == len(text.token_ids)
        assert text.token_ids == (full if text.finish_reason == "length" else full[: len(text.token_ids)])


def test_a_caller_that_fails_leaves_the_server_usable(engine: VLLMEngine) -> None:
    def fail(_: Completion) -> None:
        raise RuntimeError("stumbled")

    whole = texts(engine.generate(asked(GREEDY)))
    with pytest.raises(RuntimeError, match="stumbled"):
        engine.generate(asked(GREEDY), fail)
    assert texts(engine.generate(asked(GREEDY))) == whole


def test_vllms_own_reload_leaves_a_stale_drafter_which_the_digest_shows(
    engine: VLLMEngine, model: MTPCarrier, tmp_path: Path
) -> None:
    engine.update_weights(named_weights(model), 1)
    old = engine.drafter_digest()
    assert old == trainers_digest(model)
    changed = disturbed(model)
    save(changed, tmp_path / "changed")
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "changed")}}
    assert engine.base_url is not None
    server = Client("vLLM", engine.base_url)
    server.post("/collective_rpc", body)
    server.post("/reset_prefix_cache")
    stale = engine.generate(asked(GREEDY))
    check_log_probs(changed, stale, GREEDY)  # the trunk has changed
    assert engine.drafter_digest() == old != trainers_digest(changed)
    engine.update_weights(named_weights(changed), 2)
    assert engine.drafter_digest() == trainers_digest(changed)
    assert texts(engine.generate(asked(GREEDY))) == texts(stale)


def test_another_client_finds_the_version_and_leaves_the_server_running(engine: VLLMEngine, model: MTPCarrier) -> None:
    engine.update_weights(named_weights(model), 7)
    assert engine.base_url is not None
    with VLLMEngine.connect(engine.base_url) as other:
        assert (other.weight_version, other.num_speculative_tokens, other.max_model_len) == (7, 2, 128)
        assert other.drafter_digest() == trainers_digest(model)
    assert len(engine.generate(asked(GREEDY))) == len(asked(GREEDY))


def test_acceptance_survives_sleep(engine: VLLMEngine, model: MTPCarrier) -> None:
    engine.update_weights(named_weights(model), 8)
    before = engine.generate(asked(GREEDY))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CPU frees nothing, and says so
        engine.sleep()
    with pytest.raises(ForerunError, match="sleeps"):
        engine.generate(asked(GREEDY))
    engine.wake()
    after = engine.generate(asked(GREEDY))
    assert texts(after) == texts(before) and acceptance(after) == acceptance(before) > 0
    assert engine.drafter_digest() == trainers_digest(model)


def test_where_no_server_is_the_error_says_so() -> None:
    with pytest.raises(ForerunError, match=r"the vLLM server at http://127\.0\.0\.1:9 did not answer /health"):
        VLLMEngine.connect("http://127.0.0.1:9")


def test_close_ends_the_server(engine: VLLMEngine) -> None:
    """Last: it ends the server."""
    process = engine._connection.process  # type: ignore[attr-defined]
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert children and not has_ended(process.pid)
    os.kill(children[-1], 0)
    engine.close()
    for pid in (process.pid, *children):
        wait_for_end(pid)
    with pytest.raises(ForerunError, match="has ended: it was closed"):
        engine.drafter_digest()
