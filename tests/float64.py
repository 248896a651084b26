"""Tiny models that compute in float64 throughout."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def with_float64_norms(model: PreTrainedModel) -> None:
    """Transformers' RMS norms compute in float32 whatever the weights' dtype is. Those with a gate are left so."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if name.endswith("norm") and "Gated" not in type(child).__name__:
                setattr(module, name, nn.RMSNorm(child.weight.shape[0], eps=1e-6))
