"""The trunk's hiddens that the drafter has not seen yet.

Drafting takes those of the last step. While nothing is drafted they pile up, at the cost of a reference a step; when
drafting resumes, all but the last step's are fed to the drafter's cache in one go, and it stands as if it had never
paused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.rollout.native.model import ModelRunner
from forerun.rollout.native.prefill import Piece, cut
from forerun.rollout.native.sequence import Running


class PendingHiddens:
    """Hiddens of the decoding rows. Those of the last step lie here, older ones with their sequences (`Running.unfed`).

    Attributes:
        hidden: [R, T, d], the last step's; of row r the first counts[r].
        following: long [R, T], the token after each.
        counts: how many of them a row has, at least 1.
    """

    def __init__(self, runner: ModelRunner, chunk: int) -> None:
        self.runner = runner
        self.chunk = chunk
        device = runner.device
        self.hidden = torch.empty(0, 1, 0, device=device)
        self.following = torch.empty(0, 1, dtype=torch.long, device=device)
        self.counts: list[int] = []
        self._older: list[Tensor] = []  # [R, 1, d] of steps without drafts, not yet given to their sequences

    def join(self, running: Sequence[Running], hidden: Tensor, following: Tensor) -> None:
        """Rows [N, 1, d], [N, 1] came to the end; `running` are the rows before."""
        self._settle(running)
        if not self.counts:
            self.hidden, self.following = hidden, following
        else:
            width = self.hidden.shape[1] - 1
            self.hidden = torch.cat([self.hidden, F.pad(hidden, (0, 0, 0, width))])
            self.following = torch.cat([self.following, F.pad(following, (0, width))])
        self.counts += [1] * len(hidden)

    def keep(self, running: Sequence[Running], kept: Sequence[int]) -> None:
        """Of the rows, which held `running`, these stay, in this order."""
        self._settle(running)
        self.hidden, self.following = self.hidden[list(kept)], self.following[list(kept)]
        self.counts = [self.counts[row] for row in kept]

    def put_off(self, running: Sequence[Running]) -> None:
        """The next step drafts nothing: what lies here waits."""
        if self.hidden.shape[1] > 1:
            self._settle(running)
            for s, hidden, count in zip(running, self.hidden, self.counts, strict=True):
                s.put_off(hidden[:count].clone(), s.length - 1 - count)
        else:
            self._older.append(self.hidden)

    def feed(self, running: Sequence[Running]) -> None:
        """Feed the drafter's cache what was put off."""
        self._settle(running)
        rows = [row for row, s in enumerate(running) if s.unfed]
        wanted = []
        hiddens, following = [], []
        for row in rows:
            s = running[row]
            count = sum(map(len, s.unfed))
            wanted.append(Piece(row, s.unfed_from, count))
            hiddens += s.unfed
            text = [*s.prompt, *s.token_ids]
            following += text[s.unfed_from + 1 : s.unfed_from + 1 + count]
            s.unfed = []
        if not rows:
            return
        hidden = torch.cat(hiddens)
        tokens = torch.tensor(following, device=hidden.device)
        at = 0
        for pieces in cut(wanted, self.chunk):
            count = sum(piece.length for piece in pieces)
            self.runner.feed(hidden[None, at : at + count], tokens[None, at : at + count], pieces)
            at += count

    def _settle(self, running: Sequence[Running]) -> None:
        """Give the steps without drafts to their sequences, which may move or end."""
        if not self._older:
            return
        older = torch.cat(self._older, dim=1)
        self._older = []
        for s, hidden, count in zip(running, older, self.counts, strict=True):
            s.put_off(hidden.clone(), s.length - 1 - count - len(hidden))
