"""Checkpoints of every family, made by hand: healthy as they are, and told what they lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forerun.checkpoint.reader import SINGLE
from tests.checkpoint.checkpoints import edit, look
from tests.families.handmade import COPIES, DEPTH_KEY, PARTS, checkpoint, mtp_tensors
from tests.families.tiny import tiny_trunk

NAMES = sorted(PARTS)


def kinds(path: Path) -> list[str]:
    return [problem.kind for problem in look(path).problems]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_checkpoint(tmp_path: Path, name: str, shards: int) -> None:
    stored = checkpoint(tmp_path, name, shards=shards)
    block = {n for n in stored if n in mtp_tensors(name, {n: t for n, t in stored.items()})}
    found = look(tmp_path)
    assert found.healthy, [p.message for p in found.problems]
    assert (found.declared_depth, found.present_depth) == (1, 1)
    assert {row.name for row in found.tensors.values()} == block
    assert not any(row.states for row in found.tensors.values())
    unchecked = [row.name for row in found.tensors.values() if row.expected_shape is None]
    assert not unchecked, unchecked


@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_is_missed(tmp_path: Path, name: str) -> None:
    """Fault 15: whichever is left out, its absence is named."""
    stored = checkpoint(tmp_path, name)
    block = mtp_tensors(name, stored)
    optional = {"model.layers.2.embed_tokens.weight"} if name == "glm4_moe" else set()
    for lost in sorted(block.keys() - optional)[::3]:
        save_file({n: t for n, t in stored.items() if n != lost}, tmp_path / SINGLE, {"format": "pt"})
        problem = look(tmp_path).problems[0]
        assert problem.kind in ("missing", "copy_missing") and problem.tensors == (lost,), (lost, problem)


@pytest.mark.parametrize("name", sorted(COPIES))
def test_a_copy_that_differs(tmp_path: Path, name: str) -> None:
    stored = checkpoint(tmp_path, name)
    copy, original = COPIES[name][0]
    with torch.no_grad():
        stored[copy][3, 3] += 1
    save_file(stored, tmp_path / SINGLE, {"format": "pt"})
    found = look(tmp_path)
    assert [(p.kind, p.tensors) for p in found.problems] == [("copy_differs", (copy,))]
    assert original in found.problems[0].message and found.tensors[copy].states == ["differs"]
    assert look(tmp_path, values=False).healthy


@pytest.mark.parametrize("name", NAMES)
def test_dropped_by_transformers(tmp_path: Path, name: str) -> None:
    """Fault 18, of every family: the trunk alone was saved, and the key says otherwise."""
    checkpoint(tmp_path / "carrier", name)
    config = (tmp_path / "carrier" / "config.json").read_text()
    tiny_trunk(name).save_pretrained(tmp_path / "tuned")
    (tmp_path / "tuned" / "config.json").write_text(config)
    assert kinds(tmp_path / "tuned") == ["mtp_dropped"]


@pytest.mark.parametrize("name", NAMES)
def test_never_trained(tmp_path: Path, name: str) -> None:
    stored = checkpoint(tmp_path, name)
    fresh = {}
    zero_centred = name.startswith("qwen3_")
    for stored_name, tensor in mtp_tensors(name, stored).items():
        if stored_name in dict(COPIES.get(name, ())):
            continue
        first = torch.zeros if zero_centred or not stored_name.endswith("weight") else torch.ones
        drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(fresh))) * 0.3
        fresh[stored_name] = drawn if tensor.dim() > 1 else first(tensor.shape)
    edit(tmp_path, lambda tensors: tensors | fresh)
    assert kinds(tmp_path) == ["untouched"]


@pytest.mark.parametrize("name", [n for n in NAMES if "qwen3" in n])
def test_depth_zero_with_tensors(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    config.get("text_config", config)[DEPTH_KEY.get(name, "num_nextn_predict_layers")] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kinds(tmp_path) == ["depth_mismatch"]


def stacked(tensors: dict[str, torch.Tensor], start: str) -> dict[str, torch.Tensor]:
    """The four experts under `start` as the module holds them."""
    gate_up = [torch.cat([tensors[f"{start}{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(4)]
    down = [tensors[f"{start}{e}.down_proj.weight"] for e in range(4)]
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(start)}
    return rest | {f"{start}gate_up_proj": torch.stack(gate_up), f"{start}down_proj": torch.stack(down)}


@pytest.mark.parametrize("whose", ["block", "trunk"])
def test_experts_stacked_on_one_side_and_apart_on_the_other(tmp_path: Path, whose: str) -> None:
    """Qwen3.5 files exist with experts in either form."""
    checkpoint(tmp_path, "qwen3_5_moe_text")
    starts = {"block": ["mtp.layers.0.mlp.experts."], "trunk": [f"model.layers.{i}.mlp.experts." for i in range(2)]}
    for start in starts[whose]:
        edit(tmp_path, lambda tensors, start=start: stacked(tensors, start))
    found = look(tmp_path)
    assert found.healthy, [p.message for p in found.problems]
    assert not any(row.expected_shape is None for row in found.tensors.values())
    wrong = next(name for name in found.tensors if "experts." in name)
    edit(tmp_path, lambda tensors: tensors | {wrong: torch.randn(2, 3)})
    assert kinds(tmp_path) == ["wrong_shape"]


def test_longcat_counts_sublayers(tmp_path: Path) -> None:
    """Its num_hidden_layers may be twice the layers that its files have."""
    checkpoint(tmp_path, "longcat_flash")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_layers": 2, "num_hidden_layers": 4}))
    assert kinds(tmp_path) == []
