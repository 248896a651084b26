"""What the engine remembers of running sequences: one row each, every row with a length of its own.

Keys and values lie by position. Rolling a row back is not advancing its length: what lies behind it is overwritten
before anything attends to it. A recurrent layer's state has no positions; `native.delta_net` rolls it back.
Running sequences keep to the first rows (a finished one's place is taken by the last), so a step works on views.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.speculative.drafter import resized


class KVShape(NamedTuple):
    """Of one layer: key-value heads, and how wide a head's key and value are."""

    heads: int
    key_dim: int
    value_dim: int


class RowStates(Protocol):
    """The states of one recurrent layer, a row each, and what the last decoding step would make of them."""

    def copy_row(self, source: int, target: int) -> None: ...

    def commit(self, kept: Sequence[int]) -> None: ...

    def resize(self, rows: int) -> None: ...


class RowCache:
    """Keys [rows, heads, capacity, key_dim] and values of every layer that attends; states of every one that recurs.

    Args:
        rows: sequences that can run at once.
        capacity: positions per row.
        dtype: of keys and values.
        device: of everything.
        shapes: of the layers that are known. Another's keys and values are made when it first writes.
    """

    def __init__(
        self,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        shapes: Mapping[Hashable, KVShape],
    ) -> None:
        self.rows = rows
        self.capacity = capacity
        self.dtype = dtype
        self.device = device
        self.shapes: dict[Hashable, KVShape] = {}
        self.states: dict[Hashable, RowStates] = {}
        self._layers: dict[Hashable, tuple[Tensor, Tensor]] = {}
        for layer, shape in shapes.items():
            self._add(layer, shape)

    def _add(self, layer: Hashable, shape: KVShape) -> None:
        def made(dim: int) -> Tensor:
            # Zeros, not empty memory: a masked position contributes 0 * value, and 0 * NaN would be NaN.
            return torch.zeros(self.rows, shape.heads, self.capacity, dim, dtype=self.dtype, device=self.device)

        self.shapes[layer] = shape
        self._layers[layer] = made(shape.key_dim), made(shape.value_dim)

    def layer(self, layer: Hashable, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that is about to write k and v, both [..., heads, dim]."""
        if layer not in self._layers:
            self._add(layer, KVShape(k.shape[-2], k.shape[-1], v.shape[-1]))
        return self._layers[layer]

    def resize(self, rows: int, capacity: int) -> None:
        """Take another size, and keep what the rows hold as far as it fits."""
        self.rows, self.capacity = rows, capacity
        for layer, (keys, values) in self._layers.items():  # one by one: little is held twice
            heads = keys.shape[1]
            self._layers[layer] = resized(keys, rows, heads, capacity), resized(values, rows, heads, capacity)
        for states in self.states.values():
            states.resize(rows)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row, in all layers, and the states as they are."""
        for sides in self._layers.values():
            for side in sides:
                side[target, :, :length] = side[source, :, :length]
        for states in self.states.values():
            states.copy_row(source, target)

    def commit(self, kept: Sequence[int]) -> None:
        """After a step over T positions of rows 0..R-1: row r keeps its first kept[r] >= 1."""
        for states in self.states.values():
            states.commit(kept)


class Step(Protocol):
    """What a layer needs to know of a forward: where its tokens stand, and where keys go and come from.

    `positions` long [R, T]. `cos` and `sin` are [R, T, 1, head_dim], for the engine's own layers; the first half of
    `sin` carries the minus sign of the rotation.
    """

    cache: RowCache
    positions: Tensor
    cos: Tensor
    sin: Tensor

    def attend(
        self, layer: Hashable, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Write k, v [R, T, kv_heads, D]; q [R, T, heads, D] attends causally -> [R, T, heads * D].

        With a window, to the last `window` positions only.
        """
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
        rotary: rotary factors; None for layers that make their own.
        positions: long [R, T], consecutive in each row.
        live: the largest position + 1, as an int (so that the device need not be asked).
        uniform: all rows hold the same positions.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, cache: RowCache, rotary: Rotary | None, positions: Tensor, live: int, uniform: bool) -> None:
        if rotary is not None:
            self.cos, self.sin = rotary.at(positions)
        self.rows, self.new = positions.shape
        self.cache, self.positions, self.live, self.uniform = cache, positions, live, uniform
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self._slots: dict[int, Tensor] = {}
        # On a CPU torch's fused attention takes one head after the other. For the few queries of a decoding step two
        # batched products are faster in float32 (0.6 of the time at 8 rows, half at 32), and not in bfloat16.
        self._batched = cache.device.type == "cpu" and cache.dtype in (torch.float32, torch.float64)

    def _mask(self, heads: int, groups: int, window: int | None) -> Tensor:
        """[R, heads, groups * T, live]: the query heads that share a key-value head are further query positions of it.

        It is 0 where a query may attend, else minus infinity.
        """
        mask = self._masks.get((heads, groups, window))
        if mask is None:
            span = torch.arange(self.live, device=self.positions.device)
            hidden = span > self.positions[..., None]
            if window is not None:
                hidden |= span <= self.positions[..., None] - window
            mask = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=hidden.device)
            mask.masked_fill_(hidden, -torch.inf)
            mask = mask[:, None].expand(-1, heads * groups, -1, -1)
            mask = mask.reshape(self.rows, heads, groups * self.new, self.live).contiguous()
            self._masks[heads, groups, window] = mask
        return mask

    def _slots_of(self, heads: int) -> Tensor:
        """Where the new positions lie among the rows * heads * capacity vectors of a layer: long [R, T, heads]."""
        slots = self._slots.get(heads)
        if slots is None:
            device = self.positions.device
            rows, head = torch.arange(self.rows, device=device), torch.arange(heads, device=device)
            slots = (rows[:, None, None] * heads + head) * self.cache.capacity + self.positions[..., None]
            self._slots[heads] = slots
        return slots

    def attend(
        self, layer: Hashable, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        keys, values = self.cache.layer(layer, k, v)
        rows, new, heads, dim = k.shape
        # One index instead of one per dimension: half the time of `keys[row, :, position] = k`.
        slots = self._slots_of(heads)
        keys.view(-1, dim)[slots] = k
        values.view(-1, v.shape[-1])[slots] = v
        groups = q.shape[2] // heads
        q = q.view(rows, new, heads, groups, dim).permute(0, 2, 3, 1, 4)
        if self._batched:
            k, v = (side.view(-1, *side.shape[2:])[: rows * heads, : self.live] for side in (keys, values))
            mask = self._mask(heads, groups, window).view(rows * heads, groups * new, self.live)
            q = q.reshape(rows * heads, groups * new, dim)
            out = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale).softmax(-1) @ v
        else:
            sees_all = new == 1 and self.uniform and (window is None or window >= self.live)
            out = F.scaled_dot_product_attention(
                q.reshape(rows, heads, groups * new, dim),
                keys[:rows, :, : self.live],
                values[:rows, :, : self.live],
                attn_mask=None if sees_all else self._mask(heads, groups, window),
                scale=scale,
            )
        return out.view(rows, heads, groups, new, -1).permute(0, 3, 1, 2, 4).reshape(rows, new, -1)


class PrefillStep:
    """Pieces of several prompts, laid end to end in one row of N tokens; each belongs to a cache row of its own.

    Args:
        cache: the cache.
        rotary: rotary factors; None for layers that make their own.
        pieces: (cache row, first position, number of tokens), in the order in which they are laid.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, cache: RowCache, rotary: Rotary | None, pieces: Sequence[tuple[int, int, int]]) -> None:
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in pieces])
        self.positions = positions.to(cache.device)[None]
        if rotary is not None:
            self.cos, self.sin = rotary.at(self.positions)
        self.cache = cache
        self.pieces = pieces
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def _mask(self, start: int, count: int, window: int | None) -> Tensor | None:
        """None for a piece that starts its row: it is causal. One that continues it sees everything before it, too."""
        if window is not None and window >= start + count:
            window = None
        if start == 0 and window is None:
            return None
        mask = self._masks.get((start, count, window))
        if mask is None:
            span = torch.arange(start + count, device=self.cache.device)
            mask = span <= span[start:, None]
            if window is not None:
                mask &= span > span[start:, None] - window
            self._masks[start, count, window] = mask
        return mask

    def attend(
        self, layer: Hashable, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        outs = []
        at = 0
        all_keys, all_values = self.cache.layer(layer, k, v)
        for row, start, count in self.pieces:
            keys, values = all_keys[row : row + 1], all_values[row : row + 1]
            piece = slice(at, at + count)
            keys[:, :, start : start + count] = k[:, piece].transpose(1, 2)
            values[:, :, start : start + count] = v[:, piece].transpose(1, 2)
            mask = self._mask(start, count, window)
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
