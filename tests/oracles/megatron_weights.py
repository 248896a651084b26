"""A Llama-like model with an MTP block, parameter by parameter, as Megatron's GPTModel names and lays it out.

Every step is a permutation of entries, so the same function takes weights and gradients across.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import LlamaConfig

OUTER = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}
MTP = {
    "embed_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "final_norm.weight": "final_layernorm.weight",
}


def to_megatron(named: Mapping[str, Tensor], config: LlamaConfig, depths: int, concat_order: str) -> dict[str, Tensor]:
    """`named_parameters()` of a forerun carrier (or tensors under their names) under Megatron's names.

    Raises:
        KeyError: a parameter that Megatron needs is missing.
        AssertionError: a parameter is left over.
    """
    left = dict(named)
    found = {theirs: left.pop(ours) for ours, theirs in OUTER.items() if ours in left or ours != "lm_head.weight"}

    def layer(ours: str, theirs: str) -> None:
        for own_name, name in LAYER.items():
            found[theirs + name] = left.pop(ours + own_name)
        # Query, key and value rows are interleaved by group of query heads that share a key head.
        groups, heads = config.num_key_value_heads, config.num_attention_heads
        q, k, v = (left.pop(f"{ours}self_attn.{x}_proj.weight") for x in "qkv")
        size = q.shape[0] // heads
        parts = [
            q.view(groups, heads // groups * size, -1),
            k.view(groups, size, -1),
            v.view(groups, size, -1),
        ]
        found[theirs + "self_attention.linear_qkv.weight"] = torch.cat(parts, dim=1).flatten(0, 1)
        gate, up = (left.pop(f"{ours}mlp.{x}_proj.weight") for x in ("gate", "up"))
        found[theirs + "mlp.linear_fc1.weight"] = torch.cat([gate, up])

    for n in range(config.num_hidden_layers):
        layer(f"model.layers.{n}.", f"decoder.layers.{n}.")
    for n in range(depths):
        ours, theirs = f"mtp.layers.{n}.", f"mtp.layers.{n}."
        for own_name, name in MTP.items():
            found[theirs + name] = left.pop(ours + own_name)
        projection = left.pop(ours + "proj.weight")
        if concat_order == "hidden_embed":  # Megatron's input is [embedding, hidden]
            projection = torch.cat(projection.chunk(2, dim=1)[::-1], dim=1)
        found[theirs + "eh_proj.weight"] = projection
        layer(f"{ours}decoder.", f"{theirs}transformer_layer.")
    assert not left, f"no place in Megatron's model for {sorted(left)}"
    return found
