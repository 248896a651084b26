"""What forerun has, as Megatron takes it: rows of tokens, and the weights of a Llama-like model with an MTP block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # importing it takes seconds, which processes that need only the rows are spared
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


def rows_for_megatron(input_ids: Tensor, loss_mask: Tensor, documents: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Tokens and mask [B, S] with labels and mask moved to the position that predicts them, as Megatron's data has it.

    Nothing of forerun is asked, so that it cannot be wrong in the same way on both sides.

    Args:
        input_ids, loss_mask: [B, S].
        documents: (start, end) of the real tokens of each document in the rows.
    """
    labels, mask = torch.zeros_like(input_ids), torch.zeros(input_ids.shape)
    for start, end in documents:
        labels[:, start : end - 1] = input_ids[:, start + 1 : end]
        mask[:, start : end - 1] = loss_mask[:, start + 1 : end].float()
    return {"input_ids": input_ids, "labels": labels * mask.long(), "loss_mask": mask}


def weights_for_megatron(
    named: Mapping[str, Tensor], config: LlamaConfig, depths: int, concat_order: str
) -> dict[str, Tensor]:
    """`named_parameters()` of a forerun carrier (or their gradients) as Megatron's GPTModel names and lays them out.

    Entries are only moved, so the same function takes weights and gradients across.

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
