"""The clipped policy-gradient loss per token (PPO, GRPO, DAPO), and statistics that merge over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.algorithms.sequences import over_sequences


@dataclass
class PolicyStats:
    """Masked sums over tokens; those of a batch's parts add up to the batch's.

    Attributes:
        num_tokens: tokens counted.
        clipped: tokens at which the clipped term is the larger loss (their gradient is zero).
        clipped_lower: tokens held at the dual-clip bound.
        sum_kl: sum of old_log_prob - log_prob, the k1 estimate of KL(old || new).
        sum_ratio: sum of pi_new / pi_old.
    """

    num_tokens: float = 0
    clipped: float = 0
    clipped_lower: float = 0
    sum_kl: float = 0.0
    sum_ratio: float = 0.0

    def compute(self) -> dict[str, float | None]:
        """Means under the names that verl logs (pg_clipfrac, pg_clipfrac_lower, ppo_kl); None without tokens."""
        n = self.num_tokens
        return {
            "pg_clipfrac": self.clipped / n if n else None,
            "pg_clipfrac_lower": self.clipped_lower / n if n else None,
            "ppo_kl": self.sum_kl / n if n else None,
            "ratio_mean": self.sum_ratio / n if n else None,
        }


@dataclass
class PolicyLoss:
    """`losses`: float [...] per token with a graph, 0 outside the mask; aggregate with `aggregate_loss`."""

    losses: Tensor
    stats: PolicyStats


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    importance_weights: Tensor | None = None,
    log_ratio: Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate loss with separate clip bounds and dual clipping.

    r = exp(log_prob - old_log_prob);  l = max(-A r, -A clip(r, 1 - low, 1 + high))     (PPO, arXiv 1707.06347, eq. 7;
    clip-higher: DAPO, arXiv 2503.14476, section 3.1);  for A < 0 also l = min(l, -A c)  (dual clip, arXiv 1912.09729,
    eq. 5). The same arithmetic as verl's `vanilla` policy loss.

    Args:
        log_probs: float [...] with a graph, of the tokens under the policy being trained.
        old_log_probs: float, same shape, of the policy at the time of sampling.
        advantages: float, same shape.
        mask: bool, same shape; tokens that the policy wrote.
        clip_ratio_low, clip_ratio_high: how far the ratio may fall below or rise above 1.
        clip_ratio_c: the dual-clip bound, > 1; None switches it off.
        importance_weights: float, same shape, constants that multiply the loss (`importance.importance_weights`).
        log_ratio: float, same shape, with a graph; log r where it is not log_prob - old_log_prob (`gspo_log_ratio`).

    Raises:
        ValueError: shapes that differ, or a bound out of range.
    """
    for name, other in (("old_log_probs", old_log_probs), ("advantages", advantages), ("mask", mask)):
        if other.shape != log_probs.shape:
            raise ValueError(f"{name} {tuple(other.shape)} must have log_probs' shape {tuple(log_probs.shape)}")
    if not 0 <= clip_ratio_low < 1 or clip_ratio_high < 0:
        raise ValueError(
            f"clip_ratio_low={clip_ratio_low} must lie in [0, 1), clip_ratio_high={clip_ratio_high} in [0, inf)"
        )
    if clip_ratio_c is not None and clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c={clip_ratio_c} must be greater than 1, or null to switch dual clipping off")

    # Outside the mask anything may stand, NaN included; a zero there keeps it out of values and gradients alike.
    token_log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0)
    log_ratio = token_log_ratio if log_ratio is None else torch.where(mask, log_ratio, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = torch.maximum(plain, clipped)
    lower = torch.zeros_like(mask)
    if clip_ratio_c is not None:
        bound = -advantages * clip_ratio_c
        lower = (losses > bound) & (advantages < 0) & mask
        losses = torch.where(advantages < 0, torch.minimum(losses, bound), losses)
    if importance_weights is not None:
        losses = losses * torch.where(mask, importance_weights.detach(), 0.0)

    with torch.no_grad():
        stats = PolicyStats(
            num_tokens=int(mask.sum()),
            clipped=int(((clipped > plain) & mask).sum()),
            clipped_lower=int(lower.sum()),
            sum_kl=float(-token_log_ratio.double().sum()),
            sum_ratio=float(torch.where(mask, ratio, 0.0).double().sum()),
        )
    return PolicyLoss(losses, stats)


def gspo_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, document_ids: Tensor) -> Tensor:
    """GSPO's importance ratio, in logs: the sequence's geometric mean at each of its tokens.

    log s = sg[mean over the sequence of (log_prob - old_log_prob)] + log_prob - sg[log_prob], at most 10; sg stops the
    gradient (GSPO-token, arXiv 2507.18071, section 4.3; verl's `gspo`). GSPO has no dual clip: `clip_ratio_c=None`.

    Args:
        log_probs: float [B, S] with a graph.
        old_log_probs: float, same shape.
        mask: bool, same shape.
        document_ids: long, same shape; documents must be whole.

    Returns:
        [B, S], for `policy_loss`.
    """
    mean = over_sequences((log_probs - old_log_probs).detach(), mask, document_ids, "mean")
    return (log_probs - log_probs.detach() + mean).clamp(max=10.0)
