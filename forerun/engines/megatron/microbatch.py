"""A batch as megatron-core's schedules take it: padded to what the layout divides, masked, in a rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.data.batch import Batch
from forerun.engines.megatron.attention import hidden_positions
from forerun.engines.megatron.context import places
from forerun.mtp.shift import PADDING


@dataclass
class MicroBatch:
    """Rows of one forward pass.

    Attributes:
        batch: as the caller gave it; what a loss function sees.
        padded: the same with padding behind rows and below them.
        own: whether it counts; ranks that have too few micro-batches for a schedule run one for nothing.
        size, rank: of context parallelism.
    """

    batch: Batch
    padded: Batch
    own: bool
    size: int = 1
    rank: int = 0

    @cached_property
    def places(self) -> Tensor:
        """long [S / size]: the places of the padded rows that this rank holds."""
        return places(self.padded.input_ids.shape[1], self.size, self.rank).to(self.padded.input_ids.device)

    def take(self, x: Tensor) -> Tensor:
        """This rank's part [B, S / size] of padded rows [B, S]."""
        return x if self.size == 1 else x.index_select(1, self.places)

    @cached_property
    def attention_mask(self) -> Tensor:
        """bool [B, 1, S / size, S], True where a position may not look (`attention.hidden_positions`)."""
        return hidden_positions(self.padded.document_ids, self.size, self.rank)

    def cut(self, x: Tensor) -> Tensor:
        """[B, S] of the padded rows -> of the caller's."""
        rows, length = self.batch.input_ids.shape
        return x[:rows, :length]


def pad(batch: Batch, rows: int, length: int) -> Batch:
    """A batch of `rows` rows of `length` tokens, without the extras. Padding is as `forerun.data.batch.Batch` says."""
    missing = (0, length - batch.input_ids.shape[1], 0, rows - batch.input_ids.shape[0])
    document_ids = F.pad(batch.document_ids, missing, value=PADDING)
    position_ids = F.pad(batch.position_ids, missing)
    padding = document_ids == PADDING
    position_ids = torch.where(padding, (padding.cumsum(1) - 1).clamp(min=0), position_ids)
    return Batch(F.pad(batch.input_ids, missing), position_ids, document_ids, F.pad(batch.loss_mask, missing))


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
    context: tuple[int, int] = (1, 0),
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """A data-parallel replica's micro-batches of a step, every replica the same number.

    Args:
        batches: all micro-batches of the step.
        replicas, replica: how many there are, and which this is; it gets batches[replica::replicas].
        rounds_of: the number of micro-batches is rounded up to a multiple of this (interleaved pipelines).
        multiple: lengths are rounded up to a multiple of this (sequence and context parallelism).
        alike: give all of them one shape, as pipeline stages that send activations of a fixed shape need.
        context: (size, rank) of context parallelism.
    """
    rounds = -(-len(batches) // replicas)
    rounds = -(-rounds // rounds_of) * rounds_of
    dealt = []
    for turn in range(rounds):
        place = turn * replicas + replica
        batch = batches[min(place, len(batches) - 1)].to(device)
        shape = common_shape(batches if alike else [batch], multiple)
        dealt.append(MicroBatch(batch, pad(batch, *shape), place < len(batches), *context))
    return dealt
