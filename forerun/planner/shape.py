"""A model as its config.json gives it: each layer's weights, cache and state, and what its backward pass keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from forerun.checkpoint.files import shown, where_from
from forerun.errors import UsageError
from forerun.planner.hardware import Precision

# Kernels that a step launches per part of a layer, as fused as vLLM and SGLang have them: norms; projections, rotary
# embedding, cache write, attention; the same with latent compression; a gated delta net; gated MLP; router, sorting,
# grouped products, combination and shared expert of a mixture of experts.
_NORMS, _ATTENTION, _LATENT, _DELTA_NET, _MLP, _EXPERTS = 2, 7, 13, 16, 3, 12
# What a layer's parts add up to.
_SUMMED = ("kernels", "weights", "normed", "saved", "working")
_LARGEST = 1 << 40
# Names that families have for the number of MTP layers (forerun/families, which this module must not import: torch).
_DEPTH_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer, in values (not bytes).

    Attributes:
        weights: read by every step whatever it holds.
        experts, experts_per_token, expert_weights: routed experts, how many a token uses, weights of one.
        cached: values that the cache holds per token and that every step reads.
        split_cache: ways in which tensor parallelism can divide the cache.
        window: tokens that attention looks back at most; None is all.
        state: values of a recurrent state per row.
        attention_flops: operations per (token, token it attends to), over the cache as it is.
        expanded_flops: the same with every head's keys and values made, as training does it (latent attention decodes
            without making them).
        state_flops: operations of the recurrence per token.
        kernels: kernels launched.
        normed: values of a token that go through the layer's norms.
        saved: values of a token that the backward pass needs besides those, as transformers' modules keep them
            (tests/planner/test_training_memory.py; of a recurrent layer an estimate for fused kernels).
        saved_packed: how many more where a row holds several documents: keys and values repeated for every query head.
        working: values of a token that exist at once, besides, while the backward pass is in the layer.
        heads: of attention, each with a float32 per token.
        keys_values: values of a token's keys and values as attention takes them.
    """

    weights: int
    experts: int = 0
    experts_per_token: int = 0
    expert_weights: int = 0
    cached: int = 0
    split_cache: int = 1
    window: int | None = None
    state: int = 0
    attention_flops: int = 0
    expanded_flops: int = 0
    state_flops: int = 0
    kernels: int = 0
    normed: int = 0
    saved: int = 0
    saved_packed: int = 0
    working: int = 0
    heads: int = 0
    keys_values: int = 0

    @property
    def parameters(self) -> int:
        """Weights, all experts included."""
        return self.weights + self.experts * self.expert_weights

    @property
    def active(self) -> int:
        """Weights that one token multiplies with."""
        return self.weights + self.experts_per_token * self.expert_weights


@dataclass(frozen=True)
class ModelShape:
    """A trunk, and the MTP layer that drafts for it.

    Attributes:
        name: for people.
        layers: the trunk's.
        drafter: the MTP layer with its projection; the LM head comes on top of it.
        head: weights of the LM head.
        precision: of the layers' weights; the LM head stays in bfloat16 under fp8.
        hidden: size of the hidden state.
        tied: whether the LM head's weights are the embedding's.
        depths: MTP layers that the config declares.
    """

    name: str
    layers: tuple[LayerShape, ...]
    drafter: LayerShape
    head: int
    precision: Precision = field(default="bfloat16")
    hidden: int = 0
    tied: bool = False
    depths: int = 0

    @property
    def vocabulary(self) -> int:
        """Tokens."""
        return self.head // self.hidden

    @property
    def parameters(self) -> int:
        """Weights of layers and LM head; embeddings are looked up, not read."""
        return self.head + sum(layer.parameters for layer in self.layers)

    @property
    def trunk(self) -> int:
        """Weights that exist: `parameters`, and an embedding that is not the LM head's. Norms and biases, of which
        there are few, are left out.
        """
        return self.parameters + (0 if self.tied else self.head)

    @property
    def active(self) -> int:
        """Weights that one token multiplies with."""
        return self.head + sum(layer.active for layer in self.layers)


def load_shape(model: str) -> ModelShape:
    """The shape of a named model, of a config.json, or of the directory that holds one.

    Raises:
        UsageError: none of these, or a config that lacks a size.
    """
    found = find_config(model)
    return shape_of(found.config, found.name)


@dataclass(frozen=True)
class FoundConfig:
    """What config.json says, under a name for people; `directory` is None for a model that is known by its name."""

    config: dict[str, Any]
    name: str
    directory: Path | None = None


