"""SGLang's own Python as judge of what we send: weight payloads, sampling settings, launch arguments, process groups.

Its server needs a GPU; these parts do not. What they do with a model stays unverified, see docs/rollout_sglang.md.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forerun.mtp.config import MTPConfig
from forerun.rollout.loopback import free_port
from forerun.rollout.protocol import SamplingParams
from forerun.rollout.sglang.launch import LaunchSettings, launch_arguments
from forerun.rollout.sglang.payload import encode
from forerun.rollout.sglang.sampling import to_sglang
from forerun.rollout.sglang.transport import join_group
from tests.oracles.exchange import HERE, run_script

pytestmark = pytest.mark.oracle

NAMED = [
    ("model.layers.0.a.weight", torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()),
    ("b", torch.tensor(2.5)),
    ("c", torch.arange(24.0).view(4, 6)[1:3, :5]),
    ("d", torch.arange(6, dtype=torch.float64).view(2, 3).T),
    ("e", torch.full((300, 2), 0.5, dtype=torch.float16)),
]
SAMPLING = [
    SamplingParams(12),
    SamplingParams(12, temperature=0, top_k=7),
    SamplingParams(9, 3, 0.7, 0.9, 5, 0.1, 1.0, {4: -2.0}, 2**62, ("end",), (3, 5)),
]
SETTINGS = LaunchSettings(
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
)
MTP = [
    MTPConfig(enable=True, enable_rollout=True),
    MTPConfig(
        enable=True,
        enable_rollout=True,
        acceptance="match",
        speculative_algorithm="NEXTN",
        speculative_num_steps=2,
        speculative_eagle_topk=4,
        speculative_num_draft_tokens=8,
    ),
]


@pytest.fixture(scope="module")
def answer(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("sglang")
    settings = {
        "payload": encode(NAMED),
        "sampling": [to_sglang(s, s.max_tokens, s.seed) for s in SAMPLING],
        "arguments": [launch_arguments(SETTINGS, mtp, 30001) for mtp in MTP],
    }
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    printed = run_script(oracle("sglang"), "sglang/read.py", str(folder))
    return json.loads(printed.strip().splitlines()[-1]), load_file(folder / "answer.safetensors")


def test_its_unpickler_reads_our_payload(answer: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> None:
    told, tensors = answer
    assert told["names"] == [name for name, _ in NAMED]
    for name, tensor in NAMED:
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)


def test_its_sampling_settings_are_ours(answer: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> None:
    plain, greedy, all_set = answer[0]["sampling"]
    everything = 1 << 30  # how it writes "no top-k"
    assert (plain["temperature"], plain["top_p"], plain["top_k"], plain["min_p"]) == (1, 1, everything, 0)
    assert (plain["ignore_eos"], plain["stop_token_ids"], plain["sampling_seed"]) == (True, [], None)
    assert (greedy["temperature"], greedy["top_k"]) == (1, 1)  # how it writes greedy
    assert all_set == {
        "max_new_tokens": 9,
        "min_new_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1,
        "ignore_eos": False,
        "logit_bias": {"4": -2},
        "sampling_seed": 2**62,
        "stop_strs": ["end"],
        "stop_token_ids": [3, 5],
    }


def test_its_parser_takes_our_launch_arguments(answer: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> None:
    chain, tree = answer[0]["arguments"]
    common = {
        "model_path": "/models/mimo",
        "host": "127.0.0.1",
        "port": 30001,
        "tp_size": 2,
        "dtype": "bfloat16",
        "max_running_requests": 64,
        "context_length": 4096,
        "mem_fraction_static": 0.7,
        "disable_cuda_graph": True,
        "enable_deterministic_inference": True,
        "enable_memory_saver": True,
        "enable_weights_cpu_backup": True,
        "trust_remote_code": True,
        "random_seed": 5,
        "sampling_defaults": "openai",
    }
    for read, algorithm, numbers, rejection in (
        (chain, "EAGLE", (3, 1, 4), True),
        (tree, "NEXTN", (2, 4, 8), False),
    ):
        assert {name: read[name] for name in common} == common
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        assert read["speculative_algorithm"] == algorithm and tuple(read[name] for name in names) == numbers
        assert read["speculative_use_rejection_sampling"] is rejection


def test_its_ranks_meet_ours_in_one_group(oracle: Any, tmp_path: Path) -> None:
    interpreter, port, name = oracle("sglang"), free_port(), "forerun_test"
    sent = {key: tensor.contiguous() for key, tensor in NAMED}
    shapes = {key: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for key, tensor in sent.items()}
    (tmp_path / "shapes.json").write_text(json.dumps(shapes), encoding="utf-8")
    command = [str(interpreter), "-E", str(HERE / "sglang/join.py"), str(port), name, str(tmp_path)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as rank:
        group = join_group(port, 2, name, "gloo", 120)
        for tensor in sent.values():
            torch.distributed.broadcast(tensor, group=group, group_src=0)
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors[-2000:]
    torch.distributed.destroy_process_group(group)
    received = load_file(tmp_path / "received.safetensors")
    assert received.keys() == sent.keys() and all(torch.equal(received[key], sent[key]) for key in sent)
