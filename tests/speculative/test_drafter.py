"""Drafting over the cache equals drafting without one, position by position, while rows accept different counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.models.carrier import MTPCarrier
from forerun.models.trunk import base_model, decoder_inputs, embed, project
from forerun.rollout.native.engine import NativeEngine
from forerun.speculative.drafter import Drafter, Drafts
from tests.rollout import tiny

# Kind, MTP layers, whether one serves all depths.
BLOCKS = [
    ("llama", 1, False),
    ("qwen3", 1, False),
    ("llama", 2, True),
    ("llama", 2, False),
    ("llama", 3, False),
    ("deepseek_v3", 2, False),
    ("ernie4_5", 1, False),  # no final norm
    ("glm4_moe", 2, False),
    ("longcat_flash", 1, False),
    ("mimo", 2, False),  # reads the hidden before the trunk's norm
    ("qwen3_next", 2, False),  # depths share projection and norms
]


@torch.no_grad()
def drafted_without_cache(model: MTPCarrier, tokens: list[int], chosen: list[int], depth: int) -> list[Tensor]:
    """The draft's logits at depths 1..depth after `tokens`, `chosen` being drafted: everything from the start.

    Depth k takes h^{k-1}_i and t_{i+k} at position i, as in training. Past the last layer that one runs on, at the next
    position, with its own output as the hidden.
    """
    block, layers = model.mtp, len(model.mtp.layers)
    count = len(tokens) - 1
    ids = torch.tensor([tokens + chosen])
    hidden = block.enter(base_model(model)(ids[:, : count + 1]).last_hidden_state[:, :count])
    logits = []
    for k in range(1, depth + 1):
        reads = ids[:, min(k, layers) : count + k]
        inputs = decoder_inputs(model, hidden, torch.arange(hidden.shape[1])[None])
        after_norm, before_norm = block.layer(k)(hidden, embed(model, reads), **inputs)
        logits.append(project(model, after_norm[0, -1]))
        onward = after_norm if block.recurrence == "post_norm" else before_norm
        hidden = onward if k < layers else torch.cat([hidden, onward[:, -1:]], dim=1)
    return logits


class Cycle:
    """Drafts of changing depth, with pauses."""

    def __init__(self) -> None:
        self.depths = cycle((3, 0, 0, 1, 2, 0, 3))

    def depth(self, rows: int) -> int:
        return next(self.depths)

    def observe(
        self, rows: int, depth: int, seconds: float, drafted: Sequence[int], accepted: Sequence[int]
    ) -> None: ...


@pytest.mark.parametrize(("kind", "layers", "repeat"), BLOCKS, ids=lambda value: str(value))
@pytest.mark.parametrize("rows", [1, 4])
def test_cached_drafts_equal_uncached_ones(
    monkeypatch: pytest.MonkeyPatch, kind: str, layers: int, repeat: bool, rows: int
) -> None:
    """One row with its prompt in pieces and pauses in drafting; four rows that accept different counts."""
    made = tiny.carrier if kind in tiny.KINDS else tiny.family_carrier
    model = made(kind, layers=layers, repeat=repeat)
    depth = 3
    settings: dict[str, Any] = {"prefill_chunk_size": 2, "depth_control": Cycle()} if rows == 1 else {}
    engine = NativeEngine(model, products="linear", num_speculative_tokens=depth, max_num_seqs=rows, **settings)
    steps: list[tuple[Tensor, list[Tensor], Drafts]] = []
    draft = Drafter.draft

    def recorded(self: Drafter, *args: Any, choose: Any, **kwargs: Any) -> Drafts:
        seen: list[Tensor] = []

        def choose_and_note(logits: Tensor, index: int) -> tuple[Tensor, Tensor | None]:
            seen.append(logits.clone())
            return choose(logits, index)

        drafts = draft(self, *args, choose=choose_and_note, **kwargs)
        steps.append((kwargs["positions"] + kwargs["counts"], seen, drafts))
        return drafts

    monkeypatch.setattr(Drafter, "draft", recorded)
    # All rows start at once and are of one length of text, so none moves; their prompts differ.
    prompts = [[5, 6, 7, 4, 3], [1], [9, 8, 7, 6, 5], [30, 31]][:rows]
    completions = engine.generate(tiny.requests(prompts, max_tokens=14, seed=0))
    accepted = {count for c in completions for count in c.accepted_per_depth or []}
    assert len(steps) > 3 and max(accepted) > 0

    whole = [c.prompt_token_ids + c.token_ids for c in completions]
    compared = 0
    for lengths, seen, drafts in steps:
        if len(lengths) < rows:
            break  # a row has ended, and rows may have moved
        for row in range(rows):
            tokens = whole[row][: int(lengths[row]) + 1]
            expected = drafted_without_cache(model, tokens, drafts.tokens[row].tolist(), len(seen))
            for ours, theirs in zip(seen, expected, strict=True):
                # transformers' norms compute in float32, ours in the model's float64.
                torch.testing.assert_close(ours[row], theirs, rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared >= 3 * rows * (depth if rows > 1 else 2)


def test_depth_one_acceptance_does_not_depend_on_k() -> None:
    """Depth 1 is judged at other positions for another k, but at a given position it drafts the same."""
    model = tiny.perfect_carrier()
    rates = []
    for k in (1, 2, 4):
        engine = NativeEngine(model, products="linear", num_speculative_tokens=k)
        done = engine.generate(tiny.requests(tiny.prompts(4), max_tokens=21, seed=9))
        rates.append(sum(c.accepted_per_depth[0] for c in done) / sum(c.drafted_per_depth[0] for c in done))  # type: ignore[index]
    assert rates == [1.0, 1.0, 1.0]
