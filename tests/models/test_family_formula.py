"""A family's layer from the tensors of its file, by the formula of the family's own code."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun import MTPConfig, attach, load
from forerun.families import ATTACHED, MIMO, FamilyRecord
from forerun.models.carrier import MTPCarrier
from tests.models.tiny import tiny_model


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * weight


@pytest.mark.parametrize("family", [MIMO, ATTACHED], ids=lambda family: family.name)
def test_the_halves_of_mimo_s_projection(tmp_path: Path, family: FamilyRecord) -> None:
    """modeling_mimo.py and vLLM's mimo_mtp.py: input_proj(cat([hidden_layernorm(h), token_layernorm(e)])). The
    attached layout is served by the same code, so it must agree."""
    model = attach(tiny_model("qwen2", dtype=torch.float32), MTPConfig(enable=True), init="plain", family=family)
    layer = model.mtp.layer(1)
    with torch.no_grad():
        layer.hidden_norm.weight.uniform_(0.5, 1.5)  # type: ignore[union-attr, operator]
        layer.embed_norm.weight.uniform_(0.5, 1.5)  # type: ignore[union-attr, operator]
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    prefix, epsilon = "model.mtp_layers.0.", model.config.rms_norm_eps
    hidden, embeds = torch.randn(2, 3, 5, model.config.hidden_size).unbind(0)
    halves = [
        rms_norm(hidden, stored[f"{prefix}hidden_layernorm.weight"], epsilon),
        rms_norm(embeds, stored[f"{prefix}token_layernorm.weight"], epsilon),
    ]
    expected = torch.cat(halves, dim=-1) @ stored[f"{prefix}input_proj.weight"].T
    torch.testing.assert_close(layer.combine(hidden, embeds), expected, rtol=1e-5, atol=1e-6)


def test_a_record_of_the_other_order_swaps_the_halves() -> None:
    hidden, embeds = torch.randn(2, 3, 5, 16).unbind(0)
    ours, swapped = (
        attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True), init="plain", family=family).mtp.layer(1)
        for family in (ATTACHED, replace(ATTACHED, concat_order="embed_hidden"))
    )
    half = hidden.shape[-1]
    with torch.no_grad():
        swapped.proj.weight.copy_(ours.proj.weight.roll(half, dims=1))
    torch.testing.assert_close(swapped.combine(hidden, embeds), ours.combine(hidden, embeds))
    assert not torch.allclose(ours.combine(embeds, hidden), ours.combine(hidden, embeds))


def test_a_loaded_block_is_trained_as_the_configuration_asks(tmp_path: Path) -> None:
    """No setting is lost on the way; the depth alone is the checkpoint's."""
    attach(tiny_model(), MTPConfig(enable=True, num_layers=2)).save_pretrained(tmp_path)
    asked = MTPConfig(
        enable=True,
        enable_train=True,
        enable_rollout=True,
        detach_encoder=True,
        mtp_loss_scaling_factor=0.7,
        loss="tv",
        mask_rule="span",
        chunk_size=3,
        num_speculative_tokens=2,
    )
    model = load(tmp_path, asked)
    assert isinstance(model, MTPCarrier)
    for item in fields(MTPConfig):
        expected = 2 if item.name == "num_layers" else getattr(asked, item.name)
        assert getattr(model.mtp_config, item.name) == expected, item.name
