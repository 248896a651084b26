"""Chained drafting with an MTP block over its own key-value caches, one for each of its layers.

Entry i of the first layer's cache is made from (h_i, E[t_{i+1}]) at position i, h_i the trunk's hidden; its output
predicts t_{i+2}. Entry i of layer k is made from (h^{k-1}_i, E[t_{i+k}]) at the same position, as in training, and
predicts t_{i+k+1}. Drafting further than there are layers chains as EAGLE does (Li et al. 2024, section 4.1): the last
layer's own output stands in for the next hidden, at the next position.

Entries whose tokens are verified are exact; those made from drafts are provisional, and written again after
verification. With n tokens known, layer k is exact up to position n - k: each layer lags one behind the layer below. So
what a block of D layers is given starts D - 1 positions early. The hiddens and tokens of these come from `History`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.mtp.block import MTPBlock

# (logits [R, Vd], depth counted from 0) -> (column of the chosen word [R], distribution [R, Vd] it was sampled from, or
# None if it was not sampled)
Choose = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]


class Drafts(NamedTuple):
    """`tokens` long [R, k], in the full vocabulary; `probs` [R, k, Vd], or None for drafts that were not sampled."""

    tokens: Tensor
    probs: Tensor | None


class History:
    """The trunk's hiddens and the tokens after them, by row and position.

    Args:
        rows: sequences that can run at once.
        capacity: positions per row.
        size: d.
        dtype: of the hiddens.
        device: of both.
    """

    def __init__(self, rows: int, capacity: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.hidden_states = torch.zeros(rows, capacity, size, dtype=dtype, device=device)
        self.next_tokens = torch.zeros(rows, capacity, dtype=torch.long, device=device)

    def resize(self, rows: int, capacity: int) -> None:
        """Take another size, and keep what the rows hold as far as it fits."""
        self.hidden_states = resized(self.hidden_states, rows, capacity)
        self.next_tokens = resized(self.next_tokens, rows, capacity)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row."""
        for kept in (self.hidden_states, self.next_tokens):
            kept[target, :length] = kept[source, :length]


def resized(old: Tensor, *sizes: int) -> Tensor:
    """Of other sizes in the first dimensions, with as much of `old` as fits, and zeros."""
    new = old.new_zeros(*sizes, *old.shape[len(sizes) :])
    kept = tuple(slice(min(pair)) for pair in zip(sizes, old.shape, strict=False))
    new[kept] = old[kept]
    return new


