"""Which trunks Megatron-Core's GPTModel can be, and what config.json's keys are called in its configuration.

Read in megatron-core 0.16.1 and 0.19.2 (`transformer/transformer_config.py`, `models/gpt/gpt_model.py`) beside
transformers 5.24's models. Keys are those of transformers' configuration classes, defaults filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn.functional import silu

from forerun.errors import UsageError

_GROUPED = (
    ("num_layers", "num_hidden_layers"),
    ("hidden_size", "hidden_size"),
    ("ffn_hidden_size", "intermediate_size"),
    ("num_attention_heads", "num_attention_heads"),
    ("num_query_groups", "num_key_value_heads"),
    ("kv_channels", "head_dim"),
    ("layernorm_epsilon", "rms_norm_eps"),
    ("attention_dropout", "attention_dropout"),
)
# Multi-head latent attention: each head has keys and values of its own, of sizes of their own.
_LATENT = (
    *(pair for pair in _GROUPED if pair[0] not in ("num_query_groups", "kv_channels")),
    ("q_lora_rank", "q_lora_rank"),
    ("kv_lora_rank", "kv_lora_rank"),
    ("qk_head_dim", "qk_nope_head_dim"),
    ("qk_pos_emb_head_dim", "qk_rope_head_dim"),
    ("v_head_dim", "v_head_dim"),
)
_EXPERTS = (
    ("num_moe_experts", "n_routed_experts"),
    ("moe_ffn_hidden_size", "moe_intermediate_size"),
    ("moe_router_topk", "num_experts_per_tok"),
    ("moe_router_topk_scaling_factor", "routed_scaling_factor"),
)
# Sigmoid scores with a bias that only chooses, in float32; no auxiliary loss, and the bias is not moved.
_SIGMOID_ROUTER: Mapping[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
_NO_WINDOW = {"use_sliding_window": (False,)}
_UNBIASED = {"attention_bias": (False,)}


@dataclass(frozen=True)
class MegatronTrunk:
    """One kind of trunk.

    Attributes:
        model_types: values of `model_type` of transformers' configurations.
        fields: pairs (TransformerConfig's field, config.json's key).
        settings: fields of TransformerConfig that are the same for every trunk of the kind.
        needs: per key of config.json the values that GPTModel can express.
        latent: multi-head latent attention (MLATransformerConfig).
        experts: a mixture of experts after `first_k_dense_replace` dense layers.
    """

    model_types: tuple[str, ...]
    fields: tuple[tuple[str, str], ...]
    settings: Mapping[str, Any]
    needs: Mapping[str, tuple[Any, ...]]
    latent: bool = False
    experts: bool = False


TRUNKS: tuple[MegatronTrunk, ...] = (
    MegatronTrunk(("llama",), _GROUPED, {}, _UNBIASED | {"mlp_bias": (False,)}),
    MegatronTrunk(("qwen2",), _GROUPED, {"add_qkv_bias": True}, _NO_WINDOW),
    MegatronTrunk(("qwen3",), _GROUPED, {"qk_layernorm": True}, _UNBIASED | _NO_WINDOW),
    MegatronTrunk(
        ("glm4_moe",),
        (*_GROUPED, *_EXPERTS, ("add_qkv_bias", "attention_bias"), ("qk_layernorm", "use_qk_norm")),
        _SIGMOID_ROUTER,
        {"norm_topk_prob": (True,)},
        experts=True,
    ),
    MegatronTrunk(
        ("deepseek_v3",),
        (*_LATENT, *_EXPERTS),
        # Not qk_layernorm, though latents have norms: with it the gradients of these, which are whole on every
        # tensor-parallel rank, are summed.
        _SIGMOID_ROUTER,
        # transformers' norms of the latents have 1e-6 whatever config.json says, Megatron's what it says.
        _UNBIASED | {"norm_topk_prob": (True,), "rope_interleave": (True,), "rms_norm_eps": (1e-6,)},
        latent=True,
        experts=True,
    ),
)

_GATED_DELTA_NET = (
    "its linear attention is written for Transformer Engine's fused layers, and no names are mapped for it"
)
_SPARSE = "its sparse attention picks keys by an indexer of megatron-core's own, and no names are mapped for it"
_NO_NORM = "its MTP layers have no norm behind them, and MultiTokenPredictionLayer always has one"
# Families with a record of their own that GPTModel cannot be, and why.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _GATED_DELTA_NET),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _SPARSE),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), _NO_NORM),
    "longcat_flash": "its layers hold two attentions and a shortcut around the experts, and TransformerLayer one",
    "nemotron_h": "its Mamba layers belong to megatron-core's MambaModel, and MTP to GPTModel",
}


def megatron_trunk(model_type: str | None) -> MegatronTrunk:
    """The trunk's record.

    Raises:
        UsageError: GPTModel cannot be such a trunk, or nobody has written down how; the line says which.
    """
    for trunk in TRUNKS:
        if model_type in trunk.model_types:
            return trunk
    known = ", ".join(name for trunk in TRUNKS for name in trunk.model_types)
    reason = REFUSED.get(str(model_type), f"no record of it in forerun.families.megatron_trunks, which has {known}")
    raise UsageError(f"megatron-core's GPTModel cannot be a trunk of model_type {model_type}: {reason}")


def transformer_settings(trunk: MegatronTrunk, config: Mapping[str, Any]) -> dict[str, Any]:
    """What TransformerConfig (MLATransformerConfig) takes, of the shape and arithmetic of the layers.

    Args:
        config: transformers' configuration as a dictionary.

    Raises:
        UsageError: a value that GPTModel cannot express; the line names it.
    """
    needs = {"hidden_act": ("silu",), **trunk.needs}
    for key, allowed in needs.items():
        if config.get(key, allowed[0]) not in allowed:
            raise UsageError(
                f"config.json has {key}={config[key]!r}, and megatron-core's GPTModel computes "
                f"{' or '.join(map(repr, allowed))} for model_type {trunk.model_types[0]}: train it with "
                "engine.strategy=torch"
            )
    if other := sorted(set(config.get("layer_types") or ()) - {"full_attention"}):
        raise UsageError(f"config.json has layers of type {other[0]}, and megatron-core's have full attention")
    settings = {theirs: config[key] for theirs, key in trunk.fields if config.get(key) is not None}
    settings |= trunk.settings
    if trunk.latent:
        settings |= {"q_lora_rank": config["q_lora_rank"]}  # None is no compression of queries, and no default
    if trunk.experts:
        settings |= _expert_settings(config)
    return settings | {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
    }


def _expert_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    settings: dict[str, Any] = {"moe_layer_freq": [0] * min(dense, layers) + [1] * (layers - dense)}
    if config.get("n_shared_experts"):
        settings["moe_shared_expert_intermediate_size"] = config["n_shared_experts"] * config["moe_intermediate_size"]
    chosen, groups, open_groups = config["num_experts_per_tok"], config.get("n_group") or 1, config.get("topk_group")
    if chosen == 1:
        raise UsageError(
            "config.json has num_experts_per_tok=1 with norm_topk_prob: megatron-core norms the weights of several "
            "experts only"
        )
    if groups > 1:
        # A group is worth its two best scores in transformers, its (experts per token / groups) best in Megatron.
        if open_groups is None or chosen // open_groups != 2:
            raise UsageError(
                f"config.json has num_experts_per_tok={chosen} and topk_group={open_groups}: megatron-core ranks "
                "groups as transformers does where the first is twice the second"
            )
        settings |= {"moe_router_num_groups": groups, "moe_router_group_topk": open_groups}
    return settings


def rotary_settings(trunk: MegatronTrunk, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary embedding: (what the transformer's configuration takes, what GPTModel takes).

    Raises:
        UsageError: a scaling that Megatron does not have, or has with other constants.
    """
    rope = {key: value for key, value in config["rope_parameters"].items() if value is not None}
    kind, base = rope.get("rope_type", "default"), rope["rope_theta"]
    percent = rope.get("partial_rotary_factor", 1.0)
    if trunk.latent:
        model = {"position_embedding_type": "rope"}  # each layer has its own
        if kind == "default":
            return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}, model
        if kind == "yarn" and bool(rope.get("mscale")) == bool(rope.get("mscale_all_dim")):
            names = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow", "original_max_position_embeddings")
            own = {name: rope[name] for name in names if name in rope}
            return {"rope_type": "yarn", "rotary_base": base, "rotary_scaling_factor": rope["factor"], **own}, model
    else:
        model = {"position_embedding_type": "rope", "rotary_base": base, "rotary_percent": percent}
        if kind == "default":
            return {}, model
        if kind == "linear":
            return {}, model | {"seq_len_interpolation_factor": rope["factor"]}
        # Megatron has Llama 3's formula with these three constants in its source.
        constants = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if kind == "llama3" and all(rope.get(name) == value for name, value in constants.items()):
            return {}, model | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    raise UsageError(
        f"megatron-core's GPTModel has no rotary embedding like config.json's {rope}: train it with "
        "engine.strategy=torch"
    )
