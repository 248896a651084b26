"""megatron-core's GPTModel built from a Hugging Face checkpoint: every bit comes back, and it computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import forerun
from forerun.families import MIMO
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.models.trunk import base_model, decoder_inputs, embed, project
from forerun.mtp.config import MTPConfig
from tests.families.tiny import VOCAB, tiny_trunk

ROOT = Path(__file__).parents[2]
# Checkpoint -> (tiny trunk, changes, MTP layers).
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama-tied": ("attached", {"tie_word_embeddings": True}, 2),
    "llama3-rope": (
        "attached",
        {
            "max_position_embeddings": 16384,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        1,
    ),
    "mimo": ("mimo", {"num_hidden_layers": 3, "num_attention_heads": 4}, 2),
    "glm4_moe": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True}, 1),
    "deepseek_v3": ("deepseek_v3", {}, 2),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 16,
            },
        },
        1,
    ),
    "glm4_moe-bfloat16": ("glm4_moe", {}, 1),
}
EVERY = list(CASES)
DENSE = [case for case in CASES if case.startswith(("llama", "mimo"))]
EXPERTS = [case for case in CASES if case.startswith(("glm", "deepseek"))]
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"ranks": 1, "layout": {}, "cases": EVERY},
    "tp2": {"ranks": 2, "layout": {"tensor_model_parallel_size": 2}, "cases": DENSE},
    "tp2-sp": {"ranks": 2, "layout": {"tensor_model_parallel_size": 2, "sequence_parallel": True}, "cases": EXPERTS},
    "pp2": {"ranks": 2, "layout": {"pipeline_model_parallel_size": 2}, "cases": EVERY},
    "ep2": {"ranks": 2, "layout": {"expert_model_parallel_size": 2}, "cases": EXPERTS},
    "pp2-ep2": {
        "ranks": 4,
        "layout": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
        "cases": ["deepseek_v3"],
    },
}
BUILT = [(layout, case) for layout, settings in LAYOUTS.items() for case in settings["cases"]]


def carrier(case: str) -> MTPCarrier:
    trunk, changes, depths = CASES[case]
    dtype = torch.bfloat16 if case.endswith("bfloat16") else torch.float32
    model = tiny_trunk(trunk, dtype=dtype, **changes)
    family = MIMO if trunk == "mimo" else None
    forerun.attach(model, MTPConfig(enable=True, num_layers=depths), init="plain", family=family)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()  # as transformers and files have it, whatever the weights are
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Norms, biases and routers that differ, so that none can stand in for another.
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1:
                noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                tensor.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    assert isinstance(model, MTPCarrier)
    return model.eval()


def rows() -> Tensor:
    return torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    for case in CASES:
        carrier(case).save_pretrained(folder / case)
    save_file({"input_ids": rows()}, folder / "rows.safetensors")
    (folder / "settings.json").write_text(json.dumps(LAYOUTS))
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.megatron_model", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.mark.parametrize(("layout", "case"), BUILT)
def test_every_bit_of_the_files_returns(folder: Path, layout: str, case: str) -> None:
    before, after = (
        load_file(folder / case / "model.safetensors"),
        load_file(folder / f"{layout}-{case}/model.safetensors"),
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


@pytest.mark.parametrize(("layout", "case"), BUILT)
def test_named_weights_are_the_torch_engines(folder: Path, layout: str, case: str) -> None:
    ours, theirs = dict(named_weights(carrier(case))), load_file(folder / f"{layout}-{case}/named.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("layout", "case"), [(a, b) for a, b in BUILT if not a.startswith("pp") and not b.endswith("bfloat16")]
)
@torch.no_grad()
def test_trunk_and_every_depth_compute_the_same(folder: Path, layout: str, case: str) -> None:
    found = load_file(folder / f"{layout}-{case}/logits.safetensors")
    model, input_ids = carrier(case), rows()
    hidden = base_model(model)(input_ids=input_ids, use_cache=False).last_hidden_state
    positions = torch.arange(input_ids.shape[1])[None].expand_as(input_ids)
    inputs = decoder_inputs(model, hidden, positions)
    depths = model.mtp(hidden, lambda k: embed(model, input_ids.roll(-k, dims=1)), **inputs)
    for k, states in enumerate((hidden, *depths)):
        known = input_ids.shape[1] - k  # behind it the row holds no token to embed
        expected = project(model, states)[:, :known]
        torch.testing.assert_close(
            found[str(k)][:, :known], expected, rtol=2e-5, atol=2e-5, msg=lambda m, k=k: f"depth {k}: {m}"
        )
