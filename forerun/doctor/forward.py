"""Run trunk and block over text with every choice open: halves swapped, another recurrence, other targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier
from forerun.models.trunk import UndoNorm, base_model, decoder_inputs, embed, final_norm, project
from forerun.mtp.block import MTPLayer

Chaining = Literal["post_norm", "pre_norm", "trunk"]
"""What depth k > 1 takes: the hidden of depth k - 1 after or before the final norm, or the trunk's own again."""

POSITIONS_AT_ONCE = 256


@dataclass(frozen=True)
class Row:
    """One text through the trunk.

    Attributes:
        input_ids: long [1, S].
        hidden_states: [1, S, d], what the trunk hands its LM head.
        choices: long [S], the trunk's likeliest next token at every position.
    """

    input_ids: Tensor
    hidden_states: Tensor
    choices: Tensor


@dataclass
class Scores:
    """Of one depth over all rows: positions counted, and sums over them.

    Attributes:
        count: positions.
        loss: sum of the cross-entropies against the data tokens, nats.
        accepted: positions where the head's first choice is the trunk's.
    """

    count: int = 0
    loss: float = 0.0
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Share of positions where a greedy verify step would accept the draft."""
        return self.accepted / self.count if self.count else 0.0

    @property
    def mean_loss(self) -> float:
        """Nats per token."""
        return self.loss / self.count if self.count else 0.0

    @property
    def error(self) -> float:
        """Standard error of the acceptance, never quite zero."""
        smoothed = (self.accepted + 1) / (self.count + 2)
        return (smoothed * (1 - smoothed) / max(self.count, 1)) ** 0.5


@torch.no_grad()
def trunk_rows(model: MTPCarrier, rows: Sequence[Tensor]) -> list[Row]:
    """The trunk over each row of token ids (long [S])."""
    found = []
    for ids in rows:
        input_ids = ids[None]
        hidden = base_model(model)(input_ids=input_ids, use_cache=False).last_hidden_state
        found.append(Row(input_ids, hidden, _choices(model, hidden[0])))
    return found


def _choices(model: MTPCarrier, hidden: Tensor) -> Tensor:
    return torch.cat([project(model, part).argmax(dim=-1) for part in hidden.split(POSITIONS_AT_ONCE)])


@torch.no_grad()
def score(
    model: MTPCarrier, rows: Sequence[Row], depth: int, chaining: Chaining, shifts: Sequence[int] = (0,)
) -> list[Scores]:
    """Teacher-forced scores of one depth (from 1), one for each of `shifts`.

    Args:
        model: trunk and block.
        rows: the texts.
        depth: k; depths past the block's layers repeat the last one.
        chaining: what the depths after the first take.
        shifts: 0 for the token that depth k is to predict, t_{i+k+1}; -1 and 1 for the ones before and after it.
    """
    totals = [Scores() for _ in shifts]
    for row in rows:
        hidden = _depth_hidden(model, row, depth, chaining)
        # The same positions for every shift: those whose token is inside the row however it is shifted.
        last = row.input_ids.shape[1] - depth - 1 - max(*shifts, 0)
        for start in range(0, last, POSITIONS_AT_ONCE):
            stop = min(start + POSITIONS_AT_ONCE, last)
            logits = project(model, hidden[start:stop]).float()
            drafts = logits.argmax(dim=-1)
            for shift, total in zip(shifts, totals, strict=True):
                at = slice(start + depth + shift, stop + depth + shift)
                labels = row.input_ids[0, 1:][at]
                total.loss += float(F.cross_entropy(logits, labels, reduction="sum"))
                total.accepted += int((drafts == row.choices[at]).sum())
                total.count += stop - start
    return totals


def _depth_hidden(model: MTPCarrier, row: Row, depth: int, chaining: Chaining) -> Tensor:
    """h^k for the LM head, [S, d]; the last k positions, whose token lies past the row, mean nothing."""
    length = row.input_ids.shape[1]
    positions = torch.arange(length, device=row.input_ids.device)[None]
    inputs = decoder_inputs(model, row.hidden_states, positions)
    first = model.mtp.enter(row.hidden_states)
    hidden = for_head = first
    for k in range(1, depth + 1):
        ahead = F.pad(row.input_ids[:, k:], (0, min(k, length)))
        for_head, before_norm = model.mtp.layer(k)(hidden, embed(model, ahead), **inputs)
        hidden = {"post_norm": for_head, "pre_norm": before_norm, "trunk": first}[chaining]
    return for_head[0]


@contextmanager
def swapped_halves(model: MTPCarrier) -> Iterator[None]:
    """The block with the projection's input halves in the other order."""
    layers = [layer for layer in model.mtp.layers if isinstance(layer, MTPLayer)]
    before = [layer.concat_order for layer in layers]
    for layer in layers:
        layer.concat_order = "hidden_embed" if layer.concat_order == "embed_hidden" else "embed_hidden"
    try:
        yield
    finally:
        for layer, order in zip(layers, before, strict=True):
            layer.concat_order = order


@contextmanager
def other_trunk_hidden(model: MTPCarrier) -> Iterator[None]:
    """The block with the trunk's hidden after its final norm where the record says before, and the other way round.

    Raises:
        UsageError: the trunk's norm cannot be undone.
    """
    before = model.mtp.undo_norm
    if before is None:
        norm = final_norm(base_model(model))
        if norm is None:
            raise UsageError("the trunk has no final norm")
        model.mtp.undo_norm = UndoNorm(norm)
    else:
        model.mtp.undo_norm = None
    try:
        yield
    finally:
        model.mtp.undo_norm = before


@contextmanager
def shuffled(model: MTPCarrier) -> Iterator[None]:
    """The block with the entries of every matrix in random order: the same numbers, and nothing of what they say."""
    generator = torch.Generator().manual_seed(0)
    matrices = [parameter for parameter in model.mtp.parameters() if parameter.dim() >= 2]
    before = [parameter.detach().clone() for parameter in matrices]
    try:
        with torch.no_grad():
            for parameter in matrices:
                order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
                parameter.copy_(parameter.flatten()[order].view_as(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, original in zip(matrices, before, strict=True):
                parameter.copy_(original)


def constant_guess(rows: Sequence[Row]) -> float:
    """Acceptance of always drafting the one token that the trunk chooses most often: what knowing nothing is worth."""
    choices = torch.cat([row.choices for row in rows])
    return float(choices.bincount().max()) / len(choices)
