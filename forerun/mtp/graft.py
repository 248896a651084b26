"""Join an auxiliary loss to a tensor's graph, so that whoever differentiates the main loss trains it too.

Megatron-LM does the same with `MTPLossAutoScaler`; here the scale belongs to the call, not to a class attribute, so
models, micro-batches and threads cannot disturb each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LossScale = float | Tensor | Callable[[], float | Tensor]


class _Graft(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, loss_scale: LossScale) -> Tensor:
        ctx.loss_scale = loss_scale
        ctx.like = (loss.dtype, loss.device)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = ctx.loss_scale() if callable(ctx.loss_scale) else ctx.loss_scale
        dtype, device = ctx.like
        return grad, torch.as_tensor(scale, dtype=dtype, device=device), None


def graft(carrier: Tensor, loss: Tensor, loss_scale: LossScale = 1.0) -> Tensor:
    """`carrier` unchanged; when a gradient reaches it, `loss` is differentiated as well, times `loss_scale`.

    Args:
        carrier: any tensor on the main loss's path, usually the trunk's hidden states [B, S, d].
        loss: 0-dim.
        loss_scale: what the trainer multiplies its own loss by before backward (1 / accumulation steps, a GradScaler's
            scale). A callable is asked at backward time, when such a scale is final.

    Raises:
        ValueError: if `loss` is not 0-dim.
    """
    if loss.dim() != 0:
        raise ValueError(f"graft takes a scalar loss, not one of shape {tuple(loss.shape)}")
    return _Graft.apply(carrier, loss, loss_scale)
