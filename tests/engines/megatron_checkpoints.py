"""Checkpoints that megatron-core's GPTModel is built from, over which ranks, and what must come of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import forerun
from forerun.families import MIMO
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.models.trunk import base_model, decoder_inputs, embed, project
from forerun.mtp.config import MTPConfig
from tests.families.tiny import VOCAB, tiny_trunk

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Checkpoint:
    """A tiny model of `tests.families.tiny` with changes to its configuration, and its MTP block; depths=0 is none."""

    trunk: str
    changes: dict[str, Any] = field(default_factory=dict)
    depths: int = 1
    repeated: bool = False

    def mtp(self) -> MTPConfig:
        if self.depths == 0:
            return MTPConfig()
        return MTPConfig(enable=True, num_layers=self.depths, repeat_layer=self.repeated)


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, Checkpoint] = {
    "llama-tied": Checkpoint("attached", {"tie_word_embeddings": True, "num_hidden_layers": 4}, depths=2),
    "llama3-rope": Checkpoint("attached", {"max_position_embeddings": 16384, "rope_parameters": _LLAMA3}),
    "mimo": Checkpoint("mimo", {"num_hidden_layers": 3, "num_attention_heads": 4}, depths=2),
    "qwen3": Checkpoint(
        "Qwen3ForCausalLM",
        {"head_dim": 8, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "glm4_moe": Checkpoint("glm4_moe", {"attention_bias": True, "use_qk_norm": True}),
    "deepseek_v3": Checkpoint("deepseek_v3", depths=2),
    "deepseek_v3-yarn": Checkpoint("deepseek_v3", {"q_lora_rank": None, "rope_parameters": _YARN}),
    "deepseek_v3-repeated": Checkpoint("deepseek_v3", depths=2, repeated=True),
    "glm4_moe-bfloat16": Checkpoint("glm4_moe"),
    "no-block-tied": Checkpoint("attached", {"tie_word_embeddings": True}, depths=0),
}
# Layout -> ranks, sizes, checkpoints.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"ranks": 1, "layout": {}, "cases": [case for case, made in CASES.items() if made.depths], "refusals": True},
    "tp2": {"ranks": 2, "layout": {"tensor_model_parallel_size": 2}, "cases": ["llama-tied", "mimo"]},
    "tp2-sp": {
        "ranks": 2,
        "layout": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "cases": ["mimo", "qwen3", "glm4_moe", "deepseek_v3", "deepseek_v3-yarn"],
    },
    "pp2": {
        "ranks": 2,
        "layout": {"pipeline_model_parallel_size": 2},
        "cases": ["llama-tied", "mimo", "deepseek_v3", "glm4_moe-bfloat16", "no-block-tied"],
    },
    "pp2-vp2": {
        "ranks": 2,
        "layout": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        "cases": ["llama-tied"],
    },
    "ep2": {"ranks": 2, "layout": {"expert_model_parallel_size": 2}, "cases": ["glm4_moe", "deepseek_v3"]},
    "tp2-pp2": {
        "ranks": 4,
        "layout": {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
        "cases": ["llama-tied", "deepseek_v3"],
    },
    "pp2-ep2": {
        "ranks": 4,
        "layout": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
        "cases": ["deepseek_v3"],
    },
}


def built(layouts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """All (layout, case)."""
    return [(layout, case) for layout, settings in layouts.items() for case in settings["cases"]]


def computed(layouts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Those (layout, case) that one process can run, and in full precision."""
    return [(a, b) for a, b in built(layouts) if "pp" not in a and not b.endswith("bfloat16")]


def checkpoint_model(case: str) -> PreTrainedModel:
    """The model of a checkpoint, in transformers."""
    made = CASES[case]
    dtype = torch.bfloat16 if case.endswith("bfloat16") else torch.float32
    model = tiny_trunk(made.trunk, dtype=dtype, **made.changes)
    if made.depths:
        forerun.attach(model, made.mtp(), init="plain", family=MIMO if made.trunk == "mimo" else None)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()  # as transformers and files have it, whatever the weights are
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Norms and biases that differ, so that none can stand in for another.
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1:
                noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                tensor.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model.eval()


def rows() -> Tensor:
    return torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))


def weigh(depth: int, logits: Tensor) -> Tensor:
    """A scalar whose gradient reaches everything: logits [B, S, V] of a depth, where the row holds what it embeds."""
    known = logits[:, : logits.shape[1] - depth]
    weights = torch.randn(known.shape, generator=torch.Generator().manual_seed(depth))
    return (known * weights).sum()


def run(folder: Path, layouts: Mapping[str, Any], packages: Path | None = None) -> Path:
    """Build all of `layouts` in other processes; `tests.engines.megatron_model` says what they leave in `folder`.

    Args:
        packages: a directory whose megatron-core takes the place of the installed one.
    """
    for case in {case for _, case in built(layouts)}:
        checkpoint_model(case).save_pretrained(folder / case)
    save_file({"input_ids": rows()}, folder / "rows.safetensors")
    (folder / "settings.json").write_text(json.dumps(layouts))
    path = os.pathsep.join(str(place) for place in (packages, ROOT) if place is not None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.megatron_model", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


def check_files(folder: Path, layout: str, case: str) -> None:
    """What came back is, bit by bit, what was in the files."""
    before = load_file(folder / case / "model.safetensors")
    after = load_file(folder / f"{layout}-{case}/model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


def check_named(folder: Path, layout: str, case: str) -> None:
    """The names are those of the torch engine, and what lies under them is the same."""
    ours, theirs = dict(named_weights(checkpoint_model(case))), load_file(folder / f"{layout}-{case}/named.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def check_computed(folder: Path, layout: str, case: str) -> None:
    """Logits of the trunk and every depth, and the gradients of all parameters, are transformers' up to rounding."""
    found, model, input_ids = load_file(folder / f"{layout}-{case}/logits.safetensors"), checkpoint_model(case), rows()
    assert isinstance(model, MTPCarrier)
    hidden = base_model(model)(input_ids=input_ids, use_cache=False).last_hidden_state
    positions = torch.arange(input_ids.shape[1])[None].expand_as(input_ids)
    inputs = decoder_inputs(model, hidden, positions)
    depths = model.mtp(hidden, lambda k: embed(model, input_ids.roll(-k, dims=1)), **inputs)
    total = hidden.new_zeros(())
    for depth, states in enumerate((hidden, *depths)):
        expected = project(model, states)
        known = input_ids.shape[1] - depth  # behind it the row holds no token to embed
        torch.testing.assert_close(found[str(depth)][:, :known], expected[:, :known], rtol=2e-5, atol=2e-5)
        total = total + weigh(depth, expected)
    total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    gradients = load_file(folder / f"{layout}-{case}/gradients.safetensors")
    for name, gradient in named_weights(model):
        if not name.endswith("e_score_correction_bias"):
            difference = float((gradients[name] - gradient).norm() / gradient.norm())
            assert difference < 2e-5, f"{name}: relative difference {difference:.1e}"
