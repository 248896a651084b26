"""Checkpoints for a serving engine: tiny models of the families that vLLM drafts for on a CPU.

Two of each. In `mixed` everything is random, trunk, norms and block, but the projection is fitted to the trunk and its
LM head leans to one next token: so the engine accepts many drafts and rejects many, and which is up to every part of
the formula. In `perfect` every layer is silent, the next token is a function of the last one alone, and the block reads
the embedding alone: every draft is right at every depth.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import forerun
from forerun.families import GLM4_MOE, MIMO, QWEN3_5, QWEN3_NEXT, FamilyRecord
from forerun.models.carrier import MTPCarrier
from forerun.models.init import OUTPUT_PROJECTIONS, norm_scale, set_norm_scale
from forerun.models.trunk import base_model

VOCAB = 192

# vLLM's CPU kernels want head dimensions of 32 and more, its linear attention 128.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_HYBRID: dict[str, Any] = {
    "head_dim": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
# vLLM's linear attention runs in bfloat16 alone on a CPU.
DTYPES = {"qwen3_next": torch.bfloat16, "qwen3_5": torch.bfloat16}
TRUNKS: dict[str, tuple[FamilyRecord, str, dict[str, Any]]] = {
    "mimo": (MIMO, "Qwen2ForCausalLM", {}),
    "glm4_moe": (
        GLM4_MOE,
        "Glm4MoeForCausalLM",
        _EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 32},
    ),
    "qwen3_next": (
        QWEN3_NEXT,
        "Qwen3NextForCausalLM",
        _HYBRID | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32, "initializer_range": 0.12},
    ),
    "qwen3_5": (QWEN3_5, "Qwen3_5ForCausalLM", _HYBRID),
}


def trunk_of(name: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    _, class_name, settings = TRUNKS[name]
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**(_COMMON | settings | changes))).eval()


@torch.no_grad()
def mixed(name: str, *, noise: float = 3.0) -> MTPCarrier:
    """A model whose drafts are right about half the time."""
    trunk = trunk_of(name)
    generator = torch.Generator().manual_seed(1)
    successor(trunk)
    randomise_norms(trunk, generator)
    randomise_biases(trunk, generator)
    rows = [torch.randint(1, VOCAB, (16, 48), generator=generator) for _ in range(4)]
    model = forerun.attach(trunk, forerun.MTPConfig(enable=True), fit_to=rows, family=TRUNKS[name][0])
    std = trunk.config.initializer_range
    for part, parameter in model.mtp.named_parameters():
        if ".decoder." in part and parameter.dim() >= 2:  # whatever `attach` starts it as
            loud = noise if any(piece in OUTPUT_PROJECTIONS for piece in part.split(".")) else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std * loud)
    randomise_norms(model.mtp, generator)
    randomise_norms(model.mtp.layer(1).final_norm, generator)  # once more: it tells what the second depth is given
    randomise_biases(model.mtp, generator)
    return model


@torch.no_grad()
def perfect(name: str) -> MTPCarrier:
    """A model whose drafts are all right."""
    trunk = trunk_of(name)
    silence(base_model(trunk))
    successor(trunk)
    model = forerun.attach(trunk, forerun.MTPConfig(enable=True), family=TRUNKS[name][0])
    layer = model.mtp.layer(1)
    size = layer.proj.out_features
    start = size if layer.concat_order == "hidden_embed" else 0
    layer.proj.weight.zero_()
    layer.proj.weight[:, start : start + size] = torch.eye(size)
    return model


def successor(model: PreTrainedModel) -> None:
    """Make the LM head choose, for a hidden that points along token t's embedding, the token that follows t in a
    random cycle through all."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    rows = torch.nn.functional.normalize(torch.randn(embedding.weight.shape), dim=-1)
    cycle = torch.randperm(len(rows))
    embedding.weight.copy_(rows * len(rows[0]) ** 0.5)
    head.weight[cycle.roll(-1)] = rows[cycle]


def silence(module: torch.nn.Module) -> None:
    """Zero what every layer adds."""
    for name, parameter in module.named_parameters():
        if any(part in OUTPUT_PROJECTIONS for part in name.split(".")):
            parameter.zero_()


def randomise_norms(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Norm weights that differ from feature to feature and from norm to norm."""
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 1 and "Norm" in type(part).__name__:
            factors = torch.exp(torch.randn(weight.shape, generator=generator) * 0.4)
            if "Gated" in type(part).__name__:  # called with a gate, and never zero-centred
                weight.mul_(factors)
            else:
                set_norm_scale(part, norm_scale(part) * factors)


def randomise_biases(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Biases of projections, and those of routers, which are buffers in transformers; new models have zeros."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name.endswith((".bias", ".e_score_correction_bias")):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
