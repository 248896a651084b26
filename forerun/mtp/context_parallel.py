"""Context parallelism: a rank's part of rows cut in zig-zag, and what follows it.

Every document is cut into 2·size equal chunks, of which rank r holds chunks r and 2·size - 1 - r, so causal attention
costs every rank the same (Megatron-Core's and Transformer Engine's layout). An unpacked batch is the case of one
document as long as the row; in a packed row each document is cut by itself, and a rank holds its parts one after the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class ZigZagShard:
    """One rank's part of rows in zig-zag layout.

    Args:
        lengths: length of each document of the row, padding included; [S] for rows that are not packed.
        group: the context-parallel process group; None is the default group.

    Attributes:
        order: long [S], the places in the whole row that the ranks hold, one rank's after the other's.
        indices: long [S / size], this rank's, in its order.

    Raises:
        ValueError: a length does not divide into 2·size chunks.
    """

    def __init__(
        self, lengths: Sequence[int], group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        rank = dist.get_rank(group)
        chunks = 2 * self.size
        if uneven := [n for n in lengths if n % chunks]:
            raise ValueError(
                f"a document of {uneven[0]} tokens does not divide into {chunks} chunks: pad each document to a "
                f"multiple of {chunks} for context parallelism over {self.size} ranks"
            )
        whole = torch.tensor(list(lengths), device=device)
        # Per piece, two of each document: its length, its start here, its document's in the whole row; and, for every
        # rank, its chunk's number.
        self._length = (whole // chunks).repeat_interleave(2)
        self._start = self._length.cumsum(0) - self._length
        document = (whole.cumsum(0) - whole).repeat_interleave(2)
        ranks = torch.arange(self.size, device=device)
        chunk = torch.stack([ranks, chunks - 1 - ranks], dim=1).repeat(1, len(whole))
        self._chunk = chunk[rank]
        # Per position here: its piece, and its offset in it.
        self._piece = torch.arange(len(self._length), device=device).repeat_interleave(self._length)
        self._offset = torch.arange(len(self._piece), device=device) - self._start[self._piece]
        places = (document + chunk * self._length)[:, self._piece] + self._offset
        self.order, self.indices = places.flatten(), places[rank]

    def take(self, x: Tensor) -> Tensor:
        """This rank's part [B, S / size, ...] of whole rows [B, S, ...]."""
        return x.index_select(1, self.indices)

    def look_ahead(self, x: Tensor, n: int) -> Callable[[int], Tensor]:
        """`forerun.mtp.shift.LookAhead` over this shard's [..., S / size]: one exchange, of n tokens per chunk.

        Every rank of the group calls it. Zero past a document's end.
        """
        # The first n tokens of each chunk, of every rank: [ranks, ..., pieces, n], zero past a shorter chunk's end.
        steps = torch.arange(n, device=x.device)
        inside = steps < self._length[:, None]
        heads = (x[..., (self._start[:, None] + steps).clamp(max=x.shape[-1] - 1)] * inside).contiguous()
        gathered = [torch.empty_like(heads) for _ in range(self.size)]
        dist.all_gather(gathered, heads, group=self.group)
        # In document order: [..., documents, chunks, n]. Pieces alternate between a rank's early and late chunk.
        early = [h[..., 0::2, :] for h in gathered]
        late = [h[..., 1::2, :] for h in reversed(gathered)]
        known = torch.stack(early + late, dim=-2)
        extended = torch.cat([x, known.flatten(-3), x.new_zeros(*x.shape[:-1], 1)], dim=-1)

        def at(j: int) -> Tensor:
            length = self._length[self._piece]
            offset = self._offset + j
            chunk = self._chunk[self._piece] + offset // length
            place = ((self._piece // 2) * 2 * self.size + chunk) * n + offset % length
            here = self._start[self._piece] + offset
            index = torch.where(offset < length, here, x.shape[-1] + place)
            return extended[..., torch.where(chunk < 2 * self.size, index, extended.shape[-1] - 1)]

        return at
