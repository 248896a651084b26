"""Mends the sampling of vLLM's CPU build while it drafts. Two things are wrong in vLLM 0.32:

- `expand_batch_to_tokens`, which gives every draft its request's temperature, top-k and top-p, fills a copy of its
  result and returns the uninitialised original (utils/cpu_triton_utils.py, `_expand_kernel_impl`): sampled tokens
  follow no distribution, and greedy requests beside them go wrong. A build that has it right is left alone.
- `apply_top_k_only` (v1/sample/ops/topk_topp_sampler.py) ends the engine in a step that has no drafts to judge, as
  before the last token of a text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat x[i] for each token of row i; values equal to `replace_from` become `replace_to`.

    Args:
        x: [B].
        cu_num_tokens: int [B], the number of tokens up to and including each row.
        num_tokens: in all.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.repeat_interleave(torch.where(x == replace_from, replace_to, x), counts, output_size=num_tokens)


def mend() -> None:
    """To be called in vLLM's worker, once its CPU kernels are in place."""
    if not current_platform.is_cpu():
        return
    example = torch.tensor([0.0, 0.5]), torch.tensor([2, 3], dtype=torch.int32), 3, 0, 1
    if not torch.equal(rejection_sampler.expand_batch_to_tokens(*example), expand_batch_to_tokens(*example)):
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_some(logits: Tensor, *rest: Any) -> Tensor:
        return constrain(logits, *rest) if len(logits) else logits

    rejection_sampler.apply_sampling_constraints = constrain_some
