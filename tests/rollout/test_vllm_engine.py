"""What is vLLM's own, beyond the conformance suite: experts, broken updates, filters, and how its processes end.

One engine for the file, on the mixture of experts of tests/oracles/served_models.py. The last test ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import forerun
from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import MTPCarrier, mtp_weight_names, named_weights
from forerun.models.weight_stream import Named, WeightStream
from forerun.rollout.protocol import Completion, Request, SamplingParams, SpeculationTotals
from forerun.rollout.scoring import score_texts
from forerun.rollout.sync import digest
from forerun.rollout.vllm import LaunchSettings, VLLMEngine, buckets
from forerun.rollout.vllm.environment import INSIDE
from tests.oracles import served_models
from tests.oracles.test_vllm import save
from tests.rollout.processes import has_ended, wait_for_end

pytestmark = pytest.mark.oracle

BUCKET = 30_000  # bytes: several per model, and less than the embedding, which goes alone
PROMPTS = [[(37 * i + 3 * j * j) % (served_models.VOCAB - 1) + 1 for j in range(2 + i)] for i in range(8)]


def settings(python: Path | str, **changes: object) -> LaunchSettings:
    common = {"max_model_len": 128, "max_num_seqs": 16, "kv_cache_bytes": 64 << 20, "enforce_eager": True}
    # One thread, nothing compiled: it starts in seconds.
    environment = {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return LaunchSettings(python, environment=environment, **(common | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "model"
    save(served_models.mixed("glm4_moe"), path)
    return path


@pytest.fixture(scope="module")
def engine(vllm_env: Path, checkpoint: Path) -> Iterator[VLLMEngine]:
    with VLLMEngine.launch(checkpoint, settings(vllm_env, num_speculative_tokens=2), bucket_bytes=BUCKET) as engine:
        yield engine


@pytest.fixture
def model(checkpoint: Path) -> MTPCarrier:
    model = forerun.load(checkpoint)
    assert isinstance(model, MTPCarrier)
    return model.eval()


@torch.no_grad()
def disturbed(model: MTPCarrier) -> MTPCarrier:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return model


def trainers_digest(model: MTPCarrier) -> str:
    names = set(mtp_weight_names(model).values())
    return digest((name, tensor) for name, tensor in named_weights(model) if name in names)


def asked(sampling: SamplingParams) -> list[Request]:
    return [Request(f"r{i}", prompt, sampling) for i, prompt in enumerate(PROMPTS)]


def check_log_probs(model: MTPCarrier, done: list[Completion], sampling: SamplingParams) -> None:
    for text, score in zip(done, score_texts(model, done, sampling), strict=True):
        assert float(score.outside.max()) <= 1e-5
        assert (torch.tensor(text.log_probs) - score.log_prob).abs().max() < 1e-4
        if text.raw_log_probs is not None:
            assert (torch.tensor(text.raw_log_probs) - score.raw).abs().max() < 1e-4


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=20, temperature=0),
        SamplingParams(max_tokens=20, temperature=0.7, top_k=5, seed=1),
        SamplingParams(max_tokens=20, top_p=0.6, seed=2),
        SamplingParams(max_tokens=20, repetition_penalty=1.4, seed=3),
    ],
    ids=["greedy", "top_k", "top_p", "repetition_penalty"],
)
def test_log_probs_are_those_of_the_distribution_that_was_sampled(
    engine: VLLMEngine, model: MTPCarrier, sampling: SamplingParams
) -> None:
    done = engine.generate(asked(sampling))
    assert sum(text.spec_num_accepted_tokens or 0 for text in done) > 0
    assert all((text.raw_log_probs is not None) == (sampling.temperature == 0) for text in done)
    check_log_probs(model, done, sampling)


def test_greedy_requests_are_greedy_beside_sampled_ones(engine: VLLMEngine) -> None:
    """vLLM's CPU build gives them the neighbours' uninitialised temperatures; see inside/forerun_cpu_sampling.py."""
    greedy = SamplingParams(max_tokens=20, temperature=0)
    alone = engine.generate(asked(greedy))
    sampled = [Request(f"s{i}", prompt, SamplingParams(max_tokens=20, seed=i)) for i, prompt in enumerate(PROMPTS)]
    mixed = engine.generate([*sampled, *asked(greedy)])[len(sampled) :]
    assert [text.token_ids for text in mixed] == [text.token_ids for text in alone]


def test_experts_arrive_bucket_by_bucket_in_trunk_and_drafter(
    engine: VLLMEngine, model: MTPCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def measured(tensors: dict[str, torch.Tensor], path: Path) -> None:
        save_file(tensors, path)
        assert len(list(path.parent.iterdir())) == 1, "the bucket before is still there"
        written.append(0 if len(tensors) == 1 else sum(tensor.nbytes for tensor in tensors.values()))

    monkeypatch.setattr(buckets, "save_file", measured)
    assert engine.drafter_digest() == trainers_digest(model)
    changed = disturbed(model)
    assert engine.drafter_digest() != trainers_digest(changed)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most: list[int] = []

    def made() -> Iterator[Named]:  # as ranks gather them
        for name, tensor in named_weights(changed):
            alive.add(whole := tensor.clone())
            most.append(sum(tensor.nbytes for tensor in alive))
            yield name, whole
            del whole

    stream = WeightStream(named_weights(changed), made())
    largest = max(tensor.nbytes for _, tensor in stream.described)
    engine.update_weights(stream, 4)
    assert len(most) == len(stream.described) and max(most) <= BUCKET + 2 * largest < sum(written) / 2
    assert len(written) > 5 and max(written) <= BUCKET
    assert engine.drafter_digest() == trainers_digest(changed)
    sampling = SamplingParams(max_tokens=20)
    done = engine.generate(asked(sampling))
    assert {version for text in done for version in text.weight_versions} == {4}
    check_log_probs(changed, done, sampling)


def test_an_update_that_breaks_off_is_sent_again(
    engine: VLLMEngine, model: MTPCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.update_weights(named_weights(model), 10)
    before = engine.generate(asked(SamplingParams(max_tokens=20, temperature=0)))
    weights = dict(named_weights(model))
    files: list[Path] = []

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        files.append(path)
        if len(files) == 4:
            raise OSError("No space left on device")
        save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, path)

    monkeypatch.setattr(buckets, "save_file", full)
    with pytest.raises(ForerunError, match=r"broke off.*No space left"):
        engine.update_weights(weights.items(), 11)
    assert engine.weight_version == 10
    with pytest.raises(ForerunError, match="half of a weight update"):
        engine.generate(asked(SamplingParams()))
    monkeypatch.undo()
    engine.update_weights(weights.items(), 12)
    after = engine.generate(asked(SamplingParams(max_tokens=20, temperature=0)))
    assert [text.token_ids for text in after] == [text.token_ids for text in before]
    assert engine.drafter_digest() == trainers_digest(model)
    (directory,) = {path.parent for path in files}
    assert not directory.exists()


def test_weights_that_cannot_be_made_leave_a_half_update_too(engine: VLLMEngine, model: MTPCarrier) -> None:
    def made() -> Iterator[Named]:
        for name, tensor in named_weights(model):
            if "layers.1." in name:
                raise RuntimeError("a rank is gone")
            yield name, torch.zeros_like(tensor)

    version = engine.weight_version
    with pytest.raises(RuntimeError, match="a rank is gone"):
        engine.update_weights(WeightStream(named_weights(model), made()), 13)
    with pytest.raises(ForerunError, match="half of a weight update"):
        engine.generate(asked(SamplingParams()))
    assert engine.weight_version == version
    engine.update_weights(named_weights(model), 14)
    sampling = SamplingParams(max_tokens=20)
    check_log_probs(model, engine.generate(asked(sampling)), sampling)
    assert engine.drafter_digest() == trainers_digest(model)


@pytest.mark.parametrize(
    ("sampling", "setting"),
    [
        (SamplingParams(min_p=0.1), "min_p"),
        (SamplingParams(logit_bias={3: 1.0}), "logit_bias"),
        (SamplingParams(temperature=2.5), "temperature"),
        (SamplingParams(temperature=0.001), "temperature"),
        (SamplingParams(seed=-1), "seed"),
        (SamplingParams(stop=("x",)), "stop"),
    ],
)
def test_a_setting_that_vllm_lacks_is_named_before_anything_starts(
    engine: VLLMEngine, sampling: SamplingParams, setting: str
) -> None:
    before = engine.speculation_totals()
    with pytest.raises(UsageError, match=f"'bad': {setting}"):
        engine.generate([Request("good", [3]), Request("bad", [3], sampling)])
    assert engine.speculation_totals() == before


def test_drafting_cannot_be_changed_while_it_runs(engine: VLLMEngine) -> None:
    engine.num_speculative_tokens = 2
    with pytest.raises(UsageError, match="start another one"):
        engine.num_speculative_tokens = 0


def test_a_missing_interpreter_and_one_without_vllm_are_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot start vLLM's interpreter"):
        VLLMEngine.launch(checkpoint, settings(tmp_path / "python"))
    with pytest.raises(UsageError, match="cannot import vllm"):
        VLLMEngine.launch(checkpoint, settings(sys.executable))


def test_vllms_own_error_is_told_in_one_line(vllm_env: Path, checkpoint: Path) -> None:
    with pytest.raises(ForerunError, match=r"vLLM did not start.*max_model_len") as caught:
        VLLMEngine.launch(checkpoint, settings(vllm_env, max_model_len=100_000))
    assert "\n" not in str(caught.value)


def test_a_child_ends_with_a_trainer_that_is_killed(vllm_env: Path) -> None:
    script = INSIDE / "forerun_offline.py"
    trainers = (
        "import socket, subprocess, time\n"
        "ours, theirs = socket.socketpair()\n"
        f"line = [{str(vllm_env)!r}, {str(script)!r}, str(theirs.fileno())]\n"
        "child = subprocess.Popen(line, stdin=-1, stderr=-3, pass_fds=[theirs.fileno()], start_new_session=True)\n"
        "theirs.close()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-S", "-c", trainers], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    child = int(trainer.stdout.readline())
    assert not has_ended(child)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    wait_for_end(child)


def test_what_a_callback_does_leaves_the_engine_usable(engine: VLLMEngine) -> None:
    """Not even an error of our own kind, or a call that has to wait, may leave answers on the line."""
    requests = asked(SamplingParams(temperature=0, max_tokens=6))
    whole = [completion.token_ids for completion in engine.generate(requests)]

    def fail(_: Completion) -> None:
        raise ForerunError("the caller gives up")

    with pytest.raises(ForerunError, match="the caller gives up"):
        engine.generate(requests, on_finish=fail)
    for call in (engine.sleep, engine.drafter_digest, engine.speculation_totals):
        with pytest.raises(ForerunError, match="vLLM is generating"):
            engine.generate(requests, on_finish=lambda _, call=call: call() and None)  # type: ignore[misc]
    assert [completion.token_ids for completion in engine.generate(requests)] == whole


def test_an_interrupted_update_leaves_no_answer_on_the_line(engine: VLLMEngine, model: MTPCarrier) -> None:
    requests = asked(SamplingParams(temperature=0, max_tokens=6))
    engine.update_weights(named_weights(model), 20)
    whole = [completion.token_ids for completion in engine.generate(requests)]
    for delay in (0.02, 0.05, 0.11, 0.17):
        ctrl_c = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            ctrl_c.start()
            while True:
                engine.update_weights(named_weights(model), 21)
        ctrl_c.join()
        engine.update_weights(named_weights(model), 22)
        assert engine.drafter_digest() == trainers_digest(model)
        assert [completion.token_ids for completion in engine.generate(requests)] == whole


def test_calls_from_several_threads_get_their_own_answers(engine: VLLMEngine) -> None:
    kinds: set[tuple[type, type]] = set()

    def ask() -> None:
        for _ in range(10):
            kinds.add((type(engine.drafter_digest()), type(engine.speculation_totals())))

    callers = [threading.Thread(target=ask) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert kinds == {(str, SpeculationTotals)}


def test_the_end_of_vllm_is_an_error_and_close_leaves_nothing(engine: VLLMEngine) -> None:
    """Last: it ends the engine."""
    child = engine._connection.process.pid  # type: ignore[attr-defined]

    def kill(_: Completion) -> None:
        os.kill(child, signal.SIGKILL)

    requests = [
        Request("short", [3], SamplingParams(max_tokens=1)),
        # More than can have been written by the time that the first one is heard of.
        *(Request(f"long {i}", [5], SamplingParams(max_tokens=99)) for i in range(60)),
    ]
    with pytest.raises(ForerunError, match="has ended: it was killed by signal 9") as caught:
        engine.generate(requests, on_finish=kill)
    assert "\n" not in str(caught.value)
    with pytest.raises(ForerunError, match="has ended"):
        engine.drafter_digest()
    engine.close()
    wait_for_end(child)
    with pytest.raises(ForerunError, match="it was closed"):
        engine.drafter_digest()
