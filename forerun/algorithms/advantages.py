"""Advantages from the rewards of a group of answers to the same prompt."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

AdvEstimator = Literal["grpo", "rloo"]


def advantages(rewards: Tensor, group_ids: Tensor, estimator: AdvEstimator, normalize_by_std: bool = True) -> Tensor:
    """By verl's `adv_estimator` and `norm_adv_by_std_in_grpo`: see `grpo_advantages` and `rloo_advantages`.

    Raises:
        ValueError: an unknown estimator, shapes that differ, or a reward that is not finite.
    """
    if estimator == "grpo":
        return grpo_advantages(rewards, group_ids, normalize_by_std)
    if estimator == "rloo":
        return rloo_advantages(rewards, group_ids)
    raise ValueError(f"adv_estimator={estimator!r} is not one of {', '.join(get_args(AdvEstimator))}")


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
    centred, size, group = _centred(rewards, group_ids)
    if normalize_by_std:
        std = (_group_sums(centred**2, group) / (size - 1).clamp(min=1)).sqrt()
        centred = torch.where(size[group] > 1, centred / (std[group] + epsilon), centred)
    return centred.float()


def rloo_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """REINFORCE with a leave-one-out baseline, one advantage per answer.

    A_i = r_i - mean of the others' rewards = n / (n - 1) * (r_i - mean(group)) (arXiv 2402.14740, section 3.2). A group
    of one keeps its reward, as in verl's `rloo`.

    Arguments, result and errors are those of `grpo_advantages`.
    """
    centred, size, group = _centred(rewards, group_ids)
    return (centred * (size / (size - 1).clamp(min=1))[group]).float()


def _centred(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards less their group's mean, a lone one as it is; the groups' sizes; each answer's group), float64."""
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [N]")
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite")
    values = rewards.double()
    _, group = torch.unique(group_ids, return_inverse=True)
    size = _group_sums(torch.ones_like(values), group)
    mean = torch.where(size > 1, _group_sums(values, group) / size, 0.0)
    return values - mean[group], size, group


def _group_sums(values: Tensor, group: Tensor) -> Tensor:
    num_groups = int(group.max()) + 1 if group.numel() else 0
    return torch.zeros(num_groups, dtype=values.dtype, device=values.device).index_add_(0, group, values)
