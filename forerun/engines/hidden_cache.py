"""The frozen trunk's hiddens, kept, so that further epochs of head-only training cost only the head.

A row is known by its tokens and positions, so any order of rows and any split into micro-batches finds it again, and
two runs may share a directory. Bytes: tokens x d x element size (70 k tokens of a 576-wide trunk: 160 MB in float32).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.data.batch import Batch


class HiddenCache:
    """Trunk hiddens by row.

    Args:
        directory: where rows are written, one safetensors file each, for later runs; None keeps them in memory.
        trunk_id: identifies the trunk's weights (a digest): rows of another trunk in the same directory never match.
        dtype: stored dtype; None stores what the trunk returned (exact).
    """

    def __init__(self, directory: Path | None = None, trunk_id: str = "", dtype: torch.dtype | None = None) -> None:
        self.directory = directory
        self.trunk_id = trunk_id
        self.dtype = dtype
        self.hits = 0
        self.misses = 0
        self._rows: dict[str, Tensor] = {}
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def get(self, batch: Batch, compute: Callable[[Batch], Tensor]) -> Tensor:
        """Hiddens [B, S, d] of the batch, zero on padding at a row's end; `compute` runs on the rows not yet known."""
        keys = [self._key(batch, row) for row in range(batch.input_ids.shape[0])]
        known = {key: hidden for key in keys if (hidden := self._read(key)) is not None}
        missing = [row for row, key in enumerate(keys) if key not in known]
        self.hits += len(keys) - len(missing)
        self.misses += len(missing)
        if missing:
            for row, hidden in zip(missing, compute(_select(batch, missing)), strict=True):
                known[keys[row]] = hidden[: _length(batch, row)]
                self._write(keys[row], known[keys[row]])
        like = known[keys[0]]
        out = torch.zeros(*batch.input_ids.shape, like.shape[-1], dtype=like.dtype, device=batch.input_ids.device)
        for row, key in enumerate(keys):
            out[row, : known[key].shape[0]] = known[key]
        return out

    def _key(self, batch: Batch, row: int) -> str:
        length = _length(batch, row)
        digest = hashlib.sha256(self.trunk_id.encode())
        for tensor in (batch.input_ids, batch.position_ids):
            digest.update(tensor[row, :length].cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _read(self, key: str) -> Tensor | None:
        if self.directory is None:
            return self._rows.get(key)
        path = self.directory / f"{key}.safetensors"
        return load_file(path)["hidden_states"] if path.is_file() else None

    def _write(self, key: str, hidden: Tensor) -> None:
        kept = hidden.detach().to(device="cpu", dtype=self.dtype or hidden.dtype, copy=True).contiguous()
        if self.directory is None:
            self._rows[key] = kept
            return
        path = self.directory / f"{key}.safetensors"
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        save_file({"hidden_states": kept}, unfinished)
        unfinished.replace(path)


def _length(batch: Batch, row: int) -> int:
    """Tokens up to the last one that is not padding."""
    real = (batch.document_ids[row] >= 0).nonzero()
    return int(real[-1]) + 1 if len(real) else 0


def _select(batch: Batch, rows: list[int]) -> Batch:
    index = torch.tensor(rows, device=batch.input_ids.device)
    width = max(_length(batch, row) for row in rows)
    return batch.map(lambda x: x[index, :width])
