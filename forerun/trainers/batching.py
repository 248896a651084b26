"""Packed rows into the micro-batches of one optimizer step.

SFT packs its documents once, so that a row is the same in every epoch: its order is what shuffles, and whatever is kept
per row (a frozen trunk's hiddens) stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from forerun.data.batch import Batch
from forerun.data.packing import Document, assign, fill


class Rows(Sequence[Batch]):
    """One Batch [1, S] per row, S its own length, made whenever it is asked for: memory holds the documents alone.

    Args:
        documents: see `forerun.data.packing.pack`.
        max_length: tokens of a row.
        packing: put several documents into a row.

    Raises:
        UsageError, ValueError: see `pack`.
    """

    def __init__(self, documents: Sequence[Document], max_length: int, packing: bool) -> None:
        self._documents = documents
        self._rows = assign(documents, max_length, "packed" if packing else "padded")

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...

    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [fill(self._documents, [row]) for row in self._rows[index]]
        return fill(self._documents, [self._rows[index]])


def stack_rows(rows: Sequence[Batch]) -> Batch:
    """Rows of any lengths as one Batch, padded on the right to the longest."""
    width = max(row.input_ids.shape[1] for row in rows)
    wide = [row.padded(len(row.input_ids), width) for row in rows]
    return Batch(
        input_ids=torch.cat([row.input_ids for row in wide]),
        position_ids=torch.cat([row.position_ids for row in wide]),
        document_ids=torch.cat([row.document_ids for row in wide]),
        loss_mask=torch.cat([row.loss_mask for row in wide]),
        extras={name: torch.cat([row.extras[name] for row in wide]) for name in rows[0].extras},
    )


def micro_batches(rows: Sequence[Batch], micro_batch_size: int) -> list[Batch]:
    """Split one step's rows, in order, into micro-batches of at most `micro_batch_size` rows."""
    return [stack_rows(rows[start : start + micro_batch_size]) for start in range(0, len(rows), micro_batch_size)]
