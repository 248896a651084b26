"""What an engine should have drafted, told from the text it wrote: its steps replayed with our model, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.carrier import MTPCarrier
from forerun.models.trunk import base_model, decoder_inputs, embed, project
from forerun.mtp.block import MTPLayer


@dataclass
class Step:
    """One verified draft.

    Attributes:
        accepted: leading tokens of the draft that are the text's.
        margin: the least difference between the best and the second-best logit of those choices, and of the first
            wrong one.
    """

    accepted: int
    margin: float


@torch.no_grad()
def replay(model: MTPCarrier, prompt: Sequence[int], text: Sequence[int], k: int, advance: Sequence[int]) -> list[Step]:
    """The steps of a greedy engine that drafts k tokens and verifies them.

    Args:
        text: what the engine wrote.
        advance: per step, how many tokens the engine accepted; it then stands that many and one tokens further.

    Returns:
        the steps in order, without those at the end whose drafts reach beyond the text.
    """
    family, block = model.mtp_family, model.mtp
    layer = block.layer(1)  # engines run the first layer at every depth
    pre_norm_recurs = (family.engine_recurrence or family.recurrence) == "pre_norm"
    ids = torch.tensor([[*prompt, *text]])
    hidden = base_model(model)(input_ids=ids, use_cache=False).last_hidden_state
    inputs = combined(model, layer, hidden, ids)
    steps = []
    position = len(prompt) - 1  # of the last hidden that the trunk has verified; the token after it is known
    for accepted_there in advance:
        if position + 1 + k >= ids.shape[1]:
            break
        sequence, accepted, margin, right = inputs[:, : position + 1], 0, float("inf"), True
        for depth in range(1, k + 1):
            positions = torch.arange(sequence.shape[1])[None]
            out = layer.decoder(sequence, **decoder_inputs(model, sequence, positions))
            pre_norm = (out[0] if isinstance(out, tuple) else out)[:, -1:]
            post_norm = layer.final_norm(pre_norm)
            best, token = project(model, post_norm)[0, 0].topk(2)
            if right:
                margin = min(margin, float(best[0] - best[1]))
            right = right and bool(token[0] == ids[0, position + 1 + depth])
            accepted += right
            recurs = pre_norm if pre_norm_recurs else post_norm
            chained = layer.combine(recurs, embed(model, token[None, :1]))
            sequence = torch.cat([sequence, chained], dim=1)
        steps.append(Step(accepted, margin))
        position += accepted_there + 1
    return steps


def combined(model: MTPCarrier, layer: MTPLayer, hidden: Tensor, ids: Tensor) -> Tensor:
    """The decoder layer's input at every position but the last: the trunk's hidden there and the token after it."""
    embedded = embed(model, ids[:, 1:]).clone()
    if model.mtp_family.engine_zeroes_position_0:
        embedded[:, 0] = 0.0
    hidden = hidden[:, :-1]
    return layer.combine(hidden if model.mtp.undo_norm is None else model.mtp.undo_norm(hidden), embedded)
