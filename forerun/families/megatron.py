"""Megatron-Core's names for a GPTModel's weights with MTP, and how it lays them out: the mapping table, both ways.

Read in megatron-core 0.16 (`models/gpt/gpt_model.py`, `transformer/multi_token_prediction.py`, the local layer spec;
the Transformer Engine spec names the norms differently). Entries only move numbers, so weights, gradients and optimizer
moments cross in the same way. Dense Llama-like layers, with or without QKV biases and q/k norms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from forerun.errors import UsageError
from forerun.families.record import FamilyRecord

How = Literal["same", "rows", "qkv", "halves"]

# Tells Megatron's names from others.
EMBEDDING = "embedding.word_embeddings.weight"
# (Megatron's name, Hugging Face's, how) inside a decoder layer.
_LAYER: tuple[tuple[str, tuple[str, ...], How], ...] = (
    ("input_layernorm.weight", ("input_layernorm.weight",), "same"),
    ("self_attention.linear_qkv.weight", tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), "qkv"),
    ("self_attention.linear_qkv.bias", tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), "qkv"),
    ("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "same"),
    ("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "same"),
    ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "same"),
    ("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "same"),
    ("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "rows"),
    ("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "same"),
)
# Not every model has these: biases, norms of queries and keys, an LM head that is not tied.
_MAY_LACK = (".bias", ".q_layernorm.weight", ".k_layernorm.weight", "output_layer.weight")


@dataclass(frozen=True)
class Entry:
    """One tensor of Megatron's and what it is made of.

    Attributes:
        megatron: its name.
        hugging_face: the names of its parts.
        how: "same"; "rows", one under the other; "qkv", interleaved by group of query heads that share a key head, as
            [queries of the group, its key, its value]; "halves", its two halves of columns the other way round.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    how: How = "same"


def entries(family: FamilyRecord, layers: int, depth: int) -> Iterator[Entry]:
    """The whole table for a trunk of `layers` layers and `depth` MTP layers; tensors that a model may lack included."""

    def layer(theirs: str, ours: Callable[[str], str]) -> Iterator[Entry]:
        for name, parts, how in _LAYER:
            yield Entry(theirs + name, tuple(map(ours, parts)), how)

    yield Entry(EMBEDDING, ("model.embed_tokens.weight",))
    for n in range(layers):
        yield from layer(f"decoder.layers.{n}.", f"model.layers.{n}.{{}}".format)
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",))
    yield Entry("output_layer.weight", ("lm_head.weight",))
    # Megatron's projection reads [embedding, hidden].
    order: How = "same" if family.concat_order == "embed_hidden" else "halves"
    for k in range(depth):
        for name, part, how in (
            ("enorm", "embed_norm", "same"),
            ("hnorm", "hidden_norm", "same"),
            ("eh_proj", "proj", order),
            *((("final_layernorm", "final_norm", "same"),) if family.final_norm else ()),
        ):
            ours = family.tensor_name(k, f"{part}.weight", layers)
            yield Entry(f"mtp.layers.{k}.{name}.weight", (ours,), how)

        def of_block(part: str, k: int = k) -> str:
            return family.tensor_name(k, f"decoder.{part}", layers)

        yield from layer(f"mtp.layers.{k}.transformer_layer.", of_block)


def refuse_megatron_names(path: str | Path, tensor_names: Collection[str]) -> None:
    """Say what a checkpoint directory is that holds Megatron's names where Hugging Face's are looked for.

    Raises:
        UsageError: it does.
    """
    if EMBEDDING in tensor_names:
        raise UsageError(
            f"{path} holds Megatron-Core's names: bring it back first (forerun convert {path} OUT --to hf)"
        )


def needed(table: Sequence[Entry], names: Collection[str], side: Literal["megatron", "hugging_face"]) -> list[Entry]:
    """The entries for which there are tensors.

    Args:
        names: all tensor names of a checkpoint.
        side: whose names they are.

    Raises:
        UsageError: a tensor has no counterpart, or one that every model has is missing.
    """
    found, left = [], set(names)
    for entry in table:
        parts = {entry.megatron} if side == "megatron" else set(entry.hugging_face)
        if parts <= left:
            found.append(entry)
        elif missing := sorted(parts - left) if parts & left else []:
            raise UsageError(f"{missing[0]} is missing beside {min(parts & left)}: restore it")
        left -= parts
    if left:
        other = {"megatron": "Hugging Face", "hugging_face": "Megatron"}[side]
        raise UsageError(
            f"{len(left)} tensors have no {other} name in the table, first {min(left)}: "
            "it covers dense Llama-like layers"
        )
    lacking = [entry for entry in table if entry not in found and not entry.megatron.endswith(_MAY_LACK)]
    if lacking:
        name = lacking[0].megatron if side == "megatron" else lacking[0].hugging_face[0]
        raise UsageError(f"{name} is missing: restore it, or give config.json the numbers of layers that are there")
    return found


def join(entry: Entry, parts: Sequence[Tensor], groups: int) -> Tensor:
    """Megatron's tensor from its parts.

    Args:
        parts: in the order of `entry.hugging_face`.
        groups: key-value heads.
    """
    if entry.how == "same":
        return parts[0]
    if entry.how == "halves":
        return torch.cat(parts[0].chunk(2, dim=1)[::-1], dim=1)
    if entry.how == "qkv":
        parts = [part.unflatten(0, (groups, -1)) for part in parts]
        return torch.cat(list(parts), dim=1).flatten(0, 1)
    return torch.cat(list(parts))


def split(entry: Entry, tensor: Tensor, heads: int, groups: int) -> list[Tensor]:
    """What `join` joined."""
    if entry.how == "same":
        return [tensor]
    if entry.how == "halves":
        return [torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)]
    if entry.how == "qkv":
        by_group = tensor.unflatten(0, (groups, -1))
        size = by_group.shape[1] // (heads // groups + 2)
        return [part.flatten(0, 1) for part in by_group.split([heads // groups * size, size, size], dim=1)]
    return list(tensor.chunk(2))
