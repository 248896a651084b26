"""The one batch format that engines take: rows of tokens, packed or padded, with every per-token tensor aligned."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
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

    def to(self, device: torch.device | str) -> Batch:
        return Batch(
            self.input_ids.to(device),
            self.position_ids.to(device),
            self.document_ids.to(device),
            self.loss_mask.to(device),
            {k: v.to(device) for k, v in self.extras.items()},
        )
