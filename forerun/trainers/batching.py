"""Packed rows into the micro-batches of one optimizer step.

SFT packs its documents once, so that a row is the same in every epoch: its order is what shuffles, and whatever is kept
per row (a frozen trunk's hiddens) stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.data.batch import Batch
from forerun.data.packing import Document, pack


def make_rows(documents: Sequence[Document], max_length: int, packing: bool) -> list[Batch]:
    """One Batch [1, S] per row, S its own length; `packing` puts several documents into a row."""
    return pack(documents, max_length, micro_batch_size=1, layout="packed" if packing else "padded")


def stack_rows(rows: Sequence[Batch]) -> Batch:
    """Rows of any lengths as one Batch, padded on the right to the longest."""
    width = max(row.input_ids.shape[1] for row in rows)

    def padded(values: list[Tensor], value: int) -> Tensor:
        return torch.cat([F.pad(v, (0, width - v.shape[1]), value=value) for v in values])

    def positions(row: Batch) -> Tensor:
        # Padding is a document of its own, so its positions start again.
        count, length = row.position_ids.shape
        return torch.cat([row.position_ids, torch.arange(width - length).expand(count, -1)], dim=1)

    return Batch(
        input_ids=padded([r.input_ids for r in rows], 0),
        position_ids=torch.cat([positions(r) for r in rows]),
        document_ids=padded([r.document_ids for r in rows], -1),
        loss_mask=padded([r.loss_mask for r in rows], 0),
        extras={name: padded([r.extras[name] for r in rows], 0) for name in rows[0].extras},
    )


def micro_batches(rows: Sequence[Batch], micro_batch_size: int) -> list[Batch]:
    """Split one step's rows, in order, into micro-batches of at most `micro_batch_size` rows."""
    return [stack_rows(rows[start : start + micro_batch_size]) for start in range(0, len(rows), micro_batch_size)]
