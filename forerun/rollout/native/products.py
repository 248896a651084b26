"""Matrix products with few rows, written in whichever way this machine is fast at.

On a CPU a product of a weight with 1 to 128 rows costs, depending on how it is written and on the shape, between one
and ten times the reading of the weight, which decides how fast decoding is and whether verifying drafts can pay. The
same product is therefore measured in three spellings and the fastest taken:

- `linear`: F.linear(x, W)
- `transposed`: (W @ x.T).T
- `packed`: oneDNN's product over a copy of W in oneDNN's blocked layout; the weight is then held twice

Each may also run with more rows, of zeros, where that is faster: 5 rows can cost less than 1.

The spellings round differently. A forced choice makes runs reproducible where a measured one could flip.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.rollout.native import huge_pages

Spelling = Literal["linear", "transposed", "packed"]
Choice = Literal["measure", "linear", "transposed", "packed"]

# Row counts that are measured. A count between two of them takes the next one's plan, one above all the last one's.
MEASURED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
_SAMPLES = 6
# A spelling that is this much slower than the best in its first round is not timed again.
_HOPELESS = 1.3
# Rows are added only where that promises to be this much faster: adding them costs something, too.
_WORTH_PADDING = 0.93
# Another spelling than `packed` must be this much faster: one spelling for all row counts rounds alike for all of them.
_WORTH_LEAVING_PACKED = 0.9
# As many layers of a shape are timed as hold this many bytes, so that weights come from memory as in a decoding step.
# Where the model has fewer, clones make up for them.
_TIMED_BYTES = 32 * 2**20
_MOST_CLONES = 16
# The row count that oneDNN lays a packed weight out for. For one it is the plain layout; all others share one, which
# serves one row as well.
_PACKED_FOR_ROWS = 32


class Plan(NamedTuple):
    """How to compute a product: `rows` is what to fill up to with zeros, 0 for no filling up."""

    spelling: Spelling
    rows: int = 0


_Key = tuple[torch.dtype, int, torch.Size]
_measured: dict[_Key, list[Plan]] = {}


def can_pack(weight: Tensor) -> bool:
    """Whether this machine's torch has oneDNN's packed product for the weight."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(weight: Tensor) -> Tensor:
    """A copy of a weight [O, I] in oneDNN's layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I] times a packed weight [O, I] transposed, plus bias [O] -> [..., O]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def transposed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I] times weight [O, I] transposed, plus bias [O] -> [..., O], contiguous."""
    out = (weight @ x.reshape(-1, x.shape[-1]).T).T.contiguous()
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], -1)


