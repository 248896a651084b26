"""Prompts on their way into the cache: a chunk of tokens per step, so that the rows that decode go on meanwhile.

Equal prompts are computed once, as long as a row that holds them still runs: its keys and values are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.rollout.native.model import ModelRunner
from forerun.rollout.native.scheduler import Scheduler
from forerun.rollout.native.sequence import PromptEnd, Running


class Piece(NamedTuple):
    """`length` tokens of cache row `row`, from position `start` on."""

    row: int
    start: int
    length: int


def cut(pieces: Sequence[Piece], size: int) -> Iterator[list[Piece]]:
    """Lists of pieces of `size` tokens in all (the last one of what is left), in the same order."""
    made: list[Piece] = []
    room = size
    for row, start, left in pieces:
        while left:
            count = min(room, left)
            made.append(Piece(row, start, count))
            start, left, room = start + count, left - count, room - count
            if not room:
                yield made
                made, room = [], size
    if made:
        yield made


class Prefill:
    """Fills the cache for the scheduler's prefilling sequences.

    Args:
        runner: the model.
        scheduler: whose sequences.
        chunk: prompt tokens per step.
        drafts: whether the drafter will ever need the prompts.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, chunk: int, drafts: bool) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.chunk = chunk
        self.drafts = drafts

    def plan(self, weight_version: int) -> list[Piece]:
        """What the next forward takes."""
        first = len(self.scheduler.decoding)
        held = set(self._holders(weight_version))
        wanted = []
        for place, s in enumerate(self.scheduler.prefilling):
            if s.prefilled or s.prompt_key not in held:
                wanted.append(Piece(first + place, s.prefilled, len(s.prompt) - s.prefilled))
                held.add(s.prompt_key)
        return next(cut(wanted, self.chunk), [])

    def step(self, pieces: list[Piece], feed: bool, weight_version: int) -> list[Running]:
        """Compute the pieces; returns the sequences whose prompt is whole by now, which the scheduler has let join.

        Args:
            pieces: as planned.
            feed: whether to feed the drafter's cache, too; what it is not fed is put off.
            weight_version: of the weights that compute them.
        """
        if pieces:
            self._forward(pieces, feed, weight_version)
        joined = []
        holders = self._holders(weight_version)
        while self.scheduler.prefilling:
            s = self.scheduler.prefilling[0]
            if s.prompt_end is None:
                if s.prefilled or s.prompt_key not in holders:
                    break
                self._copy(holders[s.prompt_key], s)
            holders[s.prompt_key] = len(self.scheduler.decoding)
            joined.append(self.scheduler.join())
        return joined

    def _holders(self, weight_version: int) -> dict[int, int]:
        """Prompt key -> decoding row whose cache begins with that prompt, as the weights of now compute it."""
        if not self.runner.rewinds:
            return {}
        rows = enumerate(self.scheduler.decoding)
        return {s.prompt_key: row for row, s in rows if s.prompt_end and s.prompt_end.weight_version == weight_version}

    def _forward(self, pieces: list[Piece], feed: bool, weight_version: int) -> None:
        first = len(self.scheduler.decoding)
        sequences = [self.scheduler.prefilling[piece.row - first] for piece in pieces]
        tokens: list[int] = []
        following: list[int] = []
        for s, (_, start, count) in zip(sequences, pieces, strict=True):
            tokens.extend(s.prompt[start : start + count])
            after = s.prompt[start + 1 : start + count + 1]
            following.extend(after if len(after) == count else (*after, 0))
        # What the drafter has missed of a prompt has to come first.
        feed = self.drafts and feed and not any(s.unfed for s in sequences)
        device = self.runner.device
        hidden_states = self.runner.prefill(
            torch.tensor([tokens], device=device), torch.tensor([following], device=device) if feed else None, pieces
        )[0]
        at = 0
        ended: dict[int, Running] = {}
        for s, (_, start, count) in zip(sequences, pieces, strict=True):
            hidden = hidden_states[at : at + count]
            at += count
            s.prefilled = start + count
            if s.prefilled == len(s.prompt):
                ended[at - 1] = s
                hidden = hidden[:-1]  # the drafter takes the last one with the first new token
            if self.drafts and not feed and len(hidden):
                s.put_off(hidden.clone(), start)
        if ended:
            last = hidden_states[list(ended)]
            for s, own, logits in zip(ended.values(), last, logits_of(self.runner, last), strict=True):
                s.prompt_end = PromptEnd(own, logits, weight_version)

    def _copy(self, source: int, s: Running) -> None:
        """Give the first prefilling sequence the prompt that a decoding row holds."""
        holder = self.scheduler.decoding[source]
        count = len(s.prompt)
        self.runner.copy_row(source, len(self.scheduler.decoding), count)
        s.prefilled, s.prompt_end = count, holder.prompt_end
        missed = count - 1 - holder.unfed_from
        if holder.unfed and missed > 0:
            s.put_off(torch.cat(holder.unfed)[:missed], holder.unfed_from)


def logits_of(runner: ModelRunner, hidden_states: Tensor) -> Tensor:
    """Hiddens [..., d] -> logits [..., V], float32 or float64."""
    logits: Tensor = runner.head(hidden_states)
    return logits if logits.dtype == torch.float64 else logits.float()
