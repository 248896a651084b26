"""Drafting over the cache equals drafting without one, position by position, while rows accept different counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.models.carrier import MTPCarrier
from forerun.models.trunk import base_model, decoder_inputs, embed, project
from forerun.rollout.native.engine import NativeEngine
from forerun.speculative.drafter import Drafter, Drafts
from tests.rollout import tiny


@torch.no_grad()
def drafted_without_cache(model: MTPCarrier, tokens: list[int], chosen: list[int], depth: int) -> list[Tensor]:
    """The draft's logits at depths 1..depth after `tokens`, `chosen` being drafted: everything from the start."""
    ids = torch.tensor([tokens])
    hidden = base_model(model)(ids).last_hidden_state[:, :-1]
    following = ids[:, 1:]
    logits = []
    for index in range(depth):
        positions = torch.arange(hidden.shape[1])[None]
        for_head, for_next = model.mtp.step(
            1, hidden, embed(model, following), **decoder_inputs(model, hidden, positions)
        )
        logits.append(project(model, for_head[0, -1]))
        hidden = torch.cat([hidden, for_next[:, -1:]], dim=1)
        following = torch.cat([following, torch.tensor([[chosen[index]]])], dim=1)
    return logits


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("rows", [1, 4])
def test_cached_drafts_equal_uncached_ones(monkeypatch: pytest.MonkeyPatch, kind: str, rows: int) -> None:
    model = tiny.carrier(kind)
    depth = 3
    engine = NativeEngine.from_model(model, products="linear", num_speculative_tokens=depth, max_num_seqs=rows)
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
    prompts = [[5, 6, 7], [1], [9, 8, 7, 6, 5], [30, 31]][:rows]
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
    assert compared >= 3 * rows * depth


def test_depth_one_acceptance_does_not_depend_on_k() -> None:
    """Depth 1 is judged at other positions for another k, but at a given position it drafts the same."""
    model = tiny.perfect_carrier()
    rates = []
    for k in (1, 2, 4):
        engine = NativeEngine.from_model(model, products="linear", num_speculative_tokens=k)
        done = engine.generate(tiny.requests(tiny.prompts(4), max_tokens=21, seed=9))
        rates.append(sum(c.accepted_per_depth[0] for c in done) / sum(c.drafted_per_depth[0] for c in done))  # type: ignore[index]
    assert rates == [1.0, 1.0, 1.0]
