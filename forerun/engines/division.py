"""How a micro-batch goes through the trunk, so that its documents stay apart in every layer.

Attention tells them apart by position_ids. Recurrent layers and convolutions do not: in transformers they pass their
state on to whatever follows in a row. There each document gets a row of its own. Padding behind it changes nothing, as
such layers are causal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.utils.generic import is_flash_attention_requested

from forerun.data.batch import Batch
from forerun.engines.shared_rows import JoinedRows, Rows
from forerun.models.trunk import base_model

# Kinds of layers, as transformers names them, that mix tokens by masked attention, or not at all.
_MASKED = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "moe", "sparse", "dense"}


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
    """What goes through the trunk at once: `batch`, whose rows are `spans` of a micro-batch, padded to the longest.

    Without spans it is the micro-batch.
    """

    spans: Sequence[Span]
    batch: Batch


Division = Callable[[Batch], list[Part]]


def division_for(model: PreTrainedModel) -> Division:
    """The division that keeps a model's documents apart, at the least cost."""
    return documents_apart if _passes_state_on(model) else undivided


def rows_for(model: PreTrainedModel) -> Callable[[Batch], Rows]:
    """How the rows of such a part are laid out for the model's attention."""
    flash = is_flash_attention_requested(base_model(model).config)
    return JoinedRows if flash and not _passes_state_on(model) else Rows


def _passes_state_on(model: PreTrainedModel) -> bool:
    """Whether a layer mixes tokens otherwise than by attention under a mask. transformers' own flag is not set on all
    of those.
    """
    kinds = set(getattr(base_model(model).config, "layer_types", None) or ())
    return model._is_stateful or bool(kinds - _MASKED)


def undivided(batch: Batch) -> list[Part]:
    """The micro-batch as it is."""
    return [Part((), batch)]


def documents_apart(batch: Batch) -> list[Part]:
    """Documents of like length together, a row for each. With its padding no part has more tokens than `batch` has."""
    room = batch.input_ids.numel()
    parts: list[list[Span]] = []
    for span in sorted(_documents(batch.document_ids), key=len, reverse=True):
        if parts and (len(parts[-1]) + 1) * len(parts[-1][0]) <= room:
            parts[-1].append(span)
        else:
            parts.append([span])
    return [Part(spans, _rows(batch, spans)) for spans in parts] or undivided(batch)


def put_back(parts: Sequence[Part], found: Iterable[Tensor], batch: Batch) -> Tensor:
    """Values of the parts' tokens, [rows, length, ...] each, where those are in `batch`: [B, S, ...], 0 elsewhere."""
    values = list(found)
    if not parts[0].spans:
        return values[0]
    whole = values[0].new_zeros(*batch.input_ids.shape, *values[0].shape[2:])
    for part, rows in zip(parts, values, strict=True):
        for span, own in zip(part.spans, rows, strict=True):
            whole[span.row, span.start : span.stop] = own[: len(span)]
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
