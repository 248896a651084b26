"""Dynamic sampling: which groups of answers there is something to learn from."""

from __future__ import annotations

import torch
from torch import Tensor


def informative_groups(values: Tensor, group_ids: Tensor) -> Tensor:
    """True for the answers of groups whose values are not all equal (DAPO, arXiv 2503.14476, section 3.2, eq. 11).

    A group of one has nothing to be equal to and is kept, as in verl.

    Args:
        values: float [N], one per answer: the reward, or whatever groups are judged by.
        group_ids: integer [N]; answers to the same prompt share an id. Any order.

    Returns:
        bool [N].
    """
    _, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
    # Not a standard deviation of 0: that of seven times 0.1 is not.
    low = torch.zeros(len(size), dtype=values.dtype).scatter_reduce(0, group, values, "amin", include_self=False)
    high = torch.zeros(len(size), dtype=values.dtype).scatter_reduce(0, group, values, "amax", include_self=False)
    return ((low < high) | (size == 1))[group]
