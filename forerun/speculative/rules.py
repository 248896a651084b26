"""Which drafted tokens are kept, and which token follows them. All rules are lossless: what comes out is distributed as
the target alone would have sampled it.

- `greedy`: keep a draft that is the target's most probable token. (Lossless for temperature 0.)
- `match`: sample the target at every position with that position's uniform number; keep a draft that equals the sample.
  The text is the one that plain sampling gives with the same numbers, whatever was drafted. Accepts with p(argmax q) if
  drafts are the draft's argmax, sum p*q if they are sampled.
- `rejection`: keep a draft with probability min(1, p/q), else sample from the residual (p - q)+ (Leviathan et al. 2023,
  algorithm 1; Chen et al. 2023, algorithm 2). Accepts with 1 - TV(p, q). For a draft that was not sampled q is one-hot:
  accepts with p(draft).

Shapes: B rows, K drafts at most, V words, Vd words of a reduced draft vocabulary. Rows have their own number of drafts
(`draft_counts`); what stands behind a row's count is not looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forerun.speculative.sampling import sample


class Verdict(NamedTuple):
    """`num_accepted` long [B]: drafts kept per row, from the front. `next_token` long [B]: the target's token after
    them, so a row emits num_accepted + 1 tokens."""

    num_accepted: Tensor
    next_token: Tensor


def _leading(kept: Tensor, draft_counts: Tensor) -> Tensor:
    """Number of leading True in each row of `kept` bool [B, K], at most draft_counts [B]."""
    inside = torch.arange(kept.shape[1], device=kept.device) < draft_counts[:, None]
    return (kept & inside).long().cumprod(dim=1).sum(dim=1)


def _compare(chosen: Tensor, draft_tokens: Tensor, draft_counts: Tensor) -> Verdict:
    accepted = _leading(chosen[:, :-1] == draft_tokens, draft_counts)
    return Verdict(accepted, chosen.gather(1, accepted[:, None]).squeeze(1))


def greedy(target: Tensor, draft_tokens: Tensor, draft_counts: Tensor) -> Verdict:
    """Keep drafts that are the target's argmax.

    Args:
        target: logits or probabilities [B, K + 1, V].
        draft_tokens: long [B, K].
        draft_counts: long [B], each in 0..K.
    """
    return _compare(target.argmax(-1), draft_tokens, draft_counts)


def match(target_probs: Tensor, draft_tokens: Tensor, draft_counts: Tensor, uniforms: Tensor) -> Verdict:
    """Keep drafts that equal the target's own sample.

    Args:
        target_probs: [B, K + 1, V].
        draft_tokens: long [B, K].
        draft_counts: long [B].
        uniforms: [B, K + 1] in [0, 1), independent of the drafts.
    """
    return _compare(sample(target_probs, uniforms), draft_tokens, draft_counts)


def rejection(
    target_probs: Tensor,
    draft_tokens: Tensor,
    draft_counts: Tensor,
    draft_probs: Tensor | None,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
    draft_vocabulary: Tensor | None = None,
) -> Verdict:
    """Keep drafts with probability min(1, p/q); after a refusal sample the residual, after the last draft the target.

    Args:
        target_probs: [B, K + 1, V].
        draft_tokens: long [B, K], words of the full vocabulary, each sampled from its row of `draft_probs`.
        draft_counts: long [B].
        draft_probs: [B, K, V], or [B, K, Vd] with `draft_vocabulary`; None for drafts that were chosen, not sampled.
        accept_uniforms: [B, K] in [0, 1), independent of the drafts.
        next_uniforms: [B, K + 1] in [0, 1), independent of both; entry a serves a row that keeps a drafts.
        draft_vocabulary: long [Vd], ascending: the words that the last dimension of `draft_probs` stands for.
    """
    batch, depth = draft_tokens.shape
    if depth == 0:
        none = torch.zeros(batch, dtype=torch.long, device=target_probs.device)
        return Verdict(none, sample(target_probs[:, 0], next_uniforms[:, 0]))
    p_draft = target_probs[:, :-1].gather(2, draft_tokens[..., None]).squeeze(2)
    if draft_probs is None:
        q_draft = torch.ones_like(p_draft)
    else:
        column = draft_tokens
        if draft_vocabulary is not None:
            column = torch.searchsorted(draft_vocabulary, draft_tokens.contiguous())
        column = column.clamp(max=draft_probs.shape[2] - 1)  # only what stands behind a row's count can be out of range
        q_draft = draft_probs.gather(2, column[..., None]).squeeze(2)
    # u < p/q without a division; with p = 0 the draft is never kept, not even at u = 0.
    accepted = _leading(accept_uniforms * q_draft < p_draft, draft_counts)

    at = accepted[:, None, None]
    probs = target_probs.gather(1, at.expand(-1, 1, target_probs.shape[2])).squeeze(1)
    refused = accepted < draft_counts
    # A row that kept all its drafts has no refused one; it reads some entry of q, and does not use it.
    at = at.clamp(max=depth - 1)
    if draft_probs is None:
        q: Tensor = torch.ones(batch, 1, dtype=probs.dtype, device=probs.device)
        words = draft_tokens.gather(1, at.squeeze(2))
    else:
        q = draft_probs.gather(1, at.expand(-1, 1, draft_probs.shape[2])).squeeze(1)
        words = torch.arange(probs.shape[1], device=probs.device) if draft_vocabulary is None else draft_vocabulary
        words = words.expand(batch, -1)
    residual = probs.scatter_add(1, words, -q.to(probs.dtype)).clamp_(min=0)
    # p = q up to rounding can refuse a token and leave nothing over; then p itself is the limit of the residual.
    usable = refused & (residual.sum(1) > 0)
    probs = torch.where(usable[:, None], residual, probs)
    return Verdict(accepted, sample(probs, next_uniforms.gather(1, accepted[:, None]).squeeze(1)))
