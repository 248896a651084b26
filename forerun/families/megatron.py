"""Megatron-Core's names for a GPTModel's weights with MTP, and how it lays them out: the mapping table, both ways.

Read in megatron-core 0.16 (`models/gpt/gpt_model.py`, `transformer/multi_token_prediction.py`, the local layer spec;
the Transformer Engine spec names the norms differently). Entries only move numbers, so weights, gradients and optimizer
moments cross in the same way. Dense Llama-like layers, with or without QKV biases and q/k norms; multi-head latent
attention; mixtures of experts with or without shared ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forerun.errors import UsageError
from forerun.families import text_section, trunk_layers
from forerun.families.megatron_trunks import TRUNKS
from forerun.families.record import FamilyRecord

How = Literal["same", "rows", "qkv", "halves"]

# Tells Megatron's names from others.
EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
MTP = "mtp."  # what the names of all of its layers begin with
# (Megatron's name, Hugging Face's, how) inside a decoder layer.
_Part = tuple[str, tuple[str, ...], "How"]
_NORMS: tuple[_Part, ...] = (
    ("input_layernorm.weight", ("input_layernorm.weight",), "same"),
    ("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "same"),
)
_GROUPED: tuple[_Part, ...] = (
    ("self_attention.linear_qkv.weight", tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), "qkv"),
    ("self_attention.linear_qkv.bias", tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), "qkv"),
    ("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "same"),
    ("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "same"),
    ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "same"),
)
_LATENT: tuple[_Part, ...] = (
    ("self_attention.linear_q_proj.weight", ("self_attn.q_proj.weight",), "same"),
    ("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",), "same"),
    ("self_attention.q_layernorm.weight", ("self_attn.q_a_layernorm.weight",), "same"),
    ("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",), "same"),
    ("self_attention.linear_kv_down_proj.weight", ("self_attn.kv_a_proj_with_mqa.weight",), "same"),
    ("self_attention.kv_layernorm.weight", ("self_attn.kv_a_layernorm.weight",), "same"),
    ("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight",), "same"),
    ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "same"),
)


def _gated(theirs: str, ours: str) -> tuple[_Part, ...]:
    return (
        (f"{theirs}.linear_fc1.weight", (f"{ours}.gate_proj.weight", f"{ours}.up_proj.weight"), "rows"),
        (f"{theirs}.linear_fc2.weight", (f"{ours}.down_proj.weight",), "same"),
    )


_ROUTER: tuple[_Part, ...] = (
    ("mlp.router.weight", ("mlp.gate.weight",), "same"),
    ("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",), "same"),
)
# Not every model has these: biases, norms of queries and keys, one of two ways to queries, shared experts, an LM head
# that is not tied.
_MAY_LACK = (
    *(".bias", ".q_layernorm.weight", ".k_layernorm.weight", HEAD),
    *(f".linear_q_{x}proj.weight" for x in ("", "down_", "up_")),
    *(f".shared_experts.linear_fc{n}.weight" for n in (1, 2)),
)


@dataclass(frozen=True)
class TrunkShape:
    """The numbers of a trunk that say which tensors it has and how they divide.

    Attributes:
        layers: of the trunk.
        heads, groups: query heads and key-value heads.
        latent: multi-head latent attention.
        experts: routed experts of a layer; 0 is none.
        dense_layers: how many layers come before the first with experts.
    """

    layers: int
    heads: int
    groups: int
    latent: bool = False
    experts: int = 0
    dense_layers: int = 0

    def expert_layer(self, n: int) -> bool:
        """Whether layer n, from 0, has experts; the MTP layers come after the trunk's."""
        return self.experts > 0 and n >= self.dense_layers


def trunk_shape(family: FamilyRecord, config: Mapping[str, Any]) -> TrunkShape:
    """By config.json. A trunk that is none of `TRUNKS` is taken for a dense Llama-like one.

    Raises:
        UsageError: a number is missing, or none that can be.
    """
    section = text_section(config)

    def number(key: str, default: int | None = None, least: int = 1, below: int = 2**31) -> int:
        value = section.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < below:
            raise UsageError(f"config.json has {key}={value!r}: give the model's")
        return value

    model_type = family.trunk_model_type or section.get("model_type")
    trunk = next((trunk for trunk in TRUNKS if model_type in trunk.model_types), TRUNKS[0])
    heads = number("num_attention_heads")
    return TrunkShape(
        layers=trunk_layers(config),
        heads=heads,
        groups=number("num_key_value_heads", heads),
        latent=trunk.latent,
        experts=number("n_routed_experts", below=2**16) if trunk.experts else 0,
        dense_layers=number("first_k_dense_replace", least=0) if trunk.experts else 0,
    )


@dataclass(frozen=True)
class Entry:
    """One tensor of Megatron's and what it is made of.

    Attributes:
        megatron: its name.
        hugging_face: the names of its parts.
        how: "same"; "rows", one under the other; "qkv", interleaved by group of query heads that share a key head, as
            [queries of the group, its key, its value]; "halves", its two halves of columns the other way round.
        expert: the number of the expert in its layer, of all ranks; None for what is no routed expert's.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    how: How = "same"
    expert: int | None = None


def entries(family: FamilyRecord, shape: TrunkShape, depth: int) -> Iterator[Entry]:
    """The whole table for a trunk and `depth` MTP layers; tensors that a model may lack included.

    Raises:
        KeyError: the family's MTP layer has no such part.
    """

    def layer(n: int, theirs: str, ours: Callable[[str], str]) -> Iterator[Entry]:
        parts = _NORMS + (_LATENT if shape.latent else _GROUPED)
        if shape.expert_layer(n):
            parts += _ROUTER + _gated("mlp.shared_experts", "mlp.shared_experts")
        else:
            parts += _gated("mlp", "mlp")
        for name, names, how in parts:
            yield Entry(theirs + name, tuple(map(ours, names)), how)
        for e in range(shape.experts if shape.expert_layer(n) else 0):
            for name, names, how in _gated(f"mlp.experts.local_experts.{e}", f"mlp.experts.{e}"):
                yield Entry(theirs + name, tuple(map(ours, names)), how, e)

    yield Entry(EMBEDDING, ("model.embed_tokens.weight",))
    for n in range(shape.layers):
        yield from layer(n, f"decoder.layers.{n}.", f"model.layers.{n}.{{}}".format)
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",))
    yield Entry(HEAD, ("lm_head.weight",))
    # Megatron's projection reads [embedding, hidden].
    order: How = "same" if family.concat_order == "embed_hidden" else "halves"
    for k in range(depth):
        for name, part, how in (
            ("enorm", "embed_norm", "same"),
            ("hnorm", "hidden_norm", "same"),
            ("eh_proj", "proj", order),
            *((("final_layernorm", "final_norm", "same"),) if family.final_norm else ()),
        ):
            ours = family.tensor_name(k, f"{part}.weight", shape.layers)
            yield Entry(f"{MTP}layers.{k}.{name}.weight", (ours,), how)

        def of_block(part: str, k: int = k) -> str:
            return family.tensor_name(k, f"decoder.{part}", shape.layers)

        yield from layer(shape.layers + k, f"{MTP}layers.{k}.transformer_layer.", of_block)


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
            "it covers Llama-like layers, latent attention and experts as DeepSeek-V3 has them"
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
