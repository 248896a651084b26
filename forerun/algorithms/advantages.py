"""Advantages from the rewards of a group of answers to the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def grpo_advantages(rewards: Tensor, group_ids: Tensor, normalize_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Group-relative advantages, one per answer.

    A_i = (r_i - mean(group)) / (std(group) + epsilon), with the sample standard deviation (n - 1), as verl has it
    (DeepSeekMath, arXiv 2402.03300, section 4.1.2). `normalize_by_std=False` is Dr. GRPO's A_i = r_i - mean(group)
    (arXiv 2503.20783, section 3.2). A group whose rewards are all equal gets zeros. A group of one has no baseline and
    keeps its reward, as in verl.

    Args:
        rewards: float [N], one per answer.
        group_ids: integer [N]; answers to the same prompt share an id. Any order.
        normalize_by_std: divide by the group's standard deviation.
        epsilon: added to the standard deviation.

    Returns:
        float32 [N] on the rewards' device, computed in float64.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [N]")
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite")
    values = rewards.double()
    _, group = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if group.numel() else 0

    def group_sum(x: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64, device=x.device).index_add_(0, group, x)

    size = group_sum(torch.ones_like(values))
    mean = torch.where(size > 1, group_sum(values) / size, 0.0)
    centred = values - mean[group]
    if normalize_by_std:
        std = (group_sum(centred**2) / (size - 1).clamp(min=1)).sqrt()
        centred = torch.where(size[group] > 1, centred / (std[group] + epsilon), centred)
    return centred.float()
