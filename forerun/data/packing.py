"""Documents into batches: best-fit packing of several documents into a row, or one padded row per document."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from forerun.data.batch import Batch
from forerun.errors import UsageError

Layout = Literal["packed", "padded"]


@dataclass(frozen=True)
class Document:
    """One sequence of tokens that belong together.

    Attributes:
        token_ids: n token ids.
        loss_mask: n flags; True where the token is a target to be learned.
        extras: per-token values, n each, aligned with the token itself (advantages, old_log_probs, ...). Whole numbers
            become long tensors, others float32; tensors keep their dtype.
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    extras: Mapping[str, Sequence[float] | Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in (("loss_mask", self.loss_mask), *self.extras.items()):
            if len(values) != len(self.token_ids):
                raise ValueError(f"{name} has {len(values)} entries for {len(self.token_ids)} tokens")

    def __len__(self) -> int:
        return len(self.token_ids)

    def compact(self) -> Document:
        """The same in 5 bytes a token, where lists take some 45."""
        return Document(array("i", self.token_ids), bytearray(bytes(self.loss_mask)), self.extras)


def pack(
    documents: Sequence[Document],
    max_length: int,
    micro_batch_size: int,
    layout: Layout = "packed",
    pad_token_id: int = 0,
    pad_to_multiple_of: int = 1,
) -> list[Batch]:
    """Put every document into exactly one row, whole, and the rows into micro-batches.

    `packed` fills rows best-fit: the longest document first, each into the fullest row that still has room. `padded`
    gives each document a row of its own. Either way rows of similar length share a micro-batch, which is padded on the
    right to its own longest row, not to `max_length`. The result depends on nothing but the arguments.

    Args:
        documents: without empty ones; all with the same extras.
        max_length: tokens of a row.
        micro_batch_size: rows of a batch; the last one may have fewer.
        pad_token_id: stands on padding, where document_ids is -1, loss_mask False and every extra 0.
        pad_to_multiple_of: row lengths are rounded up to this.

    Returns:
        Batches whose document_ids are the documents' indices in `documents`.

    Raises:
        UsageError: a document that is longer than max_length, or empty.
        ValueError: documents whose extras differ, or an argument out of range.
    """
    if micro_batch_size < 1 or pad_to_multiple_of < 1:
        raise ValueError("micro_batch_size and pad_to_multiple_of must be at least 1")
    rows = assign(documents, max_length, layout)
    return [
        fill(documents, rows[start : start + micro_batch_size], pad_token_id, pad_to_multiple_of)
        for start in range(0, len(rows), micro_batch_size)
    ]


def assign(documents: Sequence[Document], max_length: int, layout: Layout = "packed") -> list[list[int]]:
    """Which documents each row holds, in `pack`'s order of rows.

    Raises:
        UsageError, ValueError: see `pack`.
    """
    if max_length < 1:
        raise ValueError("max_length must be at least 1")
    for index, document in enumerate(documents):
        if not len(document):
            raise UsageError(f"document {index} has no tokens: drop it before packing")
        if len(document) > max_length:
            raise UsageError(
                f"document {index} has {len(document)} tokens, more than max_length={max_length}: "
                "raise max_length, or drop or shorten it"
            )
        if document.extras.keys() != documents[0].extras.keys():
            raise ValueError(
                f"document {index} has extras {sorted(document.extras)}, not {sorted(documents[0].extras)}"
            )

    lengths = [len(document) for document in documents]
    rows = [[i] for i in range(len(documents))] if layout == "padded" else best_fit(lengths, max_length)
    # Longest rows first: the first micro-batch shows at once whether memory suffices.
    rows.sort(key=lambda row: -sum(lengths[i] for i in row))
    return rows


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing bin packing: indices of `lengths` by bin, each bin's sum at most `capacity`.

    O(n log n) comparisons. At most 11/9 of the fewest bins possible, plus a constant (Johnson et al. 1974).
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(room, (lengths[index], -1))
        if at == len(room):
            left, row = capacity, len(rows)
            rows.append([])
        else:
            left, row = room.pop(at)
        rows[row].append(index)
        bisect.insort(room, (left - lengths[index], row))
    return rows


def fill(
    documents: Sequence[Document],
    rows: Sequence[Sequence[int]],
    pad_token_id: int = 0,
    pad_to_multiple_of: int = 1,
) -> Batch:
    """A batch of these rows, see `pack`."""
    longest = max(sum(len(documents[i]) for i in row) for row in rows)
    shape = (len(rows), -(-longest // pad_to_multiple_of) * pad_to_multiple_of)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    position_ids = torch.zeros(shape, dtype=torch.long)
    document_ids = torch.full(shape, -1, dtype=torch.long)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    extras: dict[str, Tensor] = {}
    for r, row in enumerate(rows):
        start = 0
        for index in row:
            document = documents[index]
            span = slice(start, start + len(document))
            input_ids[r, span] = _tensor(document.token_ids, torch.long)
            position_ids[r, span] = torch.arange(len(document))
            document_ids[r, span] = index
            loss_mask[r, span] = _tensor(document.loss_mask, torch.bool)
            for name, values in document.extras.items():
                tensor = torch.as_tensor(values)
                if name not in extras:
                    extras[name] = torch.zeros(shape, dtype=tensor.dtype)
                elif extras[name].dtype != tensor.dtype:  # [0, 0] next to [0.5, 0.5]
                    extras[name] = extras[name].to(torch.promote_types(extras[name].dtype, tensor.dtype))
                extras[name][r, span] = tensor.to(extras[name].dtype)
            start = span.stop
        position_ids[r, start:] = torch.arange(shape[1] - start)
    return Batch(input_ids, position_ids, document_ids, loss_mask, extras)


def _tensor(values: Sequence[int], dtype: torch.dtype) -> Tensor:
    if isinstance(values, array):
        return torch.frombuffer(values, dtype=torch.int32).to(dtype)
    if isinstance(values, bytearray):
        return torch.frombuffer(values, dtype=torch.uint8).to(dtype)
    return torch.as_tensor(values, dtype=dtype)
