"""Chained drafting with an MTP block over its own key-value cache.

Entry i of the drafter's cache is made from (h_i, E[t_{i+1}]) at position i, h_i the trunk's hidden; its output
predicts t_{i+2}. Entries up to the last verified hidden are exact. Drafting further than one token chains as EAGLE does
(Li et al. 2024, section 4.1): the block's own output stands in for the next trunk hidden, at the next position. Those
entries are provisional: after verification the same positions are written again from the trunk's hiddens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forerun.errors import UsageError
from forerun.mtp.block import MTPBlock

# (logits [R, Vd], depth counted from 0) -> (column of the chosen word [R], distribution [R, Vd] it was sampled from, or
# None if it was not sampled)
Choose = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]


class Drafts(NamedTuple):
    """`tokens` long [R, k], in the full vocabulary; `probs` [R, k, Vd], or None for drafts that were not sampled."""

    tokens: Tensor
    probs: Tensor | None


def check_draftable(block: MTPBlock) -> None:
    """Raise a `UsageError` for a block of several layers."""
    if len(block.layers) > 1:
        raise UsageError(
            f"drafting with an MTP block of num_layers={len(block.layers)} is not supported: "
            "use num_layers=1 or repeat_layer=true, or roll out with num_speculative_tokens=0"
        )


class Drafter:
    """Drafts with one MTP layer.

    Args:
        block: the MTP block, with one layer (which may be repeated over depths).
        embed: token ids [...] -> embeddings [..., d].
        project: hiddens [..., d] -> logits [..., Vd] over the draft vocabulary.
        decoder_kwargs: (positions long [R, T], live) -> keyword arguments with which the block's decoder layer writes
            the cache at these positions of rows 0..R-1 and attends to all positions up to each; no position that
            matters is `live` or beyond.
        vocabulary: long [Vd], ascending token ids that the logits stand for; None is the full vocabulary.

    Raises:
        UsageError: the block has several layers.
    """

    def __init__(
        self,
        block: MTPBlock,
        embed: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
        decoder_kwargs: Callable[[Tensor, int], dict[str, Any]],
        vocabulary: Tensor | None = None,
    ) -> None:
        check_draftable(block)
        self.block = block
        self.embed = embed
        self.project = project
        self.decoder_kwargs = decoder_kwargs
        self.vocabulary = vocabulary

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
        steps = torch.arange(hidden_states.shape[1], device=positions.device)
        at = positions[:, None] + steps
        for_head, for_next = self.block.step(1, hidden_states, self.embed(next_tokens), **self.decoder_kwargs(at, live))
        last = (counts - 1)[:, None, None].expand(-1, 1, hidden_states.shape[2])
        for_head, for_next = for_head.gather(1, last), for_next.gather(1, last)
        at = (positions + counts - 1)[:, None]
        tokens, probs = [], []
        for index in range(depth):
            column, prob = choose(self.project(for_head).squeeze(1), index)
            token = column if self.vocabulary is None else self.vocabulary[column]
            tokens.append(token)
            if prob is not None:
                probs.append(prob)
            if index + 1 < depth:
                at = at + 1
                for_head, for_next = self.block.step(
                    index + 2, for_next, self.embed(token[:, None]), **self.decoder_kwargs(at, live + index + 1)
                )
        return Drafts(torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None)
