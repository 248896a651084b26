"""The engine's own copy of a model's weights, and the decoder layer of the Llama kind made of it.

That layer takes q, k, v from one product, gate and up from another. The fused weights are laid out so that every weight
of the model is a view into the copy. An update under Hugging Face names is then a copy into these views, and a digest
reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.errors import UsageError
from forerun.models.trunk import scale_logits
from forerun.rollout.native.attention import ROWS_ATTENTION
from forerun.rollout.native.cache import Step
from forerun.rollout.native.products import ProductTable, TunedLinear


class WeightCopies:
    """Copies of a model's weights, and which part of which copy stands for which weight.

    What several places of the model share, the copy shares, too.

    Args:
        model: whose weights.
        dtype: of the copies.
        device: of the copies.
        table: product table for the linear layers.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, device: torch.device, table: ProductTable) -> None:
        self.dtype = dtype
        self.device = device
        self.table = table
        self._model_dtype = model.dtype
        self._views: dict[tuple[int, torch.Size], Tensor] = {}
        self._linears: dict[tuple[int, ...], TunedLinear] = {}
        self._norms: dict[int, RMSNorm] = {}
        # What `copy.deepcopy` finds copied already, by the original's id.
        self._memo: dict[int, Any] = {}
        for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
            own = copy.deepcopy(config, self._memo)
            own._attn_implementation = ROWS_ATTENTION
            self._memo[id(config)] = own

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
        key = tuple(map(id, modules))
        if key not in self._linears:
            biases = [module.bias for module in modules]
            bias = None if any(b is None for b in biases) else self.copy(*biases)
            if bias is None and any(b is not None for b in biases):
                raise UsageError("the native engine cannot fuse projections of which only some have a bias")
            self._linears[key] = TunedLinear(self.copy(*(module.weight for module in modules)), bias, self.table)
        return self._linears[key]

    def norm(self, module: Any) -> RMSNorm:
        if id(module) not in self._norms:
            self._norms[id(module)] = RMSNorm(self.copy(module.weight), float(module.variance_epsilon))
        return self._norms[id(module)]

    def module(self, original: nn.Module) -> Any:
        """A module of transformers, copied weight by weight, with attention over rows and tuned linear layers.

        Weights that the model keeps in another dtype than its own (a router's in float32) stay in that.
        """
        for tensor in original.state_dict(keep_vars=True).values():
            if id(tensor) not in self._memo:
                view = self.view_of(tensor)
                if view is None:
                    dtype = self.dtype if tensor.dtype == self._model_dtype else tensor.dtype
                    view = self._views[tensor.data_ptr(), tensor.shape] = tensor.detach().to(
                        self.device, dtype, copy=True
                    )
                self._memo[id(tensor)] = nn.Parameter(view, False) if isinstance(tensor, nn.Parameter) else view
        made = copy.deepcopy(original, self._memo).to(device=self.device).eval().requires_grad_(False)
        for parent in list(made.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    bias = None if child.bias is None else child.bias.detach()
                    setattr(parent, name, TunedLinear(child.weight.detach(), bias, self.table))
        return made


class Head(TunedLinear):
    """An LM head, with what the model does to its logits."""

    def __init__(self, weight: Tensor, bias: Tensor | None, table: ProductTable, config: Any) -> None:
        super().__init__(weight, bias, table)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> logits [..., V]."""
        return scale_logits(super().forward(x), self.config)


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
        index: its name in the cache.
        copies: where the weights go.
    """

    def __init__(self, layer: Any, index: Hashable, copies: WeightCopies) -> None:
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
        # Into the products' own outputs: neither x, which the caller holds, nor new memory.
        x = self.out(attended).add_(x)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up)).add_(x)
