"""The engine's own copy of an MTP block computes what the block does, for every way in which families differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun import MTPConfig, attach
from forerun.families import ATTACHED
from forerun.models.trunk import decoder_inputs
from forerun.mtp.block import ConcatOrder, Recurrence
from forerun.rollout.native.cache import PrefillStep
from forerun.rollout.native.engine import NativeEngine
from tests.rollout import tiny


@torch.no_grad()
@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize("recurrence", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("order", ["hidden_embed", "embed_hidden"])
def test_the_copy_follows_the_family(order: ConcatOrder, recurrence: Recurrence, final_norm: bool) -> None:
    family = replace(ATTACHED, concat_order=order, recurrence=recurrence, final_norm=final_norm)
    # A plain start: with a projection that adds both halves up, their order would not be seen.
    model = attach(tiny.trunk(), MTPConfig(True), init="plain", family=family).eval()
    for name, parameter in model.mtp.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
    runner = NativeEngine(model, products="linear", num_speculative_tokens=1).runner
    count = 9
    hidden, embeds = torch.randn(2, 1, count, model.config.hidden_size, dtype=torch.float64).unbind(0)
    runner.allocate(1, count)
    assert runner.block is not None and runner.cache is not None and runner._rotary is not None
    ours = runner.block.step(1, hidden, embeds, step=PrefillStep(runner.cache, runner._rotary, [(0, 0, count)]))
    positions = torch.arange(count)[None]
    theirs = model.mtp.step(1, hidden, embeds, **decoder_inputs(model, hidden, positions))
    for mine, expected in zip(ours, theirs, strict=True):
        # transformers' norms compute in float32, ours in the model's float64.
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(*ours) == (recurrence == "post_norm" or not final_norm)
