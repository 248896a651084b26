"""Matrix products with few rows, written in whichever way this machine is fast at.

On a CPU a product of a weight with 2 to 64 rows costs, depending on how it is written and on the shape, between 1.05
and several times the cost of one row, which decides whether verifying drafts can pay. The same product is therefore
measured in three spellings and the fastest taken:

- `linear`: F.linear(x, W)
- `transposed`: (W @ x.T).T
- `padded`: `transposed` with one more row of zeros, for odd row counts (matrix-vector routines are often the slow ones)

The spellings round differently. A forced choice makes runs reproducible where a measured one could flip.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Spelling = Literal["linear", "transposed", "padded"]
Choice = Literal["measure", "linear", "transposed", "padded"]

# Row counts that are measured; a count between two of them takes the next one's spelling, more rows take `linear`.
MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
_REPEATS = 4
_MAX_WEIGHTS = 6

_Key = tuple[torch.dtype, int, torch.Size, int]
_measured: dict[_Key, Spelling] = {}


def product(x: Tensor, weight: Tensor, spelling: Spelling) -> Tensor:
    """x [N, I] times weight [O, I] transposed -> [N, O], contiguous."""
    if spelling == "linear":
        return F.linear(x, weight)
    rows = x.shape[0]
    if spelling == "padded" and rows % 2:
        return (weight @ F.pad(x, (0, 0, 0, 1)).T).T[:rows].contiguous()
    return (weight @ x.T).T.contiguous()


def _bucket(rows: int) -> int:
    return next(r for r in MEASURED_ROWS if r >= rows)


class ProductTable:
    """Which spelling to use for a row count and a weight. One table serves an engine.

    Args:
        choice: "measure", or one spelling for every product.
    """

    def __init__(self, choice: Choice = "measure") -> None:
        self.choice: Choice = choice

    def spelling(self, rows: int, weight: Tensor) -> Spelling:
        """The spelling for x [rows, I]; `linear` for what was not measured."""
        if self.choice != "measure":
            return self.choice
        if weight.device.type != "cpu" or rows > MEASURED_ROWS[-1]:
            return "linear"
        return _measured.get((weight.dtype, torch.get_num_threads(), weight.shape, _bucket(rows)), "linear")

    @torch.no_grad()
    def measure(self, weights: Sequence[Tensor], max_rows: int) -> bool:
        """Time every spelling for weights of these shapes and up to max_rows rows; whether anything was new.

        Weights of one shape are cycled through, so that they come from memory and not from the processor's cache, as
        they do in a decoding step.
        """
        if self.choice != "measure":
            return False
        shapes: dict[torch.Size, list[Tensor]] = {}
        for weight in weights:
            if weight.device.type == "cpu":
                same = shapes.setdefault(weight.shape, [])
                if len(same) < _MAX_WEIGHTS:
                    same.append(weight)
        fresh = False
        for shape, same in shapes.items():
            for rows in MEASURED_ROWS:
                key = (same[0].dtype, torch.get_num_threads(), shape, rows)
                if key not in _measured:
                    _measured[key] = _fastest(same, rows)
                    fresh = True
                if rows >= max_rows:
                    break
        return fresh


def _fastest(weights: list[Tensor], rows: int) -> Spelling:
    x = torch.randn(rows, weights[0].shape[1], dtype=torch.float32).to(weights[0].dtype)
    spellings: tuple[Spelling, ...] = ("linear", "transposed", "padded") if rows % 2 else ("linear", "transposed")
    best = dict.fromkeys(spellings, float("inf"))
    for _ in range(_REPEATS):  # interleaved: a busy moment of the machine then hits all of them
        for spelling in spellings:
            start = time.perf_counter()
            for weight in weights:
                product(x, weight, spelling)
            best[spelling] = min(best[spelling], time.perf_counter() - start)
    return min(spellings, key=best.__getitem__)


class TunedLinear(nn.Module):
    """A linear layer without gradients whose product is looked up in a table.

    Args:
        weight: [O, I].
        bias: [O] or None.
        table: the engine's.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, table: ProductTable) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.table = table
        self.plan: list[Spelling] = []

    def prepare(self, max_rows: int) -> None:
        """Read the table once for every row count up to max_rows, so that a call costs no look-up in it."""
        self.plan = [self.table.spelling(max(rows, 1), self.weight) for rows in range(max_rows + 1)]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        spelling = self.plan[rows] if rows < len(self.plan) else self.table.spelling(rows, self.weight)
        if spelling == "linear":
            return F.linear(x, self.weight, self.bias)
        out = product(flat, self.weight, spelling)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1)
