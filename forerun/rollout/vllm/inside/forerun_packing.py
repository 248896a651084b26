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

_ROWS = 1024  # of an identity at a time
_BASE = 128  # all whole numbers below it are exact in every format


class Unreadable(Exception):
    """What is packed in a way that is not known here, in one line."""


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
    if loaded.dim() == 3 and (experts := _packed_experts(layer)) is not None:
        if held.shape != loaded.shape:
            raise Unreadable(f"vLLM has padded {type(layer).__name__}.{name}, which cannot be read back")
        return _unpacked_experts(held, experts.isa)
    if held.shape == loaded.shape:
        return held.data
    if not hasattr(layer, "cpu_linear") or loaded.dim() != 2:
        raise Unreadable(f"vLLM has packed {type(layer).__name__}.{name}, which cannot be read back")
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
