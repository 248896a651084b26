"""The SGLang engine's parts by themselves: launch arguments and process, payloads, served weights, answers."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import ForerunError, UsageError
from forerun.models.weight_stream import WeightStream
from forerun.mtp.config import MTPConfig
from forerun.rollout.protocol import Request, SamplingParams
from forerun.rollout.sglang.completion import to_completion
from forerun.rollout.sglang.launch import LaunchSettings, launch, launch_arguments
from forerun.rollout.sglang.payload import encode
from forerun.rollout.sglang.sampling import sampled_log_probs
from forerun.rollout.sglang.server import ServerFacts, end_tokens
from forerun.rollout.sglang.weights import ServedWeights as SGLangWeights
from forerun.rollout.sync import digest
from forerun.rollout.vllm.weights import ServedWeights as VLLMWeights
from tests.rollout.sglang_server import read_bucket


def facts(num_steps: int = 3, topk: int = 1) -> ServerFacts:
    return ServerFacts("0.5.23", "m", 1, num_steps, topk, 96, True, True, False, True, None)


# Launch


def mtp(**settings: Any) -> MTPConfig:
    return MTPConfig(enable=True, enable_rollout=True, **settings)


def test_launch_arguments_in_full() -> None:
    settings = LaunchSettings(
        Path("/models/mimo"),
        tensor_parallel_size=2,
        dtype="bfloat16",
        max_num_seqs=64,
        max_model_len=4096,
        gpu_memory_utilization=0.7,
        enforce_eager=True,
        deterministic=True,
        keeps_weights=True,
        trust_remote_code=True,
        seed=5,
        extra_arguments=("--log-level", "warning"),
    )
    assert " ".join(launch_arguments(settings, mtp(), 30001)) == (
        "--model-path /models/mimo --host 127.0.0.1 --port 30001 --tp-size 2 --dtype bfloat16 "
        "--sampling-defaults openai --random-seed 5 --max-running-requests 64 --context-length 4096 "
        "--mem-fraction-static 0.7 --disable-cuda-graph --enable-deterministic-inference --enable-memory-saver "
        "--enable-weights-cpu-backup --trust-remote-code --speculative-algorithm EAGLE "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
        "--speculative-use-rejection-sampling --log-level warning"
    )


def test_what_is_not_asked_for_is_left_out() -> None:
    plain = launch_arguments(LaunchSettings(Path("m"), sleeps=False), None, 1)
    assert not any("speculative" in argument or argument.startswith("--enable") for argument in plain)
    for off in (MTPConfig(enable=True), mtp(speculative_num_steps=0)):
        assert launch_arguments(LaunchSettings(Path("m"), sleeps=False), off, 1) == plain
    tree = mtp(
        acceptance="match",
        speculative_algorithm="nextn",
        speculative_num_steps=2,
        speculative_eagle_topk=4,
        speculative_num_draft_tokens=21,
    )
    assert " ".join(launch_arguments(LaunchSettings(Path("m"), sleeps=False), tree, 1)[len(plain) :]) == (
        "--speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-eagle-topk 4 "
        "--speculative-num-draft-tokens 21"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_algorithm": "NGRAM"}, "EAGLE and NEXTN"),
        ({"speculative_eagle_topk": 0}, "must be at least 1"),
        ({"speculative_num_draft_tokens": 6}, "set it to 4"),
        (
            {"acceptance": "match", "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 12},
            "between 2 and 11",
        ),
        ({"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8}, "rejects along a chain alone"),
    ],
    ids=str,
)
def test_drafting_that_sglang_would_not_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        launch_arguments(LaunchSettings(Path("m")), mtp(**settings), 1)


def interpreter_with_sglang(tmp_path: Path, program: str) -> str:
    """Another Python that has a module sglang.launch_server, which is `program`."""
    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True, exist_ok=True)
    (package / "launch_server.py").write_text(program, encoding="utf-8")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return str(script)


# Answers 503 at first; its child notes its own number.
_SERVES = """
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    calls = 0
    def do_GET(self):
        Handler.calls += 1
        self.send_response(503 if Handler.calls == 1 else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(os.path.join(sys.argv[sys.argv.index("--model-path") + 1], "pids"), "w").write(f"{os.getpid()} {child.pid}")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_server_is_started_and_ended_with_its_children(tmp_path: Path) -> None:
    python = interpreter_with_sglang(tmp_path, _SERVES)
    url, process = launch(LaunchSettings(tmp_path, python=python, start_timeout_s=60), None)
    assert url.startswith("http://127.0.0.1:")
    pids = (tmp_path / "pids").read_text(encoding="utf-8").split()
    assert all(map(running, pids))
    process.close()
    assert_ended(pids)


def test_a_server_ends_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    """And nothing of it stays in the folder for temporary files."""
    python = interpreter_with_sglang(tmp_path, _SERVES)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    trainers = (
        "import time\n"
        "from pathlib import Path\n"
        "from forerun.rollout.sglang.launch import LaunchSettings, launch\n"
        f"started = launch(LaunchSettings(Path({str(tmp_path)!r}), python={python!r}), None)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen([sys.executable, "-c", trainers], stdout=subprocess.PIPE, text=True, env=environment) as ours:
        assert ours.stdout is not None and ours.stdout.readline() == "up\n"
        pids = (tmp_path / "pids").read_text(encoding="utf-8").split()
        assert all(map(running, pids))
        ours.kill()
    assert_ended(pids)
    assert list(scratch.iterdir()) == []


def assert_ended(pids: list[str]) -> None:
    deadline = time.monotonic() + 10
    while any(map(running, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_that_does_not_come_up_is_one_line(tmp_path: Path) -> None:
    dies = interpreter_with_sglang(tmp_path, "print('loading'); exit('error: unrecognized arguments: --tp-size')")
    with pytest.raises(
        ForerunError, match=r"SGLang did not start: error: unrecognized arguments: --tp-size \(whole log: "
    ) as caught:
        launch(LaunchSettings(tmp_path, python=dies, start_timeout_s=60), None)
    log = Path(str(caught.value).rpartition("whole log: ")[2].rstrip(")"))
    assert log.read_text(encoding="utf-8").splitlines()[0] == "loading"
    log.unlink()
    hangs = interpreter_with_sglang(tmp_path, "import time; print('loading', flush=True); time.sleep(60)")
    with pytest.raises(ForerunError, match="did not start within 1 s: ") as caught:
        launch(LaunchSettings(tmp_path, python=hangs, start_timeout_s=1), None)
    Path(str(caught.value).rpartition("whole log: ")[2].rstrip(")")).unlink()
    with pytest.raises(UsageError, match="cannot import sglang: install SGLang in that environment"):
        launch(LaunchSettings(tmp_path, python=sys.executable), None)
    with pytest.raises(UsageError, match=r"cannot start SGLang's interpreter .* \(No such file"):
        launch(LaunchSettings(tmp_path, python=str(tmp_path / "none")), None)
    with pytest.raises(UsageError, match="is not a directory"):
        launch(LaunchSettings(tmp_path / "none"), None)


# Payloads


def test_a_bucket_comes_back_as_it_was() -> None:
    torch.manual_seed(0)
    named = [
        ("a.weight", torch.randn(3, 4, dtype=torch.bfloat16)),
        ("scalar", torch.tensor(2.5)),
        ("ünïcode", torch.randn(4, 6)[1:3, :5]),
        ("double", torch.randn(2, dtype=torch.float64)),
        ("empty", torch.zeros(0, 3)),
        ("turned", torch.randn(3, 5).T),
        ("half", torch.ones(300, 2, dtype=torch.float16).requires_grad_()),
    ]
    text = encode(named)
    for (name, tensor), (read_name, read) in zip(named, read_bucket(text), strict=True):
        assert read_name == name and read.dtype == tensor.dtype and not read.requires_grad
        assert torch.equal(read, tensor)
    big = torch.zeros(1000, 1000)
    assert len(encode([("view", big[:2, :2])])) < 10_000  # a view does not drag its storage along


def test_a_bucket_names_nothing_that_could_do_harm() -> None:
    data = base64.b64decode(encode([("a", torch.ones(2))]))
    names = []

    class Spy(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            names.append(f"{module}.{name}")
            return super().find_class(module, name)

    Spy(io.BytesIO(data)).load()
    assert names == ["torch._utils._rebuild_tensor_v2", "torch.storage._load_from_bytes", "collections.OrderedDict"]


# Weights


def moe_checkpoint(path: Path) -> Path:
    """Names and shapes of a GLM-4.5-like checkpoint: one trunk layer, one MTP layer, two experts each."""
    tensors = {"model.embed_tokens.weight": torch.randn(5, 4), "model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}
    for layer in (0, 1):
        for expert in (0, 1):
            for name, shape in (("gate_proj", (3, 4)), ("up_proj", (3, 4)), ("down_proj", (4, 3))):
                tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = torch.randn(shape)
    tensors["model.layers.1.eh_proj.weight"] = torch.randn(4, 8)
    tensors["model.layers.1.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    path.mkdir()
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path / "model.safetensors")
    config = {"model_type": "glm4_moe", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def test_stacked_experts_are_sent_one_by_one_in_the_servers_dtype(tmp_path: Path) -> None:
    served = SGLangWeights(moe_checkpoint(tmp_path / "model"), None)
    torch.manual_seed(1)
    given = [("model.embed_tokens.weight", torch.randn(5, 4)), ("model.layers.1.eh_proj.weight", torch.randn(4, 8))]
    for layer in (0, 1):
        given.append((f"model.layers.{layer}.mlp.experts.gate_up_proj", torch.randn(2, 6, 4)))
        given.append((f"model.layers.{layer}.mlp.experts.down_proj", torch.randn(2, 4, 3)))
    stored = dict(served.as_stored(WeightStream.of(given)))
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    stacked = given[2][1].bfloat16()
    assert torch.equal(stored["model.layers.0.mlp.experts.1.gate_proj.weight"], stacked[1, :3])
    assert torch.equal(stored["model.layers.0.mlp.experts.1.up_proj.weight"], stacked[1, 3:])
    assert torch.equal(stored["model.layers.1.mlp.experts.0.down_proj.weight"], given[5][1][0].bfloat16())
    # The zero bias and the copy of the embedding may stay away; a drafter's expert may not.
    assert "model.layers.0.self_attn.q_proj.bias" not in stored and "model.layers.1.embed_tokens.weight" not in stored
    with pytest.raises(ForerunError, match=r"2 of the drafter's 7 weights are missing, first .*layers\.1.*down_proj"):
        served.as_stored(WeightStream.of(given[:-1]))
    drafter = [name for name, tensor in given if served.is_drafter(name)]
    assert drafter == [given[1][0], given[4][0], given[5][0]]
    assert served.drafter_names == {name for name in stored if name.startswith("model.layers.1.")}
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert served.drafter_digest == digest((name, files[name]) for name in served.drafter_names)
    wide = SGLangWeights(tmp_path / "model", torch.float32)
    assert dict(wide.as_stored(WeightStream.of(given)))["model.embed_tokens.weight"].dtype == torch.float32


@pytest.mark.parametrize("of", ["sglang", "vllm"])
def test_what_only_files_hold_may_stay_away(of: str, tmp_path: Path) -> None:
    """Rotary frequencies, which no model keeps, and the head of a model whose text section ties it."""
    path = moe_checkpoint(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    given = [(name, tensor) for name, tensor in tensors.items() if name != "model.layers.1.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    config = {"model_type": "glm4_moe", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    config["text_config"] = {**config, "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if of == "sglang":
        sent = SGLangWeights(path, None).as_stored(WeightStream.of(given))
        assert dict(sent).keys() == dict(given).keys()
    else:
        plan = VLLMWeights(path).plan(WeightStream.of(given))
        assert dict(plan.tensors).keys() == tensors.keys() - {next(n for n in tensors if "inv_freq" in n)}


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    path = moe_checkpoint(tmp_path / "model")
    save_file({"model.layers.0.w": torch.zeros(2, dtype=torch.float8_e4m3fn)}, path / "model.safetensors")
    with pytest.raises(UsageError, match=r"is quantised \(model.layers.0.w is F8_E4M3\)"):
        SGLangWeights(path, None)


def test_end_tokens_come_from_every_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "text_config": {"eos_token_id": 3}}')
    assert end_tokens(tmp_path) == {3}
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert end_tokens(tmp_path) == {2}  # the type's own
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert end_tokens(tmp_path) == {2, 7, 8}
    (tmp_path / "config.json").write_text('{"model_type": "nobody knows", "eos_token_id": null}')
    assert end_tokens(tmp_path) == {7, 8}


# Answers


def answer(count: int, reason: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": list(range(count)),
        "meta_info": {
            "finish_reason": reason or {"type": "length", "length": count},
            "output_token_logprobs": [[-0.5, i, None] for i in range(count)],
            **meta,
        },
    }


def counts(steps: int, histogram: list[int], num_steps: int = 3) -> dict[str, Any]:
    accepted = sum(i * count for i, count in enumerate(histogram))
    return {
        "spec_verify_ct": steps,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": steps * num_steps,
        "spec_correct_drafts_histogram": histogram,
    }


def test_counts_of_drafts_behind_the_end_are_taken_out() -> None:
    """SGLang counts the last step whole and cuts the text. Here 1 + (0 + 1) + (3 + 1) + (3 + 1) = 10 tokens were
    emitted, and the text ends 2 earlier: the last step kept 1 draft and the token after it, itself a draft: 2 judged.
    """
    request = Request("a", [1], SamplingParams(8))
    whole = to_completion(request, answer(10, **counts(3, [1, 0, 0, 2])), facts(), 0)
    assert (whole.spec_num_draft_tokens, whole.spec_num_accepted_tokens) == (9, 6)
    assert (whole.drafted_per_depth, whole.accepted_per_depth) == ([3, 3, 3], [2, 2, 2])
    cut = to_completion(request, answer(8, **counts(3, [1, 0, 0, 2])), facts(), 0)
    assert cut.spec_num_verify_steps == 3
    assert (cut.spec_num_accepted_tokens, cut.accepted_per_depth) == (4, [2, 1, 1])
    assert (cut.spec_num_draft_tokens, cut.drafted_per_depth) == (8, [3, 3, 2])
    # A request that was moved out and in again has one more token that no step verified.
    again = to_completion(request, answer(11, **counts(3, [1, 0, 0, 2]), num_retractions=1), facts(), 0)
    assert again.spec_num_accepted_tokens == 6
    tree = to_completion(request, answer(8, **counts(3, [1, 0, 0, 2])), facts(topk=4), 0)
    assert (tree.drafted_per_depth, tree.spec_num_draft_tokens, tree.accepted_per_depth) == (None, 9, [2, 1, 1])


def test_a_text_that_ended_at_once_was_not_verified() -> None:
    c = to_completion(Request("a", [1], SamplingParams(1)), answer(1), facts(), 0)
    assert (c.spec_num_verify_steps, c.spec_num_draft_tokens, c.accepted_per_depth) == (0, 0, [0, 0, 0])


def test_versions_per_token_and_names_that_are_not_ours() -> None:
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 9}]
    request = Request("a", [1], SamplingParams(4))
    assert to_completion(
        request, answer(4, weight_version="5", weight_versions=spans), facts(0), 1
    ).weight_versions == [
        4,
        4,
        5,
        5,
    ]
    assert to_completion(request, answer(3, weight_version="6"), facts(0), 1).weight_versions == [6] * 3
    assert to_completion(request, answer(2, weight_version="default"), facts(0), 1).weight_versions == [1, 1]


def test_reasons_and_answers_of_another_form() -> None:
    request = Request("a", [1], SamplingParams(4))
    stopped = to_completion(request, answer(2, {"type": "stop", "matched": "\n\n"}), facts(0), 0)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "\n\n")
    waiting = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Aborted"}}}
    cut = to_completion(request, waiting, facts(), 0)
    assert (cut.finish_reason, cut.token_ids, cut.log_probs, cut.stop_reason) == ("abort", [], [], None)
    for wrong in ({}, [], answer(2, {"type": "new"}), {"meta_info": {"finish_reason": None}}):
        with pytest.raises(ForerunError, match="gave an answer of another form"):
            to_completion(request, wrong, facts(), 0)
    whole = answer(2, **counts(1, [0, 1, 0, 0]), weight_versions=[{"version": "4", "start": 0, "end": 2}])
    for name, wrong in (
        ("weight_versions", [{"version": "4"}]),
        ("num_retractions", None),
        ("spec_verify_ct", "many"),
        ("spec_num_correct_drafts", {}),
        ("spec_num_proposed_drafts", math.nan),
        ("spec_correct_drafts_histogram", [1, None]),
        ("output_top_logprobs", [[]]),
        ("output_token_logprobs", [[-1, 2, None], None]),
    ):
        broken = {**whole, "meta_info": {**whole["meta_info"], name: wrong}}
        with pytest.raises(ForerunError, match="gave an answer of another form"):
            to_completion(Request("a", [1], SamplingParams(4, top_k=2)), broken, facts(), 0)
    short = answer(2)
    del short["meta_info"]["output_token_logprobs"][0]
    with pytest.raises(ForerunError, match="2 tokens and 1 log-probs"):
        to_completion(request, short, facts(0), 0)


def test_log_probs_are_renormalised_over_what_the_filters_keep() -> None:
    probs = [0.4, 0.3, 0.2, 0.1]
    top = [[math.log(p) for p in reversed(probs)]]
    own = [math.log(0.3)]
    for sampling, mass in (
        (SamplingParams(top_k=4), 1.0),
        (SamplingParams(top_k=4, top_p=0.7), 0.7),  # reached by the first two exactly
        (SamplingParams(top_k=4, top_p=0.71), 0.9),
        (SamplingParams(top_k=4, min_p=0.45), 0.9),  # 0.2 is half of 0.4, 0.1 a quarter
    ):
        assert sampled_log_probs(sampling, own, top) == pytest.approx([math.log(0.3 / mass)])
    first_two = [[math.log(0.3), math.log(0.4)]]
    # Top-p applies to what top-k left: 0.4 / 0.7 < 0.6, so both stay; 0.57 is below it, so one would.
    assert sampled_log_probs(SamplingParams(top_k=2, top_p=0.6), own, first_two) == pytest.approx([math.log(3 / 7)])
    assert sampled_log_probs(SamplingParams(temperature=0, top_k=2), own, []) == [0.0]
    assert sampled_log_probs(SamplingParams(temperature=0.5), own, []) == own
