"""Shapes read from a config.json against the weights of the model that transformers builds from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from forerun.errors import UsageError
from forerun.planner.shape import load_shape, shape_of, shown_weights

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
CONFIGS = [
    LlamaConfig(**SIZES),
    Qwen3Config(**SIZES, head_dim=24),
    MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    Qwen3MoeConfig(**SIZES, **MOE, num_experts=6, head_dim=16, mlp_only_layers=[1], decoder_sparse_step=1),
    Qwen3NextConfig(
        **SIZES,
        **MOE,
        num_experts=6,
        head_dim=16,
        shared_expert_intermediate_size=24,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        **MOE,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
]


def small(name: str, parameter: nn.Parameter) -> bool:
    """Norms, biases, convolutions and gates of one value per head or token: what a shape leaves out."""
    return (parameter.dim() != 2 and "experts" not in name) or "conv1d" in name or "shared_expert_gate" in name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_weights_are_those_of_the_model(config: PretrainedConfig) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(
        p.numel() for name, p in model.named_parameters() if not small(name, p) and "embed_tokens" not in name
    )
    assert shape_of(config.to_dict(), "m").parameters == expected


def test_shipped_models_have_their_published_size() -> None:
    # Without embeddings, norms and biases: 671 B and 37 B active (DeepSeek-V3 report); 80 B and 3 B; 134.5 M.
    assert load_shape("deepseek-r1").parameters == pytest.approx(671e9, rel=0.01)
    assert load_shape("deepseek-r1").active == pytest.approx(37e9, rel=0.02)
    assert load_shape("qwen3-next-80b-a3b").parameters == pytest.approx(80e9, rel=0.02)
    assert load_shape("smollm2-135m").parameters == pytest.approx(134.5e6, rel=0.002)
    # Embedding added: 7.6 B and 9 B.
    assert load_shape("mimo-7b").parameters + 151680 * 4096 == pytest.approx(7.6e9, rel=0.01)
    assert load_shape("qwen3.5-9b").parameters + 248320 * 4096 == pytest.approx(9e9, rel=0.01)
    # A latent cache of 576 values in each of 61 layers.
    assert sum(layer.cached for layer in load_shape("deepseek-r1").layers) == 61 * 576


def test_windows_nesting_and_precisions_are_read(tmp_path: Path) -> None:
    text = {**SIZES, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    shape = shape_of({"text_config": text, "torch_dtype": "float32"}, "m")
    assert [layer.window for layer in shape.layers] == [8, None, 8, None] and shape.precision == "float32"
    assert shape_of({**SIZES, "quantization_config": {"quant_method": "fp8"}}, "m").precision == "fp8"
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert load_shape(str(tmp_path)) == load_shape(str(tmp_path / "config.json")).__class__(
        **{**load_shape(str(tmp_path / "config.json")).__dict__, "name": tmp_path.name}
    )


@pytest.mark.parametrize("wrong", [{"hidden_size": None}, {"num_hidden_layers": 0}, {"vocab_size": "x"}])
def test_a_missing_size_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        shape_of({**SIZES, **wrong}, "m")


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_key_value_heads": -1},
        {"intermediate_size": 10**300},
        {"num_experts": 4, "num_experts_per_tok": 5},
        {"head_dim": "x"},
        {"full_attention_interval": [2]},
        {"layer_types": 3},
        {"quantization_config": "fp8"},
        {"kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 2, "q_lora_rank": math.nan},
        {"num_experts": 2.5},
        {"num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": "one"},
        {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 1},
        {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": -1},
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": -8},
        {"num_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": -1},
    ],
    ids=lambda wrong: list(wrong)[-1],
)
def test_a_setting_of_another_kind_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=list(wrong)[-1]):
        shape_of({**SIZES, **wrong}, "m")


def test_what_is_no_model_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="deepseek-r1"):
        load_shape("nowhere")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UsageError, match="no JSON object"):
        load_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        load_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (7832000000, "7.83 B"),
        (7000000000, "7.00 B"),
        (671026419200, "671 B"),
        (134515008, "135 M"),
        (1600000, "1.60 M"),
    ],
)
def test_numbers_of_weights_for_people(number: int, words: str) -> None:
    assert shown_weights(number) == words
