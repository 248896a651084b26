"""Core attention for megatron-core's layer specs: packed documents, context parallelism, with or without a GPU.

Megatron-core's own needs Transformer Engine for context parallelism, and of a row's documents it knows only the layout
of variable-length kernels. Here the mask says what a position may see, and under context parallelism every rank gathers
the keys and values of the whole row (`forerun.engines.shared_rows`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from forerun.engines.shared_rows import gather


class DocumentAttention(torch.nn.Module):
    """A `core_attention` of megatron-core's specs over torch's scaled_dot_product_attention.

    Takes grouped queries, values of another width than keys (MLA), and the mask of `MicroBatch.hidden_positions`.
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
            key, value = gather(key, self.group), gather(value, self.group)
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
