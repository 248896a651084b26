"""The tiny random models of the tests: a trunk of every family, and of any other class of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 61

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
_MLA: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
_DEEPSEEK = (
    COMMON | _EXPERTS | _MLA | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
)
_INDEXER: dict[str, Any] = {"index_topk": 3, "index_head_dim": 8, "index_n_heads": 2}
_HYBRID: dict[str, Any] = COMMON | {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["full_attention", "linear_attention"],
}
_QWEN_EXPERTS: dict[str, Any] = _EXPERTS | {"shared_expert_intermediate_size": 8, "num_experts": 4}
_QWEN3_5 = _HYBRID | {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
_QWEN3_5_MOE = {key: value for key, value in _QWEN3_5.items() if key != "intermediate_size"} | _QWEN_EXPERTS
_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": 16,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
_NEMOTRON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "layers_block_type": ["linear_attention", "full_attention", "moe"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "mamba_num_heads": 2,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}

# Name -> (model class of transformers, configuration).
TRUNKS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", _DEEPSEEK),
    "deepseek_v32": ("DeepseekV32ForCausalLM", _DEEPSEEK | _INDEXER),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        COMMON | _EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8},
    ),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", _DEEPSEEK | _INDEXER | {"indexer_types": ["full", "full"]}),
    "qwen3_next": ("Qwen3NextForCausalLM", _HYBRID | _QWEN_EXPERTS),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", {"text_config": _QWEN3_5, "vision_config": _VISION}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", _QWEN3_5),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", {"text_config": _QWEN3_5_MOE, "vision_config": _VISION}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", _QWEN3_5_MOE),
    "ernie4_5": ("Ernie4_5ForCausalLM", COMMON | {"head_dim": 8}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        COMMON | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_start_index": 1},
    ),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "num_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "ffn_hidden_size": 24,
            "expert_ffn_hidden_size": 8,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "head_dim": 4,
            "initializer_range": 0.3,
        }
        | _MLA,
    ),
    "nemotron_h": ("NemotronHForCausalLM", _NEMOTRON),
    "mimo": ("Qwen2ForCausalLM", COMMON),
    "attached": ("LlamaForCausalLM", COMMON),
    "attached_moe": (
        "Qwen3MoeForCausalLM",
        COMMON | _EXPERTS | {"num_experts": 4, "head_dim": 8, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    ),
    "attached_gemma": ("GemmaForCausalLM", COMMON | {"head_dim": 8}),  # zero-centred norms, tied
}


def tiny_trunk(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A family of `TRUNKS`, or the Llama of that size in another class, "Qwen3ForCausalLM" for instance.

    `changes` are for the text configuration.
    """
    class_name, settings = TRUNKS.get(name, (name, COMMON))
    model_class = getattr(transformers, class_name)
    if "text_config" in settings:
        settings = settings | {"text_config": settings["text_config"] | changes}
    else:
        settings = settings | changes
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**settings))
    return model.to(dtype).eval()
