"""The attention of a transformers model whose rows are shared over ranks (`forerun.engines.shared_rows`).

Torch's own context parallelism has kernels for CUDA alone and takes no mask, so no packed rows. Here an attention
function of transformers' interface gathers keys and values of the whole row and calls scaled-dot-product attention with
the rank's rows of the mask: exact for any mask, and what is kept for the backward pass, attention's keys and values
aside, is a rank's share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from forerun.engines.shared_rows import gather
from forerun.errors import UsageError
from forerun.models.trunk import base_model

_numbers = itertools.count()


def _attend(
    group: dist.ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' interface: query, key, value [B, heads, S here, d]."""
    both = gather(torch.cat([key, value], dim=-1).movedim(2, 0), group).movedim(0, 2)
    key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
    return sdpa_attention_forward(module, query, key, value, mask, **more)


def gather_in_attention(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Have a model's attention gather keys and values over a group.

    Raises:
        UsageError: the trunk mixes tokens otherwise than by full attention behind transformers' attention interface.
    """
    config: Any = base_model(model).config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if getattr(config, "sliding_window", None) is not None:
        kinds.add("sliding_attention")
    name = f"forerun_context_parallel_{next(_numbers)}"
    check_attention_kinds(type(model).__name__, kinds)
    if model._supports_sdpa:
        AttentionInterface.register(name, partial(_attend, group))
        model.set_attn_implementation(name)
    if config._attn_implementation != name:
        raise _uncovered(type(model).__name__, "an attention function of its own")


def check_attention_kinds(model: str, kinds: Iterable[str]) -> None:
    """Refuse a trunk with layers that mix tokens otherwise than by full attention.

    Args:
        model: its name, for people.
        kinds: transformers' names of those layers, such as "linear_attention".

    Raises:
        UsageError
    """
    if kinds := sorted(kinds):
        raise _uncovered(model, f"layers of {', '.join(kinds)}")


def _uncovered(model: str, why: str) -> UsageError:
    return UsageError(
        f"{model} has {why}, which context parallelism does not cover: set engine.context_parallel_size=1"
    )
