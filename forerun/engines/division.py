"""How a micro-batch goes through the trunk: as it is, or a document to a row where layers would mix those of one row.

Recurrent layers would: transformers' delta nets and mambas pass their state on to whatever follows. Padding behind a
document changes nothing, as such layers are causal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from forerun.data.batch import Batch


@dataclass(frozen=True)
class Span:
    """Some tokens of a micro-batch's row."""

    row: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Part:
    """What goes through the trunk at once: `batch`, whose rows are `spans` of a micro-batch, padded to the longest."""

    spans: Sequence[Span]
    batch: Batch


Division = Callable[[Batch], list[Part]]


def division_for(model: PreTrainedModel) -> Division:
    """The division that keeps a model's documents apart, at the least cost."""
    return documents_apart if model._is_stateful else undivided


def undivided(batch: Batch) -> list[Part]:
    """The micro-batch as it is."""
    rows, length = batch.input_ids.shape
    return [Part([Span(row, 0, length) for row in range(rows)], batch)]


def documents_apart(batch: Batch) -> list[Part]:
    """Documents of like length together, a row for each. With its padding no part has more tokens than `batch` has."""
    room = batch.input_ids.numel()
    parts: list[list[Span]] = []
    for span in sorted(_documents(batch.document_ids), key=len, reverse=True):
        if parts and (len(parts[-1]) + 1) * len(parts[-1][0]) <= room:
            parts[-1].append(span)
        else:
            parts.append([span])
    return [Part(spans, _rows(batch, spans)) for spans in parts]


def put_back(parts: Sequence[Part], found: Iterable[Tensor], batch: Batch) -> Tensor:
    """Values of the parts' tokens, [rows, length, ...] each, where those are in `batch`: [B, S, ...], 0 elsewhere."""
    whole: Tensor | None = None
    for part, values in zip(parts, found, strict=True):
        if whole is None:
            whole = values.new_zeros(*batch.input_ids.shape, *values.shape[2:])
        for span, own in zip(part.spans, values, strict=True):
            whole[span.row, span.start : span.stop] = own[: len(span)]
    assert whole is not None
    return whole


def _documents(document_ids: Tensor) -> list[Span]:
    spans = []
    for number, row in enumerate(document_ids):
        ids, lengths = torch.unique_consecutive(row, return_counts=True)
        stops = lengths.cumsum(0)
        for document, start, stop in zip(ids.tolist(), (stops - lengths).tolist(), stops.tolist(), strict=True):
            if document >= 0:
                spans.append(Span(number, start, stop))
    return spans


def _rows(batch: Batch, spans: Sequence[Span]) -> Batch:
    def cut(x: Tensor, padding: int = 0) -> Tensor:
        return pad_sequence([x[s.row, s.start : s.stop] for s in spans], batch_first=True, padding_value=padding)

    own = batch.map(cut)
    column = torch.arange(len(spans[0]), device=batch.input_ids.device)
    length = torch.tensor([[len(span)] for span in spans], device=batch.input_ids.device)
    position_ids = torch.where(column < length, own.position_ids, column - length)
    return replace(own, document_ids=cut(batch.document_ids, padding=-1), position_ids=position_ids)