def find_config(model: str) -> FoundConfig:
    """The config.json that names a model, or that a directory holds.

    Raises:
        UsageError: there is none, or it is no JSON object.
    """
    shipped: dict[str, dict[str, Any]] = json.loads(
        resources.files("forerun.planner").joinpath("models.json").read_text("utf-8")
    )
    if model.lower() in shipped:
        return FoundConfig(shipped[model.lower()], model.lower())
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not path.is_file():
        raise UsageError(
            f"{shown(model)} is neither a directory with a config.json nor a known model: {where_from(model)}, or one "
            f"of {', '.join(shipped)}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(f"{path} cannot be read as JSON: give a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no JSON object: give a Hugging Face config.json")
    return FoundConfig(config, Path(model).name, path.parent)


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a Hugging Face config.json (as a dictionary) describes.

    Raises:
        UsageError: a size is missing or not a positive number; the line names it.
    """
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
    count = _size(text, "num_hidden_layers", name)
    if count > 10_000:
        raise UsageError(f"{name}: num_hidden_layers={count} is no number of layers")
    hidden, vocab = _size(text, "hidden_size", name), _size(text, "vocab_size", name)
    layers = tuple(_layer(text, i, name) for i in range(count))
    # The block's layer is a sibling of the trunk's last that attends.
    sibling = next((layer for layer in reversed(layers) if layer.cached), layers[-1])
    drafter = LayerShape(
        **{**sibling.__dict__, "weights": sibling.weights + 2 * hidden * hidden, "kernels": sibling.kernels + 4}
    )
    quantised = config.get("quantization_config") or text.get("quantization_config") or {}
    if not isinstance(quantised, Mapping):
        raise UsageError(f"{name}: quantization_config is {quantised!r} in its config.json and must be an object")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
    precision: Precision = "fp8" if "fp8" in str(quantised.get("quant_method", "")) else "bfloat16"
    if precision != "fp8" and dtype == "float32":
        precision = "float32"
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    depths = next((_size(text, key, name, absent=0) for key in _DEPTH_KEYS if text.get(key)), 0)
    return ModelShape(name, layers, drafter, hidden * vocab, precision, hidden, tied, depths)


def shown_weights(number: int) -> str:
    """A number of weights for people: 7.00 B, 671 B, 135 M, 1.60 M."""
    unit, name = (1e9, "B") if number >= 1e9 else (1e6, "M")
    return f"{number / unit:#.3g}".rstrip(".") + f" {name}"


def _layer(text: Mapping[str, Any], index: int, name: str) -> LayerShape:
    types = _list(text, "layer_types", name)
    kind = types[index] if index < len(types) else _kind_by_interval(text, index, name)
    parts = [_delta_net(text, name) if kind == "linear_attention" else _attention(text, kind, name)]
    parts.append(_experts(text, name) if _has_experts(text, index, name) else _mlp(text, name))
    merged: dict[str, Any] = {"kernels": _NORMS, "normed": 2 * _size(text, "hidden_size", name)}
    for part in parts:
        for key, value in part.items():
            merged[key] = merged.get(key, 0) + value if key in _SUMMED else value
    return LayerShape(**merged)


def _kind_by_interval(text: Mapping[str, Any], index: int, name: str) -> str:
    interval = _size(text, "full_attention_interval", name, absent=1)
    return "linear_attention" if (index + 1) % interval else "full_attention"


def _attention(text: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    hidden, heads = _size(text, "hidden_size", name), _size(text, "num_attention_heads", name)
    if text.get("kv_lora_rank"):
        rank, rope = _size(text, "kv_lora_rank", name), _size(text, "qk_rope_head_dim", name)
        nope, value = _size(text, "qk_nope_head_dim", name), _size(text, "v_head_dim", name)
        q_rank = _size(text, "q_lora_rank", name, absent=0)
        query = heads * (nope + rope)
        weights = hidden * q_rank + q_rank * query if q_rank else hidden * query
        weights += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        # Every rank of tensor parallelism reads the whole latent cache.
        flops = 2 * heads * (rank + rope) + 2 * heads * rank
        return {
            "weights": weights,
            "cached": rank + rope,
            "attention_flops": flops,
            "expanded_flops": 2 * heads * (nope + rope + value),
            "kernels": _LATENT,
            "normed": q_rank + rank,
            "saved": q_rank + rope + heads * (nope + value + 2 * (nope + rope) + value),
            "heads": heads,
            "keys_values": heads * (nope + rope + value),
        }
    kv_heads = _size(text, "num_key_value_heads", name, absent=heads)
    size = _size(text, "head_dim", name, absent=hidden // heads)
    gated = text.get("attn_output_gate", "linear_num_value_heads" in text)
    weights = hidden * size * (heads * (3 if gated else 2) + 2 * kv_heads)
    query, keys = heads * size, kv_heads * size
    normed = query + keys if gated or text.get("use_qk_norm") else 0  # of each head
    window = (_size(text, "sliding_window", name, absent=0) or None) if kind == "sliding_attention" else None
    return {
        "weights": weights,
        "cached": 2 * kv_heads * size,
        "split_cache": kv_heads,
        "window": window,
        "attention_flops": 4 * query,
        "expanded_flops": 4 * query,
        "kernels": _ATTENTION,
        "normed": normed,
        # What rotary embedding takes is not kept: those of the norms' results are.
        "saved": 2 * query + 2 * keys - normed + (4 * query if gated else 0),
        "saved_packed": 2 * (query - keys),
        "heads": heads,
        "keys_values": 2 * keys,
    }


def _delta_net(text: Mapping[str, Any], name: str) -> dict[str, Any]:
    hidden = _size(text, "hidden_size", name)
    key_size, value_size = _size(text, "linear_key_head_dim", name), _size(text, "linear_value_head_dim", name)
    heads = _size(text, "linear_num_value_heads", name)
    keys, values = key_size * _size(text, "linear_num_key_heads", name), value_size * heads
    weights = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
    state = heads * key_size * value_size
    return {
        "weights": weights,
        "state": state,
        "state_flops": 6 * state,
        "kernels": _DELTA_NET,
        "saved": 3 * (2 * keys + values) + 5 * values,
    }


def _mlp(text: Mapping[str, Any], name: str) -> dict[str, Any]:
    width = _size(text, "intermediate_size", name)
    return {
        "weights": 3 * _size(text, "hidden_size", name) * width,
        "kernels": _MLP,
        "saved": 4 * width,
        "working": 2 * width,
    }


def _number_of_experts(text: Mapping[str, Any], name: str) -> int:
    for key in ("n_routed_experts", "num_experts", "num_local_experts"):
        if experts := _size(text, key, name, absent=0):
            return experts
    return 0


def _has_experts(text: Mapping[str, Any], index: int, name: str) -> bool:
    if not _number_of_experts(text, name) or index < _size(text, "first_k_dense_replace", name, absent=0):
        return False
    if index in _list(text, "mlp_only_layers", name):
        return False
    return (index + 1) % _size(text, "decoder_sparse_step", name, absent=1) == 0


def _experts(text: Mapping[str, Any], name: str) -> dict[str, Any]:
    hidden = _size(text, "hidden_size", name)
    width = _size(text, "moe_intermediate_size" if text.get("moe_intermediate_size") else "intermediate_size", name)
    shared = _size(text, "shared_expert_intermediate_size", name, absent=0)
    shared = shared or width * _size(text, "n_shared_experts", name, absent=0)
    experts, used = _number_of_experts(text, name), _size(text, "num_experts_per_tok", name)
    if used > experts:
        raise UsageError(f"{name}: num_experts_per_tok={used} in its config.json is more than its {experts} experts")
    return {
        "weights": hidden * experts + 3 * hidden * shared,
        "experts": experts,
        "experts_per_token": used,
        "expert_weights": 3 * hidden * width,
        "kernels": _EXPERTS,
        "saved": used * (2 * hidden + 4 * width) + 4 * shared + experts,
        "working": used * (hidden + 2 * width),
    }


def _size(text: Mapping[str, Any], key: str, name: str, absent: int | None = None) -> int:
    """A size; `absent` stands for one that is missing, null or 0, where it may be."""
    value = text.get(key)
    if absent is not None and (value is None or (value == 0 and not isinstance(value, bool))):
        return absent
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}: {key} is {value!r} in its config.json and must be a positive integer")
    if value > _LARGEST:
        raise UsageError(f"{name}: {key} is above {_LARGEST} in its config.json, which no model has: correct it")
    return value


def _list(text: Mapping[str, Any], key: str, name: str) -> list[Any]:
    value = text.get(key) or []
    if not isinstance(value, list):
        raise UsageError(f"{name}: {key} is {value!r} in its config.json and must be a list")
    return value
