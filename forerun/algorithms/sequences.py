"""Sums, means and maxima over whole sequences that lie packed in rows, given back to each of their tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def sequence_index(document_ids: Tensor) -> Tensor:
    """Number the runs of equal ids, row by row, so that ids need not be unique across rows: long [B, S]."""
    starts = torch.ones_like(document_ids)
    starts[:, 1:] = (document_ids[:, 1:] != document_ids[:, :-1]).long()
    return (starts.flatten().cumsum(0) - 1).view_as(document_ids)


def sequence_lengths(mask: Tensor, document_ids: Tensor) -> Tensor:
    """For every token the number of supervised tokens in its document: long [B, S]; documents must be whole."""
    return over_sequences(torch.ones_like(document_ids), mask, document_ids, "sum")


def over_sequences(
    values: Tensor, mask: Tensor, document_ids: Tensor, reduce: Literal["sum", "mean", "amax"]
) -> Tensor:
    """For every token the sum, mean or maximum of `values` over the supervised tokens of its document.

    Args:
        values: [B, S]; not negative for "amax".
        mask: bool [B, S], the tokens that count; what stands elsewhere may be anything.
        document_ids: long [B, S]; documents must be whole.

    Returns:
        [B, S], values' dtype; 0 in a document without such a token.
    """
    index = sequence_index(document_ids).flatten()
    kept = torch.where(mask, values, 0).flatten()
    found = kept.new_zeros(int(index[-1]) + 1)
    found = found.scatter_reduce(0, index, kept, "amax" if reduce == "amax" else "sum")
    if reduce == "mean":
        found = found / found.new_zeros(len(found)).index_add(0, index, mask.flatten().to(found)).clamp(min=1)
    return found[index].view_as(values)
