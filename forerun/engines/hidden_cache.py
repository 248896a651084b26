"""The frozen trunk's hiddens, kept, so that further epochs of head-only training cost only the head.

A row is known by its tokens and positions, so any order of rows and any split into micro-batches finds it again. Bytes:
tokens x d x element size (70 k tokens of a 576-wide trunk: 160 MB in float32).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from forerun.data.batch import Batch


class HiddenCache:
    """Trunk hiddens by row, in host memory, to the bit as the trunk returned them."""

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self._rows: dict[bytes, Tensor] = {}

    def get(self, batch: Batch, compute: Callable[[Batch], Tensor]) -> Tensor:
        """Hiddens [B, S, d] of the batch, zero on padding at a row's end; `compute` runs on the rows not yet known."""
        keys = [_key(batch, row) for row in range(batch.input_ids.shape[0])]
        missing = [row for row, key in enumerate(keys) if key not in self._rows]
        self.hits += len(keys) - len(missing)
        self.misses += len(missing)
        if missing:
            for row, hidden in zip(missing, compute(_select(batch, missing)), strict=True):
                self._rows[keys[row]] = hidden[: _length(batch, row)].detach().to("cpu", copy=True)
        like = self._rows[keys[0]]
        out = torch.zeros(*batch.input_ids.shape, like.shape[-1], dtype=like.dtype, device=batch.input_ids.device)
        for row, key in enumerate(keys):
            out[row, : self._rows[key].shape[0]] = self._rows[key]
        return out


def _key(batch: Batch, row: int) -> bytes:
    length = _length(batch, row)
    digest = hashlib.sha256()
    for tensor in (batch.input_ids, batch.position_ids):
        digest.update(tensor[row, :length].cpu().contiguous().numpy().tobytes())
    return digest.digest()


def _length(batch: Batch, row: int) -> int:
    """Tokens up to the last one that is not padding."""
    real = (batch.document_ids[row] >= 0).nonzero()
    return int(real[-1]) + 1 if len(real) else 0


def _select(batch: Batch, rows: list[int]) -> Batch:
    index = torch.tensor(rows, device=batch.input_ids.device)
    width = max(_length(batch, row) for row in rows)
    return batch.map(lambda x: x[index, :width])
