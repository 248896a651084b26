"""Logit bias, minimum length and repetition penalty: what changes the logits before they become a distribution.

The target's logits and the draft's go through the same changes, so drafts stay likely to be accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.rollout.native.sequence import Running
from forerun.speculative.sampling import add_to_logits, penalise_repetition


class Adjustments:
    """The changes that the running rows ask for.

    Args:
        rows: the running requests.
        vocab_size: words of the target's logits.
        draft_vocabulary: long [Vd] ascending, the words of the draft's logits; None if they are the target's.
        device: of the logits.
    """

    def __init__(
        self, rows: Sequence[Running], vocab_size: int, draft_vocabulary: Tensor | None, device: torch.device
    ) -> None:
        self.rows = rows
        self.draft_vocabulary = draft_vocabulary
        self.device = device
        settings = [row.request.sampling for row in rows]
        self.bias: Tensor | None = None  # [R, 1, M]
        if any(s.logit_bias for s in settings):
            self.bias_tokens = self._padded([list(s.logit_bias) for s in settings])
            values = [list(s.logit_bias.values()) for s in settings]
            width = self.bias_tokens.shape[1]
            padded = [[*row, *[0.0] * (width - len(row))] for row in values]
            self.bias = torch.tensor(padded, device=device)[:, None]
        # Words that may not be sampled until the text has its minimum length.
        stops = [[t for t in s.stop_token_ids if 0 <= t < vocab_size] if s.min_tokens else [] for s in settings]
        self.min_tokens = [s.min_tokens if words else 0 for s, words in zip(settings, stops, strict=True)]
        self.left: Tensor | None = None  # long [R], tokens that the text lacks until it may end
        if any(self.min_tokens):
            self.stops = self._padded(stops)
            left = [least - len(r.token_ids) for least, r in zip(self.min_tokens, rows, strict=True)]
            self.left = torch.tensor(left, device=device)
        self.seen: Tensor | None = None  # bool [R, V]
        if any(s.repetition_penalty != 1 for s in settings):
            self.penalty = torch.tensor([s.repetition_penalty for s in settings], device=device)
            self.seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
            for seen, row in zip(self.seen, rows, strict=True):
                seen[torch.tensor([*row.prompt, *row.token_ids], device=device)] = True
        self._drafted: Tensor | None = None  # `seen` with this step's drafts, over the draft vocabulary

    @property
    def none(self) -> bool:
        """Whether nothing is changed."""
        return self.bias is None and self.seen is None and self.left is None

    def target(self, logits: Tensor, drafts: Tensor) -> Tensor:
        """Logits [R, K + 1, V] after drafts long [R, K], changed; at position j the drafts before it are text."""
        if self.bias is not None:
            logits = add_to_logits(logits, self.bias_tokens, self.bias.expand(-1, logits.shape[1], -1))
        bans = self._bans(0, logits.shape[1])
        if bans is not None:
            logits = add_to_logits(logits, self.stops, bans)
        if self.seen is not None:
            seen = self.seen[:, None].repeat(1, logits.shape[1], 1)
            for j, draft in enumerate(drafts.T, start=1):
                seen[:, j:].scatter_(2, draft[:, None, None].expand(-1, seen.shape[1] - j, 1), True)
            logits = penalise_repetition(logits, seen, self.penalty)
        return logits

    def draft(self, logits: Tensor, index: int) -> Tensor:
        """The draft's logits [R, Vd] at depth index + 1, changed."""
        logits = logits[:, None]
        if self.bias is not None:
            columns, there = self._columns(self.bias_tokens)
            logits = add_to_logits(logits, columns, self.bias.where(there[:, None], 0.0))
        bans = self._bans(index, 1)
        if bans is not None:
            columns, there = self._columns(self.stops)
            logits = add_to_logits(logits, columns, bans.where(there[:, None], 0.0))
        if self.seen is not None:
            if index == 0 or self._drafted is None:
                seen = self.seen
                self._drafted = seen.clone() if self.draft_vocabulary is None else seen[:, self.draft_vocabulary]
            logits = penalise_repetition(logits, self._drafted[:, None], self.penalty)
        return logits[:, 0]

    def note_draft(self, columns: Tensor) -> None:
        """These columns [R] of the draft's logits were chosen."""
        if self._drafted is not None:
            self._drafted.scatter_(1, columns[:, None], True)

    def note(self, tokens: Tensor, counts: Tensor) -> None:
        """So many tokens [R] became text, these [R, T]; of which a row may repeat some."""
        if self.left is not None:
            self.left = self.left - counts
        if self.seen is not None:
            self.seen.scatter_(1, tokens, True)

    def _bans(self, start: int, count: int) -> Tensor | None:
        """[R, count, 1]: -inf where a row's text, `start` and more tokens on from now, is still too short to end."""
        longer = (least > len(r.token_ids) + start for least, r in zip(self.min_tokens, self.rows, strict=True))
        if self.left is None or not any(longer):
            return None
        early = torch.arange(start, start + count, device=self.device) < self.left[:, None]
        return torch.zeros(early.shape, device=self.device).masked_fill_(early, -math.inf)[..., None]

    def _padded(self, words: list[list[int]]) -> Tensor:
        """Long [R, M]; a shorter row repeats its last word, an empty one holds zeros."""
        width = max(map(len, words))
        rows = [[*row, *[row[-1] if row else 0] * (width - len(row))] for row in words]
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def _columns(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the draft's logits for tokens [R, M], and which of the tokens it has at all."""
        if self.draft_vocabulary is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        columns = torch.searchsorted(self.draft_vocabulary, tokens).clamp_(max=len(self.draft_vocabulary) - 1)
        return columns, self.draft_vocabulary[columns] == tokens
