"""From per-token losses to one scalar, so that any split of the global batch gives the gradient of the whole.

The denominators are counts over the *global* batch - every micro-batch and rank - which are known from the masks before
the step. A micro-batch's aggregated loss is then a term of a sum: add the losses (or their gradients) up, never
average them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from forerun.algorithms.sequences import sequence_index

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class LossCounts:
    """Denominators of a global batch; counts of its parts add up.

    Attributes:
        tokens: supervised tokens.
        sequences: sequences that have at least one supervised token.
    """

    tokens: int = 0
    sequences: int = 0

    def __add__(self, other: LossCounts) -> LossCounts:
        return LossCounts(self.tokens + other.tokens, self.sequences + other.sequences)


def count_targets(mask: Tensor, document_ids: Tensor) -> LossCounts:
    """Counts of one batch whose documents are whole: `mask` bool [B, S], `document_ids` long [B, S] (-1 on padding)."""
    runs = sequence_index(document_ids)
    has_target = torch.zeros(int(runs.max()) + 1, dtype=torch.bool, device=mask.device)
    has_target[runs[mask]] = True
    return LossCounts(int(mask.sum()), int(has_target.sum()))


def aggregate_loss(
    losses: Tensor,
    mask: Tensor,
    mode: LossAggMode,
    counts: LossCounts,
    lengths: Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """This part's share of the global loss, under verl's `loss_agg_mode` names.

    token-mean:               sum of all tokens / tokens of the global batch (DAPO, arXiv 2503.14476, section 3.3)
    token-sum:                sum of all tokens
    seq-mean-token-sum:       sum of all tokens / sequences of the global batch
    seq-mean-token-mean:      sum over sequences of their token mean / sequences of the global batch (GRPO,
                              arXiv 2402.03300, eq. 3)
    seq-mean-token-sum-norm:  sum of all tokens / (sequences of the global batch x loss_scale_factor) (Dr. GRPO,
                              arXiv 2503.20783, section 3.2, where the factor is the longest response allowed)

    Args:
        losses: float [...], per token.
        mask: bool, same shape; tokens that count.
        mode: which mean.
        counts: of the global batch.
        lengths: per token, the supervised tokens of its whole sequence (`sequence_lengths`); seq-mean-token-mean needs
            it, because a shard may hold only a piece of a sequence.
        loss_scale_factor: for seq-mean-token-sum-norm.

    Returns:
        float32 or float64 scalar, to be *summed* over micro-batches and ranks; 0 (with a graph) for an empty mask.

    Raises:
        ValueError: an unknown mode, or an argument that the mode needs is missing.
    """
    if mode not in get_args(LossAggMode):
        raise ValueError(f"loss_agg_mode={mode!r} is not one of {', '.join(get_args(LossAggMode))}")
    # Not losses * mask: a non-finite loss outside the mask must stay outside.
    kept = torch.where(mask, losses, 0.0)
    if mode == "token-mean":
        return kept.sum() / max(counts.tokens, 1)
    if mode == "token-sum":
        return kept.sum()
    if mode == "seq-mean-token-mean":
        if lengths is None:
            raise ValueError("loss_agg_mode=seq-mean-token-mean needs lengths, the supervised tokens of each sequence")
        kept = kept / lengths.clamp(min=1)
    total = kept.sum() / max(counts.sequences, 1)
    if mode == "seq-mean-token-sum-norm":
        if not loss_scale_factor:
            raise ValueError("loss_agg_mode=seq-mean-token-sum-norm needs loss_scale_factor, e.g. the longest response")
        total = total / loss_scale_factor
    return total
