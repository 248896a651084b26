"""A decoder layer of the Llama kind in the engine's own copy: q, k, v in one product, gate and up in another.

The fused weights are laid out so that every weight of the model is a view into the copy. An update under Hugging Face
names is then a copy into these views, and a digest reads them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.errors import UsageError
from forerun.rollout.native.cache import Step
from forerun.rollout.native.products import ProductTable, TunedLinear


class WeightCopies:
    """Copies of a model's weights, and which part of which copy stands for which weight.

    Args:
        dtype: of the copies.
        device: of the copies.
        table: product table for the linear layers.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, table: ProductTable) -> None:
        self.dtype = dtype
        self.device = device
        self.table = table
        self._views: dict[tuple[int, torch.Size], Tensor] = {}

    def copy(self, *parts: Tensor) -> Tensor:
        """One new tensor that holds the parts, concatenated along the first dimension."""
        rows = sum(part.shape[0] for part in parts)
        made = torch.empty((rows, *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
        at = 0
        for part in parts:
            view = made[at : at + part.shape[0]]
            view.copy_(part.detach())
            self._views[part.data_ptr(), part.shape] = view
            at += part.shape[0]
        return made

    def view_of(self, weight: Tensor) -> Tensor | None:
        """The part of a copy that stands for a weight of the model."""
        return self._views.get((weight.data_ptr(), weight.shape))

    def linear(self, *modules: Any) -> TunedLinear:
        """One layer for several linear layers over the same input, outputs concatenated."""
        biases = [module.bias for module in modules]
        bias = None if any(b is None for b in biases) else self.copy(*biases)
        if bias is None and any(b is not None for b in biases):
            raise UsageError("the native engine cannot fuse projections of which only some have a bias")
        return TunedLinear(self.copy(*(module.weight for module in modules)), bias, self.table)

    def norm(self, module: Any) -> RMSNorm:
        return RMSNorm(self.copy(module.weight), float(module.variance_epsilon))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class FusedDecoderLayer(nn.Module):
    """What a transformers decoder layer with `self_attn`, `mlp` and two norms computes, over a `Step`.

    Args:
        layer: the transformers layer to copy.
        index: which layer of the cache is its own.
        copies: where the weights go.
    """

    def __init__(self, layer: Any, index: int, copies: WeightCopies) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.head_dim = int(attention.head_dim)
        self.scale = float(attention.scaling)
        self.heads = attention.q_proj.weight.shape[0] // self.head_dim
        self.kv_heads = attention.k_proj.weight.shape[0] // self.head_dim
        self.qkv = copies.linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.q_norm = copies.norm(attention.q_norm) if getattr(attention, "q_norm", None) is not None else None
        self.k_norm = copies.norm(attention.k_norm) if getattr(attention, "k_norm", None) is not None else None
        self.out = copies.linear(attention.o_proj)
        self.gate_up = copies.linear(mlp.gate_proj, mlp.up_proj)
        self.down = copies.linear(mlp.down_proj)
        self.activation = mlp.act_fn
        self.attention_norm = copies.norm(layer.input_layernorm)
        self.mlp_norm = copies.norm(layer.post_attention_layernorm)

    def forward(self, x: Tensor, *, step: Step) -> Tensor:
        """x [R, T, d] -> [R, T, d]."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(self.attention_norm(x)).view(*x.shape[:2], heads + 2 * kv_heads, self.head_dim)
        qk, v = qkv[:, :, : heads + kv_heads], qkv[:, :, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat([self.q_norm(qk[:, :, :heads]), self.k_norm(qk[:, :, heads:])], dim=2)
        # Rotary embedding of queries and keys at once: x * cos + rotate_half(x) * sin, the sign being in sin.
        qk = torch.addcmul(qk * step.cos, qk.roll(self.head_dim // 2, -1), step.sin)
        attended = step.attend(self.index, qk[:, :, :heads], qk[:, :, heads:], v, self.scale)
        x = x + self.out(attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(self.activation(gate) * up)
