"""Sums per depth that add up exactly over micro-batches and ranks, and the figures they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

FIELDS = (
    "count",  # valid positions
    "loss",  # sum of the loss
    "label_hits",  # top-1 equals the data token
    "teacher_count",  # valid positions where the trunk's own distribution was compared
    "trunk_hits",  # top-1 equals the trunk's top-1
    "overlap",  # sum of min(p, q): expected acceptance under full rejection sampling
    "chain_count",  # positions valid at this depth and every one before
    "chain_hits",  # ... where every depth up to this one agrees with the trunk's top-1
)


def reduce_counts(
    counts: Sequence[int], group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> list[int]:
    """Counts summed over a process group's ranks. Every rank calls it, before the step, also one that has no rows.

    Args:
        counts: this rank's, over all its micro-batches: N_k from `forerun.mtp.shift.depth_counts`, or any others that a
            loss of the step divides by.
        group: data- and context-parallel ranks, whose gradients are then *summed*; None is the default group.
        device: where the group's backend works, "cuda" for NCCL.
    """
    total = torch.tensor(list(counts), dtype=torch.long, device=device)
    dist.all_reduce(total, group=group)
    return total.tolist()


@dataclass
class MTPStats:
    """Sums of `FIELDS` for each depth: float64 [D, len(FIELDS)]."""

    sums: Tensor

    @classmethod
    def zeros(cls, num_depths: int, device: torch.device | str = "cpu") -> MTPStats:
        return cls(torch.zeros(num_depths, len(FIELDS), dtype=torch.float64, device=device))

    def add(self, depth: int, **values: Tensor | float) -> None:
        """Add to one depth's sums (from 1)."""
        for name, value in values.items():
            self.sums[depth - 1, FIELDS.index(name)] += torch.as_tensor(value, device=self.sums.device).detach()

    def merge(self, other: MTPStats) -> MTPStats:
        """The sums of both: of two micro-batches, for instance."""
        return MTPStats(self.sums + other.sums.to(self.sums.device))

    def reduce(self, group: dist.ProcessGroup | None = None) -> MTPStats:
        """The sums over a process group's ranks. Every rank calls it."""
        sums = self.sums.clone()
        dist.all_reduce(sums, group=group)
        return MTPStats(sums)

    def compute(self) -> dict[str, float | None]:
        """Figures `mtp/depth_{k}/...` and the teacher-forced acceptance length; None where nothing was seen.

        The acceptance length is 1 + sum over k of P(depths 1..k all agree with the trunk's greedy choice): the mean
        number of tokens a greedy verify step would emit at these positions when drafting D tokens.
        """
        figures: dict[str, float | None] = {}
        length: float | None = 1.0
        for depth, row in enumerate(self.sums.tolist(), start=1):
            sums = dict(zip(FIELDS, row, strict=True))

            def ratio(name: str, count: str, sums: dict[str, float] = sums) -> float | None:
                return sums[name] / sums[count] if sums[count] else None

            figures[f"mtp/depth_{depth}/loss"] = ratio("loss", "count")
            figures[f"mtp/depth_{depth}/label_top1"] = ratio("label_hits", "count")
            figures[f"mtp/depth_{depth}/trunk_top1"] = ratio("trunk_hits", "teacher_count")
            figures[f"mtp/depth_{depth}/expected_acceptance"] = ratio("overlap", "teacher_count")
            chained = ratio("chain_hits", "chain_count")
            length = None if chained is None or length is None else length + chained
        figures["mtp/acceptance_length"] = length
        return figures

    def known(self) -> dict[str, float]:
        """`compute` without what is None."""
        return {name: value for name, value in self.compute().items() if value is not None}
