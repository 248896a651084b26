"""Every family's block by the formula, from the tensors of a file made by hand.

    x  = W concat(norm(e), norm(h))     (mimo and attached: the other order)
    h' = norm_out(layer(x))

The norms, the projection and the order are written out here. The decoder layer is transformers' own: the file's MTP
tensors are put where the trunk's layer of that kind lies, transformers loads them, and runs its trunk cut down to that
layer, with masks, positions and rotary embedding as it makes them itself.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from forerun import MTPConfig, load
from forerun.models.carrier import MTPCarrier
from forerun.models.trunk import base_model, decoder_inputs
from tests.families.handmade import DECODER, PARTS, checkpoint, decoder_tensors, mtp_tensors, write
from tests.families.test_round_trip import plain_trunk
from tests.families.tiny import TRUNKS

HIDDEN_FIRST = tuple(name for name in TRUNKS if name.startswith(("mimo", "attached")))
PRE_NORM_RECURRENCE = tuple(name for name in TRUNKS if name.startswith("attached"))
ZERO_CENTRED = tuple(name for name in TRUNKS if name.startswith("qwen") or name == "attached_gemma")


def rms_norm(x: Tensor, weight: Tensor, name: str, epsilon: float) -> Tensor:
    scale = 1.0 + weight if name in ZERO_CENTRED else weight
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * scale


def reference_layer(path: Path, name: str, tensors: dict[str, Tensor]) -> Any:
    """x [B, S, d] -> layer(x), by transformers' trunk with the MTP layer's weights in place of its own."""
    block = mtp_tensors(name, tensors).keys()
    trunk_file = {stored: tensor for stored, tensor in tensors.items() if stored not in block}
    moved = {}
    for stored in trunk_file:
        for pattern, target in DECODER[name]:
            if re.match(pattern, stored):
                moved[stored] = tensors[re.sub(pattern, target, stored, count=1)]
    assert len(moved) == len(decoder_tensors(name, trunk_file))
    (path / "moved").mkdir()
    (path / "moved" / "config.json").write_text((path / "config.json").read_text())
    write(path / "moved", trunk_file | moved)
    model = plain_trunk(path / "moved", name).double()
    model.set_experts_implementation("eager")
    trunk: Any = base_model(model)
    layers = list(trunk.layers)
    kept = {"nemotron_h": layers[1:], "qwen": layers[:1], "ernie4_5_moe": layers[:1]}.get(
        "qwen" if name.startswith("qwen") else name, layers[-1:]
    )
    if name == "longcat_flash":
        return half_layer(trunk, kept[0])
    trunk.layers = nn.ModuleList(kept)
    if name != "nemotron_h":  # whose number of layers is that of its block types, and whose loop goes over them all
        trunk.config.num_hidden_layers = 1
    final = "norm_f" if hasattr(trunk, "norm_f") else "norm"
    setattr(trunk, final, nn.Identity())
    return lambda x: trunk(inputs_embeds=x, use_cache=False).last_hidden_state


def half_layer(trunk: Any, layer: Any) -> Any:
    """LongCat's MTP layer is the second attention and the second dense MLP of a trunk layer, without its experts."""

    def run(x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        rotary = trunk.rotary_emb(x, torch.arange(length)[None])
        x = x + layer.self_attn[1](layer.input_layernorm[1](x), rotary, mask)[0]
        return x + layer.mlps[1](layer.post_attention_layernorm[1](x))

    return run


@pytest.mark.parametrize("name", TRUNKS)
def test_two_depths_follow_the_formula(tmp_path: Path, name: str) -> None:
    """One layer at two depths; the second reads what the first hands the LM head, or that before its norm."""
    tensors = checkpoint(tmp_path, name)
    model = load(tmp_path, MTPConfig(enable=True, num_layers=2, repeat_layer=True), dtype=torch.float64)
    assert isinstance(model, MTPCarrier)
    model.eval().set_experts_implementation("eager")  # the grouped product knows no float64
    layer = reference_layer(tmp_path, name, tensors)
    embed_norm, hidden_norm, projection, final_norm = (None if n is None else tensors[n].double() for n in PARTS[name])
    assert embed_norm is not None and hidden_norm is not None and projection is not None
    config = model.config.get_text_config()
    epsilon = config.layer_norm_epsilon if name == "nemotron_h" else config.rms_norm_eps

    generator = torch.Generator().manual_seed(3)
    hidden, *embeds = torch.randn(3, 2, 7, 16, generator=generator, dtype=torch.float64).unbind(0)
    positions = torch.arange(7)[None].expand(2, -1)
    with torch.no_grad():
        ours = model.mtp(hidden, lambda depth: embeds[depth - 1], **decoder_inputs(model, hidden, positions))
        if name in HIDDEN_FIRST and model.mtp.undo_norm is not None:
            hidden = model.mtp.undo_norm(hidden)
        for depth in (1, 2):
            halves = [
                rms_norm(embeds[depth - 1], embed_norm, name, epsilon),
                rms_norm(hidden, hidden_norm, name, epsilon),
            ]
            if name in HIDDEN_FIRST:
                halves.reverse()
            hidden = layer(torch.cat(halves, dim=-1) @ projection.T)
            for_head = hidden if final_norm is None else rms_norm(hidden, final_norm, name, epsilon)
            # Norms of transformers compute in float32 whatever they are given.
            torch.testing.assert_close(ours[depth - 1], for_head, rtol=1e-4, atol=1e-4)
            if name not in PRE_NORM_RECURRENCE:
                hidden = for_head


@pytest.mark.parametrize("name", [name for name in TRUNKS if "index_topk" not in TRUNKS[name][1]])
def test_a_block_over_its_own_cache(tmp_path: Path, name: str) -> None:
    """Position by position with transformers' cache, of which it fills the first place, as without one."""
    checkpoint(tmp_path, name)
    model = load(tmp_path, MTPConfig(enable=True), dtype=torch.float64)
    assert isinstance(model, MTPCarrier)
    model.eval().set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(3)
    hidden, embeds = torch.randn(2, 2, 6, 16, generator=generator, dtype=torch.float64).unbind(0)
    positions = torch.arange(6)[None].expand(2, -1)
    cache = DynamicCache()
    with torch.no_grad():
        whole, _ = model.mtp.step(1, hidden, embeds, **decoder_inputs(model, hidden, positions))
        for i in range(6):
            one = slice(i, i + 1)
            inputs = decoder_inputs(model, hidden[:, one], positions[:, one]) | {"attention_mask": None}
            step, _ = model.mtp.step(1, hidden[:, one], embeds[:, one], **inputs, cache=cache)
            torch.testing.assert_close(step, whole[:, one], rtol=1e-5, atol=1e-6)
    assert len(cache.layers) == 1 and cache.get_seq_length() == 6
