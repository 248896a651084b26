"""Core attention for megatron-core's layer specs: packed documents, context parallelism, with or without a GPU.

Megatron-core's own needs Transformer Engine for context parallelism, and of a row's documents it knows only the layout
of variable-length kernels. Here the mask says what a position may see, and under context parallelism every rank gathers
the keys and values of the whole row (as Llama 3 was trained: The Llama 3 Herd of Models, section 3.3.2), so any mask is
as exact as on one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from forerun.engines.megatron.context import places


def hidden_positions(document_ids: Tensor, size: int = 1, rank: int = 0) -> Tensor:
    """What a position may not see, as megatron-core takes it: bool [B, 1, S / size, S], True where it may not.

    A position sees those before it in its document, and itself. Padding is one more document of its row.

    Args:
        document_ids: long [B, S] of whole rows.
        size, rank: of context parallelism. Rows of the result are this rank's positions, columns those of all ranks one
            after the other, as `DocumentAttention` gathers keys.
    """
    length = document_ids.shape[1]
    order = torch.cat([places(length, size, other) for other in range(size)]).to(document_ids.device)
    own = places(length, size, rank).to(document_ids.device)
    later = order[None, :] > own[:, None]
    other = document_ids[:, own, None] != document_ids[:, None, order]
    return (later | other).unsqueeze(1)


class _GatherSequence(torch.autograd.Function):
    """[S, ...] of every rank, one after the other; in backward every rank gets the sum of what all found for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


class DocumentAttention(torch.nn.Module):
    """A `core_attention` of megatron-core's specs over torch's scaled_dot_product_attention.

    Takes grouped queries, values of another width than keys (MLA), and the mask that `hidden_positions` makes.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,  # cp_comm_type, k_channels, v_channels: nothing here depends on them
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.group: dist.ProcessGroup = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *_: Any, **__: Any) -> Tensor:
        """query [Sq, B, H, dk], key [Sk, B, G, dk], value [Sk, B, G, dv] -> [Sq, B, H·dv]. Sk is a rank's own part."""
        if self.group.size() > 1:
            key, value = _GatherSequence.apply(key, self.group), _GatherSequence.apply(value, self.group)
        if (repeats := query.shape[2] // key.shape[2]) > 1:
            key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=~attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
        )
        return out.permute(2, 0, 1, 3).flatten(2)
