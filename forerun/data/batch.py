"""The one batch format that engines take: rows of tokens, packed or padded, with every per-token tensor aligned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Batch:
    """Rows of tokens, each row holding one document or several.

    Attributes:
        input_ids: long [B, S].
        position_ids: long [B, S]; restarts at 0 with every document *and* where padding begins, so attention never
            crosses a boundary without an attention mask.
        document_ids: long [B, S]; equal inside a document, different between neighbours, -1 on padding.
        loss_mask: bool [B, S]; token j is a target that should be learned (response tokens in SFT and RL).
        extras: per-token tensors [B, S] aligned with input_ids (an entry at j belongs to token j, not to the
            position that predicts it): advantages, old_log_probs, rollout_log_probs, ...
    """

    input_ids: Tensor
    position_ids: Tensor
    document_ids: Tensor
    loss_mask: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_targets(self) -> int:
        """Targets of the ordinary next-token loss: supervised tokens that have a predecessor in their document."""
        return int(self.target_mask.sum())

    @property
    def target_mask(self) -> Tensor:
        """bool [B, S]: position i predicts a supervised token i+1 of its own document."""
        mask = torch.zeros_like(self.loss_mask)
        same = (self.document_ids[:, 1:] == self.document_ids[:, :-1]) & (self.document_ids[:, 1:] >= 0)
        mask[:, :-1] = self.loss_mask[:, 1:] & same
        return mask

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """What a function makes of every tensor."""
        return Batch(
            function(self.input_ids),
            function(self.position_ids),
            function(self.document_ids),
            function(self.loss_mask),
            {name: function(extra) for name, extra in self.extras.items()},
        )

    def to(self, device: torch.device | str) -> Batch:
        return self.map(lambda x: x.to(device))

    def padded(self, rows: int, length: int) -> Batch:
        """`rows` rows of `length` tokens: these, with padding behind and below them."""
        own_rows, own_length = self.input_ids.shape
        missing = (0, length - own_length, 0, rows - own_rows)
        position_ids = torch.arange(length, device=self.position_ids.device).repeat(rows, 1)
        position_ids[:, own_length:] -= own_length
        position_ids[:own_rows, :own_length] = self.position_ids
        return replace(
            self.map(lambda x: F.pad(x, missing)),
            position_ids=position_ids,
            document_ids=F.pad(self.document_ids, missing, value=-1),
        )
