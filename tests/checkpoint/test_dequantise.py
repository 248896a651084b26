"""Checkpoints in float8 with scales, written in bfloat16: the arithmetic, the files, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import forerun
from forerun.checkpoint.dequantise import dequantise
from forerun.cli import main
from forerun.doctor import inspect
from forerun.errors import UsageError
from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier
from forerun.mtp.config import MTPConfig
from tests.families.tiny import tiny_trunk

Tensors = dict[str, Tensor]
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def quantised(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(float8 numbers, scales) by blocks, as DeepSeek's are: the largest number of a block becomes 448."""
    high, wide = weight.shape
    scales = torch.zeros(-(-high // rows), -(-wide // columns))
    packed = torch.zeros_like(weight)
    for i in range(len(scales)):
        for j in range(len(scales[0])):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[block].abs().max() / 448
            packed[block] = weight[block] / scales[i, j]
    return packed.to(torch.float8_e4m3fn), scales


def slow(packed: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """Every number times the scale of its block, in float64, rounded once to float32 and once to bfloat16."""
    out = torch.zeros(packed.shape, dtype=torch.float64)
    for i in range(packed.shape[0]):
        for j in range(packed.shape[1]):
            out[i, j] = packed[i, j].double() * scales[i // rows, j // columns].double()
    return out.float().bfloat16()


def checkpoint(path: Path, name: str, block: tuple[int, int], *, shard: str = "5GB", **changes: Any) -> Tensors:
    """A tiny family's whole checkpoint in float8, MTP block included; what it holds."""
    made = attach(tiny_trunk(name, dtype=torch.bfloat16, **changes), MTPConfig(enable=True), init="plain", seed=1)
    made.save_pretrained(path)
    weights, stored = load_file(path / "model.safetensors"), {}
    for key, weight in weights.items():
        stored[key] = weight
        if key.endswith("_proj.weight") or "kv_a_proj_with_mqa.weight" in key:
            stored[key], stored[f"{key}_scale_inv"] = quantised(weight.float(), *block)
    write(path, stored, FP8 | {"weight_block_size": list(block)})
    return stored


def write(path: Path, tensors: Tensors, settings: dict[str, Any] | None) -> None:
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": settings}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("block", [(8, 8), (5, 3), (3, 128)], ids=str)
def test_every_number_gets_the_scale_of_its_block(block: tuple[int, int], tmp_path: Path) -> None:
    """Also where the last block is smaller, as in DeepSeek-V3's 576 rows in blocks of 128."""
    stored = checkpoint(tmp_path / "fp8", "deepseek_v3", block)
    scaled = {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")}
    assert any(name.startswith("model.layers.2.") for name in scaled) and len(scaled) > 20  # layer 2 is the block
    dequantise(tmp_path / "fp8", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == stored.keys() - {f"{name}_scale_inv" for name in scaled}
    for name, tensor in found.items():
        expected = slow(stored[name], stored[f"{name}_scale_inv"], *block) if name in scaled else stored[name]
        assert torch.equal(tensor, expected) and tensor.dtype == expected.dtype, name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert inspect(tmp_path / "out") == 0
    assert isinstance(forerun.load(tmp_path / "out"), MTPCarrier)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "qwen3_5_moe"])
def test_the_trunk_is_as_transformers_dequantises_it(name: str, tmp_path: Path) -> None:
    """In blocks that divide its weights: what transformers makes of others is an error or wrong."""
    checkpoint(tmp_path / "fp8", name, (4, 4))
    dequantise(tmp_path / "fp8", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for key, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[key]), key


def one_scale(stored: Tensors) -> None:
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        stored[name] = torch.full((), 0.5)


def by_row(stored: Tensors) -> None:
    """As compressed-tensors writes it, with scales of activations besides."""
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        del stored[name]
        stored[f"{weight}_scale"] = torch.arange(1.0, 1 + len(stored[weight]))[:, None]
        stored[weight.replace(".weight", ".input_scale")] = torch.ones(1)


def test_a_scale_for_all_or_for_each_row(tmp_path: Path) -> None:
    stored = checkpoint(tmp_path / "fp8", "deepseek_v3", (8, 8))
    name = "model.layers.2.self_attn.o_proj.weight"
    whole = stored[name].float()
    one_scale(stored)
    write(tmp_path / "fp8", stored, FP8)
    dequantise(tmp_path / "fp8", tmp_path / "one")
    assert torch.equal(load_file(tmp_path / "one" / "model.safetensors")[name], (whole * 0.5).bfloat16())
    by_row(stored)
    write(tmp_path / "fp8", stored, {"quant_method": "compressed-tensors"})
    dequantise(tmp_path / "fp8", tmp_path / "rows")
    found = load_file(tmp_path / "rows" / "model.safetensors")
    assert torch.equal(found[name], (whole * torch.arange(1.0, 1 + len(whole))[:, None]).bfloat16())
    assert not [key for key in found if key.endswith("_scale")]


UP = "model.layers.0.mlp.up_proj.weight"


def without_scale(stored: Tensors) -> None:
    del stored[f"{UP}_scale_inv"]


def in_four_bits(stored: Tensors) -> None:
    stored[UP] = torch.zeros(stored[UP].shape, dtype=torch.uint8)


def other_scales(stored: Tensors) -> None:
    stored[f"{UP}_scale_inv"] = torch.ones(2, 2)


def whole_scales(stored: Tensors) -> None:
    stored[f"{UP}_scale_inv"] = torch.ones(3, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        (without_scale, {}, rf"^{UP} is quantised \(torch.float8_e4m3fn\) without a scale of its own: only float8"),
        (in_four_bits, {}, rf"^{UP} is quantised \(torch.uint8\) without a scale"),
        (other_scales, {}, rf"^{UP} has scales of shape \[2, 2\], weight_block_size=\[8, 8\] implies \[3, 2\]: "),
        (whole_scales, {}, rf"^{UP} has scales in torch.uint8"),
        (None, {"weight_block_size": None}, "and config.json no weight_block_size: restore"),
        (None, {"weight_block_size": [8, True]}, r"weight_block_size=\[8, True\] in config.json is no pair"),
        (None, None, "is not quantised: config.json has no quantization_config"),
    ],
)
def test_what_cannot_be_told_is_refused(
    change: Callable[[Tensors], None] | None, settings: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    stored = checkpoint(tmp_path / "fp8", "deepseek_v3", (8, 8))
    if change is not None:
        change(stored)
    write(tmp_path / "fp8", stored, None if settings is None else FP8 | {"weight_block_size": [8, 8]} | settings)
    with pytest.raises(UsageError, match=said):
        dequantise(tmp_path / "fp8", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_that_a_refusal_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "fp8", "deepseek_v3", (8, 8))
    (tmp_path / "fp8" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"is quantised \(fp8\): write it in bfloat16 first, with forerun convert .*"):
        forerun.load(tmp_path / "fp8")
    assert main(["convert", str(tmp_path / "fp8"), str(tmp_path / "out"), "--to", "bfloat16"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'out'}: bfloat16 checkpoint of {tmp_path / 'fp8'}\n" and "73 tensors" in said.err
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()
    forerun.load(tmp_path / "out")