class TunedLinear(nn.Module):
    """A linear layer without gradients whose product is written as the table of its engine says.

    Args:
        weight: [O, I].
        bias: [O] or None.
        table: the engine's; it keeps a list of the layers that use it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, table: ProductTable) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.table = table
        # By row count, the last one for more.
        self.plans = [Plan("linear")]
        self.packed: Tensor | None = None
        table.linears.append(self)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O]."""
        rows = x.numel() // x.shape[-1]
        spelling, padded = self.plans[rows] if rows < len(self.plans) else self.plans[-1]
        if padded <= rows:
            return self.spelled(x, spelling)
        filled, head = self.table.filled_up(x, rows, padded)
        head.copy_(x.view(head.shape))
        return self.spelled(filled, spelling)[:rows].view(*x.shape[:-1], -1)

    def spelled(self, x: Tensor, spelling: Spelling) -> Tensor:
        """`forward` in the given spelling."""
        if spelling == "packed":
            return packed_product(x, self.packed if self.packed is not None else self.pack(), self.bias)
        if spelling == "transposed":
            return transposed_product(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> Tensor:
        """Make the packed copy."""
        self.packed = pack(self.weight)
        return self.packed

    def blocks(self) -> list[tuple[int, int]]:
        """Where the weight and its packed copy lie: (address, bytes)."""
        if self.weight.device.type != "cpu":
            return []
        found = [(self.weight.data_ptr(), self.weight.nbytes)]
        if self.packed is not None:
            found.append((torch.ops.mkldnn.data_ptr(self.packed), torch.ops.mkldnn._nbytes(self.packed)))
        return found

    def drop_packed(self) -> None:
        """Forget the packed copy; it is made again from the weight when it is needed."""
        self.packed = None


class ProductTable:
    """Which spelling to use for which weight and row count. One table serves an engine.

    Args:
        choice: "measure", or one spelling for every product (`packed` where the machine has it, else `linear`).
    """

    def __init__(self, choice: Choice = "measure") -> None:
        self.choice: Choice = choice
        self.linears: list[TunedLinear] = []
        self._filled: dict[tuple[int, int, int, torch.dtype], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def prepare(self) -> None:
        """Give every layer its plan, and pack the weights whose plan asks for it.

        What this process has not measured yet with this number of threads is measured.
        """
        before = [linear.packed for linear in self.linears]
        shapes: dict[_Key, list[TunedLinear]] = {}
        for linear in self.linears:
            key = (linear.weight.dtype, torch.get_num_threads(), linear.weight.shape)
            shapes.setdefault(key, []).append(linear)
        for key, linears in shapes.items():
            plans = self._plans(key, linears)
            packs = any(plan.spelling == "packed" for plan in plans)
            for linear in linears:
                linear.plans = plans
                if not packs:
                    linear.drop_packed()
                elif linear.packed is None:
                    linear.pack()
        if any(linear.packed is not old for linear, old in zip(self.linears, before, strict=True)):
            huge_pages.advise(block for linear in self.linears for block in linear.blocks())

    def filled_up(self, like: Tensor, rows: int, padded: int) -> tuple[Tensor, Tensor]:
        """Zeros [padded, I] in which to put an input of `rows` rows, and the view of these rows.

        They are kept: with F.pad the filling up costs three times as much, which is 3 % of a decoding step.
        """
        key = (rows, padded, like.shape[-1], like.dtype)
        found = self._filled.get(key)
        if found is None:
            with torch.inference_mode(False):  # they outlive the call, whatever mode that runs in
                filled = torch.zeros(padded, like.shape[-1], dtype=like.dtype, device=like.device)
                found = self._filled[key] = filled, filled[:rows]
        return found

    def drop_packed(self) -> None:
        """To be called after the weights changed, or to free memory."""
        for linear in self.linears:
            linear.drop_packed()

    def _plans(self, key: _Key, linears: list[TunedLinear]) -> list[Plan]:
        weight = linears[0].weight
        if self.choice == "packed":
            return [Plan("packed" if can_pack(weight) else "linear")]
        if self.choice != "measure":
            return [Plan(self.choice)]
        if weight.device.type != "cpu":
            return [Plan("linear")]
        if key not in _measured:
            count = -(-_TIMED_BYTES // weight.nbytes)
            timed = linears[:count]
            while len(timed) < min(count, _MOST_CLONES):
                timed.append(TunedLinear(weight.clone(), None, ProductTable(self.choice)))
            if can_pack(weight):
                for linear in timed:
                    linear.pack()
            huge_pages.advise(block for linear in timed for block in linear.blocks())
            _measured[key] = choose([measure(timed, rows) for rows in MEASURED_ROWS])
        return _measured[key]


def choose(times: Sequence[dict[Spelling, float]]) -> list[Plan]:
    """The plan for every row count from 0 to the last measured one, from the times at MEASURED_ROWS."""
    best = [_best(at) for at in times]
    plans: list[Plan] = []
    for i, rows in enumerate(MEASURED_ROWS):
        own, filled = i, min(range(i, len(times)), key=lambda j: times[j][best[j]])
        if times[filled][best[filled]] < _WORTH_PADDING * times[own][best[own]]:
            plan = Plan(best[filled], MEASURED_ROWS[filled])
        else:
            plan = Plan(best[own])
        plans += [plan] * (rows + 1 - len(plans))
    return plans


def _best(times: dict[Spelling, float]) -> Spelling:
    fastest = min(times, key=times.__getitem__)
    packed = times.get("packed", float("inf"))
    return fastest if times[fastest] < _WORTH_LEAVING_PACKED * packed else "packed"


def measure(linears: Sequence[TunedLinear], rows: int) -> dict[Spelling, float]:
    """Seconds that each spelling takes for a layer of this shape: the fastest call of several over different layers.

    They are packed already where they can be.
    """
    weight = linears[0].weight
    x = torch.randn(rows, weight.shape[1], dtype=torch.float32).to(weight.dtype)
    spellings: list[Spelling] = ["linear", "transposed"]
    if can_pack(weight):
        spellings.append("packed")
    best: dict[Spelling, float] = dict.fromkeys(spellings, float("inf"))
    for _ in range(max(2, -(-_SAMPLES // len(linears)))):
        for spelling in spellings:
            for linear in linears:
                start = time.perf_counter()
                linear.spelled(x, spelling)
                best[spelling] = min(best[spelling], time.perf_counter() - start)
        spellings = [s for s in spellings if best[s] < _HOPELESS * min(best.values())]
    return best
