"""A batch as megatron-core's schedules take it: padded to what the layout divides, masked, in a rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from forerun.data.batch import Batch
from forerun.engines.shared_rows import RowParts, Rows


@dataclass
class MicroBatch:
    """Rows of one forward pass.

    Attributes:
        batch: as the caller gave it; what a loss function sees.
        padded: the same with padding behind rows and below them.
        rows: what this rank holds of `padded`.
        own: whether it counts; ranks that have too few micro-batches for a schedule run one for nothing.
    """

    batch: Batch
    padded: Batch
    rows: Rows
    own: bool

    def hidden_positions(self) -> Tensor:
        """bool [B, 1, S here, S], True where a position may not look: `Rows.visible` as megatron-core has it."""
        return ~self.rows.visible()

    def cut(self, x: Tensor) -> Tensor:
        """[B, S] of the padded rows -> of the caller's."""
        rows, length = self.batch.input_ids.shape
        return x[:rows, :length]


def common_shape(batches: Sequence[Batch], multiple: int) -> tuple[int, int]:
    """(rows, tokens) of the largest, tokens rounded up to a multiple."""
    longest = max(batch.input_ids.shape[1] for batch in batches)
    return max(len(batch.input_ids) for batch in batches), -(-longest // multiple) * multiple


def deal(
    batches: Sequence[Batch],
    replicas: int,
    replica: int,
    *,
    rounds_of: int = 1,
    multiple: int = 1,
    alike: bool = False,
    context: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """A data-parallel replica's micro-batches of a step, every replica the same number.

    Args:
        batches: all micro-batches of the step.
        replicas, replica: how many there are, and which this is; it gets batches[replica::replicas].
        rounds_of: the number of micro-batches is rounded up to a multiple of this (interleaved pipelines).
        multiple: lengths are rounded up to a multiple of this (sequence and context parallelism).
        alike: give all of them one shape, as pipeline stages that send activations of a fixed shape need.
        context: the ranks that share each row, if there are several.
    """
    rounds = -(-len(batches) // replicas)
    rounds = -(-rounds // rounds_of) * rounds_of
    dealt = []
    for turn in range(rounds):
        place = turn * replicas + replica
        batch = batches[min(place, len(batches) - 1)].to(device)
        padded = batch.padded(*common_shape(batches if alike else [batch], multiple))
        rows = Rows(padded) if context is None or context.size() == 1 else RowParts(padded, context)
        dealt.append(MicroBatch(batch, padded, rows, place < len(batches)))
    return dealt