class Drafter:
    """Drafts with an MTP block.

    Args:
        block: the MTP block.
        embed: token ids [...] -> embeddings [..., d].
        project: hiddens [..., d] -> logits [..., Vd] over the draft vocabulary.
        decoder_kwargs: (positions long [R, T], live) -> keyword arguments with which the block's decoder layers write
            their caches at these positions of rows 0..R-1 and attend to all positions up to each; no position that
            matters is `live` or beyond.
        vocabulary: long [Vd], ascending token ids that the logits stand for; None is the full vocabulary.

    Attributes:
        history: to be set before the first call where the block has several layers.
    """

    def __init__(
        self,
        block: MTPBlock,
        embed: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
        decoder_kwargs: Callable[[Tensor, int], dict[str, Any]],
        vocabulary: Tensor | None = None,
    ) -> None:
        self.block = block
        self.layers = len(block.layers)
        self.embed = embed
        self.project = project
        self.decoder_kwargs = decoder_kwargs
        self.vocabulary = vocabulary
        self.history: History | None = None

    def feed(
        self,
        hidden_states: Tensor,
        next_tokens: Tensor,
        pieces: Sequence[tuple[int, int, int]],
        decoder_kwargs: Callable[[Sequence[tuple[int, int, int]]], dict[str, Any]],
    ) -> None:
        """Write the entries of pieces of text, laid end to end. Each continues what its row was fed before.

        Args:
            hidden_states: [1, N, d], the trunk's.
            next_tokens: long [1, N]; where the next token is not known yet any id will do, as that entry is written
                again by the first draft.
            pieces: (row, first position, number of tokens).
            decoder_kwargs: pieces -> keyword arguments for the block's decoder layers.
        """
        if self.layers > 1:
            assert self.history is not None
            at = _places(pieces, self.history.next_tokens.device)
            self.history.hidden_states[at] = hidden_states[0]
            self.history.next_tokens[at] = next_tokens[0]
            pieces = [
                (row, start - early, count + early)
                for row, start, count in pieces
                for early in (min(self.layers - 1, start),)
            ]
            at = _places(pieces, self.history.next_tokens.device)
            hidden_states, next_tokens = self.history.hidden_states[at][None], self.history.next_tokens[at][None]
        kwargs = decoder_kwargs(pieces)
        for depth in range(1, self.layers + 1):
            _, hidden_states = self.block.step(depth, hidden_states, self.embed(next_tokens), **kwargs)
            # The last depth - 1 of a piece read tokens that are not there yet. They are written again, see above.
            next_tokens = F.pad(next_tokens[:, 1:], (0, 1))

    def draft(
        self,
        hidden_states: Tensor,
        next_tokens: Tensor,
        positions: Tensor,
        counts: Tensor,
        live: int,
        depth: int,
        choose: Choose,
    ) -> Drafts:
        """Write the entries that verification made exact, and draft `depth` tokens for each row.

        All layers' entries are written, also of those that this depth does not reach: a later call may.

        Args:
            hidden_states: [R, T, d], the trunk's hiddens since the last call.
            next_tokens: long [R, T]; entry j is the token after hidden j.
            positions: long [R], position of each row's first hidden.
            counts: long [R] in 1..T, T the largest: how many of a row's T entries exist. What is written for the others
                lies behind the row's end, and is overwritten before anything attends to it.
            live: the largest of positions + counts, as an int (so that the device need not be asked).
            depth: tokens to draft, at least 1.
            choose: picks a word from the draft's logits.
        """
        if self.layers > 1:
            hidden_states, next_tokens, positions, counts = self._from_earlier(
                hidden_states, next_tokens, positions, counts
            )
        steps = torch.arange(hidden_states.shape[1], device=positions.device)
        kwargs = self.decoder_kwargs(positions[:, None] + steps, live)
        last = (counts - 1)[:, None, None].expand(-1, 1, hidden_states.shape[2])
        at = (positions + counts - 1)[:, None]
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for index in range(max(depth, self.layers)):
            if index < self.layers:
                for_head, hidden_states = self.block.step(index + 1, hidden_states, self.embed(next_tokens), **kwargs)
                for_head = for_head.gather(1, last)
                if index + 1 == self.layers:
                    hidden_states = hidden_states.gather(1, last)
            else:
                at = at + 1
                for_head, hidden_states = self.block.step(
                    index + 1,
                    hidden_states,
                    self.embed(tokens[-1][:, None]),
                    **self.decoder_kwargs(at, live + index + 1 - self.layers),
                )
            if index < depth:
                column, prob = choose(self.project(for_head).squeeze(1), index)
                tokens.append(column if self.vocabulary is None else self.vocabulary[column])
                if prob is not None:
                    probs.append(prob)
            if index + 1 < self.layers:
                next_tokens = F.pad(next_tokens[:, 1:], (0, 1))
                if index < depth:
                    next_tokens.scatter_(1, last[..., 0], tokens[-1][:, None])
        return Drafts(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None)

    def _from_earlier(
        self, hidden_states: Tensor, next_tokens: Tensor, positions: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of `draft`, beginning D - 1 positions earlier, or at the row's start."""
        assert self.history is not None
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        at = positions[:, None] + torch.arange(hidden_states.shape[1], device=positions.device)
        self.history.hidden_states[rows, at] = hidden_states
        self.history.next_tokens[rows, at] = next_tokens
        early = positions.clamp(max=self.layers - 1)
        positions, counts = positions - early, counts + early
        at = positions[:, None] + torch.arange(int(counts.max()), device=positions.device)
        return self.history.hidden_states[rows, at], self.history.next_tokens[rows, at], positions, counts


def _places(pieces: Sequence[tuple[int, int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and position of every token of the pieces, long [N] each."""
    rows = torch.cat([torch.full((count,), row) for row, _, count in pieces])
    positions = torch.cat([torch.arange(start, start + count) for _, start, count in pieces])
    return rows.to(device), positions.to(device)
