"""What megatron-core's GPTModel cannot be is refused, with the reason, from the configuration alone."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from forerun.errors import UsageError
from forerun.families import RECORDS
from forerun.families.megatron_trunks import (
    REFUSED,
    TRUNKS,
    megatron_trunk,
    rotary_settings,
    transformer_settings,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KNOWN = {model_type for trunk in TRUNKS for model_type in trunk.model_types}


def settings(model_type: str, **changes: Any) -> dict[str, Any]:
    config, trunk = AutoConfig.for_model(model_type, **changes).to_dict(), megatron_trunk(model_type)
    layers, model = rotary_settings(trunk, config)
    return transformer_settings(trunk, config) | layers | model


def test_every_family_is_built_or_refused_for_a_reason() -> None:
    types = {family.trunk_model_type or kind for family in RECORDS for kind in family.model_types}
    assert types <= KNOWN | REFUSED.keys()
    assert not KNOWN & REFUSED.keys()


@pytest.mark.parametrize("model_type", [*REFUSED, "gpt2"])
def test_a_trunk_that_it_cannot_be(model_type: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be a trunk of model_type {model_type}: ") as refusal:
        megatron_trunk(model_type)
    assert REFUSED.get(model_type, "which has llama, qwen2, qwen3, glm4_moe, deepseek_v3") in str(refusal.value)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True, and megatron-core's GPTModel computes False"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3", {"topk_group": 2}, "num_experts_per_tok=8 and topk_group=2"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "no rotary embedding"),
        (
            "llama",
            {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}},
            "'low_freq_factor': 2.0",
        ),
        (
            "deepseek_v3",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.7}},
            "'mscale': 0.7",
        ),
    ],
)
def test_a_configuration_that_it_cannot_express(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        settings(model_type, **changes)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_published_shapes_are_expressed() -> None:
    glm = settings("glm4_moe", num_hidden_layers=3, rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.5})
    assert glm["moe_layer_freq"] == [0, 1, 1]
    assert glm["rotary_percent"] == 0.5 and glm["rotary_base"] == 1e6
    assert glm["moe_shared_expert_intermediate_size"] == 1408
    assert "moe_router_num_groups" not in glm
    deepseek = settings("deepseek_v3")
    assert (deepseek["moe_router_num_groups"], deepseek["moe_router_group_topk"]) == (8, 4)
    assert deepseek["moe_router_topk_scaling_factor"] == 2.5
    assert "num_query_groups" not in deepseek and "kv_channels" not in deepseek
