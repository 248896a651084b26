"""Which token each depth reads and predicts: shifts that never leave a document.

Position i of depth k reads t_{i+k} and predicts t_{i+k+1}. A position whose source lies in another document, in padding
or past the row is *invalid*. What a shifted tensor holds there is meaningless (zero) and must be masked by the validity
that comes with it: no token id is ever trained on there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.mtp.config import MaskRule

PADDING = -1

# (x [..., S], n) -> a function that gives x at the positions i + j, [..., S], for j = 0..n; zero past the row's end.
LookAhead = Callable[[Tensor, int], Callable[[int], Tensor]]


def document_ids(position_ids: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
    """Document of every token, from what a Hugging Face batch carries.

    A document starts where `position_ids` does not continue the position before it, or where `attention_mask` turns
    from 0 to 1. So left padding, right padding, packed rows and rows that are both packed and padded are all covered.

    Args:
        position_ids: integer [B, S], or None.
        attention_mask: [B, S], nonzero on tokens, or None. At least one of the two is needed.

    Returns:
        long [B, S]: constant inside a document, increasing along the row, -1 on padding.
    """
    like = position_ids if position_ids is not None else attention_mask
    if like is None:
        raise ValueError("document_ids needs position_ids or attention_mask")
    starts = torch.zeros_like(like, dtype=torch.bool)
    starts[:, :1] = True
    if position_ids is not None:
        starts[:, 1:] |= position_ids[:, 1:] != position_ids[:, :-1] + 1
    if attention_mask is not None:
        kept = attention_mask.bool()
        starts[:, 1:] |= kept[:, 1:] & ~kept[:, :-1]
    documents = starts.long().cumsum(dim=1) - 1
    if attention_mask is not None:
        documents = documents.masked_fill(~attention_mask.bool(), PADDING)
    return documents


def document_ids_from_cu_seqlens(
    cu_seqlens: Tensor, total_length: int, cu_seqlens_padded: Tensor | None = None
) -> Tensor:
    """Document of every token of one packed row.

    Args:
        cu_seqlens: integer [n + 1], cumulative lengths of the documents' real tokens, from 0.
        total_length: length of the row; what lies past the last document is padding.
        cu_seqlens_padded: integer [n + 1], where each document starts when documents are padded inside the row (as in
            Megatron's padded THD layout). None: the documents touch.

    Returns:
        long [1, total_length], -1 on padding.
    """
    starts = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    if int(starts[-1]) > total_length:
        raise ValueError(f"cu_seqlens ends at {int(starts[-1])}, past the row's {total_length} tokens")
    offsets = torch.arange(total_length, device=cu_seqlens.device)
    documents = torch.searchsorted(starts[1:].contiguous(), offsets, right=True)
    # The row's tail counts as one more document, of length 0.
    lengths = torch.cat([cu_seqlens[1:] - cu_seqlens[:-1], cu_seqlens.new_zeros(1)])
    real = offsets - starts[documents] < lengths[documents]
    return torch.where(real, documents, PADDING).unsqueeze(0)


def look_ahead_in_rows(x: Tensor, n: int) -> Callable[[int], Tensor]:
    """`LookAhead` over whole rows: what follows position i is position i + 1. Views of one padded copy."""
    length = x.shape[-1]
    padded = F.pad(x, (0, n))
    return lambda j: padded[..., j : j + length]


@dataclass(frozen=True)
class DepthTargets:
    """What depth k reads and predicts at every position. All [B, S]; entries where `valid` is False mean nothing."""

    input_ids: Tensor  # long, t_{i+k}
    labels: Tensor  # long, t_{i+k+1}
    valid: Tensor  # bool, the position counts
    position_ids: Tensor | None = None  # long, the position of t_{i+k} in its document


def depth_targets(
    input_ids: Tensor,
    documents: Tensor,
    loss_mask: Tensor,
    depth: int,
    mask_rule: MaskRule = "target",
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    look_ahead: LookAhead = look_ahead_in_rows,
) -> DepthTargets:
    """Inputs, labels and validity of one depth (from 1; depth 0 is the ordinary next-token loss).

    Args:
        input_ids: long [B, S].
        documents: long [B, S], -1 on padding.
        loss_mask: bool [B, S], token j is a target the user wants learned.
        mask_rule: "target" asks it of the predicted token t_{i+k+1} alone (Megatron's and verl's rule), "span" of every
            token t_{i+1}..t_{i+k+1} that this position reads or predicts.
        labels: long [B, S], what to predict at each token's place; `input_ids` if None.
        position_ids: long [B, S], for a block whose positions are those of the token it reads (NeMo Automodel). The
            decoder layers here take the hidden's own, as Megatron does: with rotary embeddings the two are the same.
        look_ahead: what follows a position. Called once, so a context-parallel shard
            (`forerun.mtp.context_parallel`) asks its neighbours once per depth.
    """
    fields = [input_ids, documents - PADDING, loss_mask.long()]  # the zeros past a row's end then say "padding"
    fields += [x for x in (labels, position_ids) if x is not None]
    at = look_ahead(torch.stack(fields), depth + 1)
    read, target = at(depth).unbind(), at(depth + 1).unbind()
    valid = (target[1] == documents - PADDING) & (documents != PADDING)
    for j in range(1, depth + 2) if mask_rule == "span" else (depth + 1,):
        valid = valid & at(j)[2].bool()
    return DepthTargets(
        input_ids=read[0],
        labels=target[0 if labels is None else 3],
        valid=valid,
        position_ids=None if position_ids is None else read[-1],
    )


def depth_counts(
    documents: Tensor,
    loss_mask: Tensor,
    num_depths: int,
    mask_rule: MaskRule = "target",
    look_ahead: LookAhead = look_ahead_in_rows,
) -> list[int]:
    """N_k for k = 1..D of these rows, from the masks alone. Add over micro-batches and ranks before the step."""
    dummy = torch.zeros_like(documents)
    return [
        int(depth_targets(dummy, documents, loss_mask, depth, mask_rule, look_ahead=look_ahead).valid.sum())
        for depth in range(1, num_depths + 1)
    ]
