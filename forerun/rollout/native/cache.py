"""The key-value cache: one row per running sequence, every row with a length of its own.

Rolling a row back is not advancing its length: what lies behind it is overwritten before anything attends to it.
Running sequences keep to the first rows (a finished one's place is taken by the last), so a step works on views.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """Keys and values of all layers, [layers, rows, kv_heads, capacity, head_dim].

    Args:
        layers: the trunk's and the drafter's.
        rows: sequences that can run at once.
        kv_heads: key-value heads per layer.
        capacity: positions per row.
        head_dim: as the model's.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, rows, kv_heads, capacity, head_dim)
        # Zeros, not empty memory: a masked position contributes 0 * value, and 0 * NaN would be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.rows = rows
        self.capacity = capacity

    def resize(self, rows: int, capacity: int) -> None:
        """Take another size, and keep the content as far as it fits."""
        kept, length = min(rows, self.rows), min(capacity, self.capacity)
        for side in ("keys", "values"):  # one after the other: less memory is held twice
            old: Tensor = getattr(self, side)
            new = old.new_zeros((old.shape[0], rows, old.shape[2], capacity, old.shape[4]))
            new[:, :kept, :, :length] = old[:, :kept, :, :length]
            setattr(self, side, new)
        self.rows, self.capacity = rows, capacity

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row, in all layers."""
        for side in (self.keys, self.values):
            side[:, target, :, :length] = side[:, source, :, :length]


class Step(Protocol):
    """What a decoder layer needs to know of a forward: rotary factors, and where keys go and come from.

    `cos` and `sin` are [R, T, 1, head_dim]; the first half of `sin` carries the minus sign of the rotation.
    """

    cos: Tensor
    sin: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Write k, v [R, T, kv_heads, D]; q [R, T, heads, D] attends causally -> [R, T, heads * D]."""
        ...


class Rotary:
    """Rotary factors for positions up to a capacity, made once by the trunk's own rotary embedding.

    Args:
        cos: [capacity, head_dim].
        sin: [capacity, head_dim].
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        half = sin.shape[-1] // 2
        self.cos = cos[:, None]
        self.sin = torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)[:, None]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]


class DecodeStep:
    """T new positions for each of the rows 0..R-1.

    Args:
        cache: the cache.
        rotary: rotary factors.
        positions: long [R, T], consecutive in each row.
        live: the largest position + 1, as an int (so that the device need not be asked).
        uniform: all rows hold the same positions.
        groups: query heads per key-value head.
    """

    def __init__(
        self, cache: KVCache, rotary: Rotary, positions: Tensor, live: int, uniform: bool, groups: int
    ) -> None:
        self.cos, self.sin = rotary.at(positions)
        rows, new = positions.shape
        self.rows, self.new, self.live, self.groups = rows, new, live, groups
        self.keys, self.values = cache.keys[:, :rows], cache.values[:, :rows]
        self.slot: int | None = live - new if uniform else None
        self.row_index = torch.arange(rows, device=positions.device)[:, None]
        self.positions = positions
        self.mask: Tensor | None = None
        if new > 1 or not uniform:
            hidden = torch.arange(live, device=positions.device) > positions[..., None]
            mask = torch.zeros(rows, new, live, dtype=cache.keys.dtype, device=positions.device)
            mask.masked_fill_(hidden, -torch.inf)
            # The query heads that share a key-value head become further query positions of it.
            self.mask = mask[:, None].expand(-1, groups, -1, -1).reshape(rows, 1, groups * new, live)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        rows, new = self.rows, self.new
        if self.slot is not None:
            keys[:, :, self.slot : self.live] = k.transpose(1, 2)
            values[:, :, self.slot : self.live] = v.transpose(1, 2)
        else:
            keys[self.row_index, :, self.positions] = k
            values[self.row_index, :, self.positions] = v
        kv_heads, dim = k.shape[2:]
        q = q.view(rows, new, kv_heads, self.groups, dim).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            q.reshape(rows, kv_heads, self.groups * new, dim),
            keys[:, :, : self.live],
            values[:, :, : self.live],
            attn_mask=self.mask,
            scale=scale,
        )
        return out.view(rows, kv_heads, self.groups, new, dim).permute(0, 3, 1, 2, 4).reshape(rows, new, -1)


class PrefillStep:
    """Pieces of several prompts, laid end to end in one row of N tokens; each belongs to a cache row of its own.

    Args:
        cache: the cache.
        rotary: rotary factors.
        pieces: (cache row, first position, number of tokens), in the order in which they are laid.
    """

    def __init__(self, cache: KVCache, rotary: Rotary, pieces: list[tuple[int, int, int]]) -> None:
        device = cache.keys.device
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in pieces]).to(device)
        self.cos, self.sin = (factor[None] for factor in rotary.at(positions))
        self.cache = cache
        self.pieces = pieces
        # A piece that starts its row is causal; one that continues it sees everything before it, too.
        self.masks: list[Tensor | None] = []
        for _, start, count in pieces:
            span = torch.arange(start + count, device=device)
            self.masks.append(None if start == 0 else span <= span[start:, None])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        outs = []
        at = 0
        for (row, start, count), mask in zip(self.pieces, self.masks, strict=True):
            keys, values = self.cache.keys[layer, row : row + 1], self.cache.values[layer, row : row + 1]
            piece = slice(at, at + count)
            keys[:, :, start : start + count] = k[:, piece].transpose(1, 2)
            values[:, :, start : start + count] = v[:, piece].transpose(1, 2)
            out = F.scaled_dot_product_attention(
                q[:, piece].transpose(1, 2),
                keys[:, :, : start + count],
                values[:, :, : start + count],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )
            outs.append(out.transpose(1, 2).reshape(1, count, -1))
            at += count
        return torch.cat(outs, dim=1)
