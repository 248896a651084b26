"""Where vLLM's CPU kernels keep weights in a form of their own: how to renew that form, and how to read it.

Linear layers keep a packed copy behind `cpu_linear` and an empty `weight`; embeddings and LM heads keep both; experts
are packed in place. Read in vLLM 0.32: model_executor/layers/{utils,vocab_parallel_embedding}.py,
model_executor/layers/fused_moe/{unquantized_fused_moe_method,experts/cpu_moe}.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.utils import replace_parameter

_ROWS = 1024  # of an identity at a time
# Of the kernels for experts, these take them as they are loaded.
_AS_LOADED = {UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON, UnquantizedMoeBackend.CPU}
_BASE = 128  # all whole numbers below it are exact in every format


class Unreadable(Exception):
    """What is packed in a way that is not known here, in one line."""


def unpad(model: nn.Module) -> None:
    """Before weights go into a model through vLLM's layerwise reload, which fails at experts that vLLM has padded: give
    them the shapes that are loaded. `renew` pads them again."""
    layer: Any
    for layer in model.modules():
        if _packed_experts(layer) is None:
            continue
        for name, loaded in get_layerwise_info(layer).restore_metadata[0].items():
            if layer._parameters[name].shape != loaded.shape:
                replace_parameter(layer, name, torch.empty(loaded.shape, dtype=loaded.dtype))


def renew(model: nn.Module) -> None:
    """After all weights of a model went in through vLLM's layerwise reload: pack what that leaves out."""
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            # An LM head that is tied to the embedding: no loader has reached it.
            layer.quant_method.process_weights_after_loading(layer)
        if (experts := _packed_experts(layer)) is not None:
            # vLLM packs them at the first load alone, and has now put plain weights in the packed ones' place.
            experts.process_weights_after_loading(layer)


def plain(layer: Any, name: str, loaded: Tensor) -> Tensor:
    """A parameter in the form in which it was loaded.

    Args:
        loaded: of that shape and dtype.
    """
    held: Tensor = layer._parameters[name]
    what = f"{type(layer).__name__}.{name}"
    if loaded.dim() == 3 and (experts := _packed_experts(layer)) is not None:
        return _unpadded(_unpacked_experts(held, experts.isa), loaded.shape)
    backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
    if backend is not None and backend not in _AS_LOADED:
        raise Unreadable(f"vLLM holds {what} in the order of its {backend.value} kernels, which cannot be read back")
    if held.shape == loaded.shape:
        if held.dtype != loaded.dtype:
            raise Unreadable(f"vLLM holds {what} as {held.dtype}, which cannot be read back")
        return held.data
    if not hasattr(layer, "cpu_linear") or loaded.dim() != 2:
        raise Unreadable(f"vLLM has packed {what}, which cannot be read back")
    # Each output is a sum of one weight and zeros: exact in any floating format.
    identity = torch.eye(loaded.shape[1], dtype=loaded.dtype)
    return torch.cat([layer.cpu_linear(rows, held, None) for rows in identity.split(_ROWS)]).t().contiguous()


def _packed_experts(layer: nn.Module) -> CPUUnquantizedExperts | None:
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return experts if isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch else None


def _unpacked_experts(packed: Tensor, isa: str) -> Tensor:
    """Undo the packing, which moves every expert's elements in the same way: numbers are packed to see how."""
    number = torch.arange(packed[0].numel())
    place = torch.zeros_like(number)
    scale = 1
    while scale < len(number):
        digit = (number // scale % _BASE).to(packed.dtype).view_as(packed[:1])
        place += cpu_prepack_moe_weight(digit, isa).flatten().long() * scale
        scale *= _BASE
    unpacked = torch.empty_like(packed)
    for expert, own in zip(unpacked, packed, strict=True):
        expert.view(-1)[place] = own.flatten()
    return unpacked


def _unpadded(experts: Tensor, shape: torch.Size) -> Tensor:
    """Gate and up projections are padded at the end of their rows each, down projections in their columns."""
    if experts.shape[1] == shape[1]:
        return experts[..., : shape[2]].contiguous()
    rows = shape[1] // 2
    return torch.cat([half[:, :rows] for half in experts.chunk(2, dim=1)], dim=1)
