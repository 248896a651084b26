"""Mends the sampling of vLLM's CPU build while it drafts.

In vLLM 0.32 `expand_batch_to_tokens`, which gives every draft its request's temperature, top-k and top-p, fills a copy
of its result on a CPU and returns the uninitialised original (utils/cpu_triton_utils.py, `_expand_kernel_impl`):
sampled tokens follow no distribution, and greedy requests beside them go wrong. A build that has it right is left
alone.
"""

from __future__ import annotations

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
