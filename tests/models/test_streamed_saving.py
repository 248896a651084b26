"""A model written shard by shard, as its tensors come, is the one that `save_pretrained` writes, tensor by tensor."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import HrmTextConfig, HrmTextForCausalLM, PreTrainedModel

import forerun.checkpoint.shards
from forerun import MTPConfig, attach, load
from forerun.checkpoint.inspect import examine
from forerun.checkpoint.reader import INDEX
from forerun.errors import ForerunError
from forerun.models.carrier import named_weights
from forerun.models.saving import save_streamed, saved_tensors
from tests.families.handmade import checkpoint, read
from tests.families.test_round_trip import attached, plain_trunk, same
from tests.families.tiny import TRUNKS, tiny_trunk
from tests.models.killed_exports import CASES, MANY, ONE, changed
from tests.models.tiny import tiny_model
from tests.planner.live import LiveBytes

SHARD = 3000  # bytes: a layer of these models needs several files


def made(tmp_path: Path, name: str, how: str) -> PreTrainedModel:
    """A model with a block of its family's file, with a new one, and without."""
    if how == "loaded":
        checkpoint(tmp_path / "source", name)
        return load(tmp_path / "source", MTPConfig(enable=True))
    return attached(name) if how == "attached" else tiny_trunk(name)


def shown(path: Path) -> dict[str, Any]:
    """Everything besides the weights."""
    return {file.name: file.read_text() for file in path.iterdir() if file.suffix != ".safetensors"}


PLAIN = ["deepseek_v3", "qwen3_5_moe", "attached_gemma"]


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, how) for name in TRUNKS for how in ("loaded", "attached")), *((name, "plain") for name in PLAIN)],
)
def test_every_family_s_files_are_those_of_save_pretrained(tmp_path: Path, name: str, how: str) -> None:
    model = made(tmp_path, name, how)
    model.save_pretrained(tmp_path / "whole", max_shard_size=SHARD)
    save_streamed(model, tmp_path / "parts", saved_tensors(model), SHARD)
    expected, found = read(tmp_path / "whole"), read(tmp_path / "parts")
    assert same(found, expected)
    others, ours = shown(tmp_path / "whole"), shown(tmp_path / "parts")
    index, theirs = json.loads(ours.pop(INDEX)), json.loads(others.pop(INDEX))
    assert ours == others and index["metadata"] == theirs["metadata"]
    assert index["weight_map"].keys() == expected.keys()
    for file in (tmp_path / "parts").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            sizes = {tensor: opened.get_tensor(tensor).nbytes for tensor in opened.keys()}  # noqa: SIM118 - no dict
        assert sum(sizes.values()) <= SHARD or len(sizes) == 1
        assert {tensor for tensor, where in index["weight_map"].items() if where == file.name} == sizes.keys()


def test_tensors_that_files_hold_as_one_are_written_as_one(tmp_path: Path) -> None:
    """Gate, queries, keys and values of a layer; gate and up projection."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    model = HrmTextForCausalLM(HrmTextConfig(vocab_size=61, num_hidden_layers=2, **sizes))
    model.save_pretrained(tmp_path / "whole")
    save_streamed(model, tmp_path / "parts", saved_tensors(model), SHARD)
    expected = read(tmp_path / "whole")
    assert same(read(tmp_path / "parts"), expected) and len(expected) < len(saved_tensors(model))


@pytest.mark.parametrize("name", ["deepseek_v3", "attached", "mimo"])
def test_others_read_it(tmp_path: Path, name: str) -> None:
    """transformers, `forerun.load`, the doctor; and what fits into one file is one."""
    model = attached(name)
    for place, size in (("parts", SHARD), ("one", 1 << 30)):
        save_streamed(model, tmp_path / place, saved_tensors(model), size)
        trunk = plain_trunk(tmp_path / place, name)
        names = dict(model.named_parameters())
        assert all(torch.equal(tensor, names[n]) for n, tensor in trunk.named_parameters())
        assert same(dict(named_weights(load(tmp_path / place))), dict(named_weights(model)))
        assert examine(tmp_path / place).inspection.healthy
    assert [file.name for file in (tmp_path / "one").glob("model*")] == ["model.safetensors"]


def test_no_more_than_a_shard_and_a_layer_are_in_memory(tmp_path: Path) -> None:
    model = attach(tiny_model(tied=False), MTPConfig(enable=True, num_layers=2), init="plain")
    tensors = saved_tensors(model)
    whole = sum(tensor.nbytes for _, tensor in tensors)
    layer = max(
        sum(tensor.nbytes for name, tensor in tensors if name.startswith(start))
        for start in ("model.layers.0.", "mtp.layers.0.")
    )
    largest = max(tensor.nbytes for _, tensor in tensors)

    def passing() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.clone()

    with LiveBytes(model) as live:
        save_streamed(model, tmp_path / "out", passing(), SHARD)
    more = max(live.peaks.values()) - sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert layer < more <= SHARD + layer + 2 * largest < whole / 2


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    model = attach(tiny_model(), MTPConfig(enable=True))
    name, tensor = saved_tensors(model)[0]
    with pytest.raises(ForerunError, match=f"{name} is the name of two tensors"):
        save_streamed(model, tmp_path / "out", [(name, tensor), ("model.norm.weight", tensor), (name, tensor)])
    assert not list(tmp_path.iterdir())


def test_a_kill_at_any_instant_leaves_the_one_or_the_other(tmp_path: Path) -> None:
    """In the place of a model in as many files, in one, or in several; and where there was none. And what is saved over
    what a kill left takes its place as well, whole at any instant, and clears up."""
    command = [sys.executable, "-m", "tests.models.killed_exports", str(tmp_path / "killed")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    files = {}
    for size in (MANY, ONE):
        save_streamed(changed(3.0), tmp_path / str(size), saved_tensors(changed(3.0)), size)
        files[size] = sorted(file.name for file in (tmp_path / str(size)).iterdir())
    outcomes = json.loads(done.stdout)
    for before, after in CASES:
        instants = [outcome for outcome in outcomes if outcome["case"] == [before, after]]
        found = [outcome["found"] for outcome in instants]
        assert found[-1] == [2.0] and len(instants) > (4 if before is None else 10), found
        first = None if before is None else [1.0]
        changes = found.index([2.0])
        assert found == [first] * changes + [[2.0]] * (len(found) - changes) and changes > 0
        for outcome in instants:
            for later in outcome["later"]:
                way = later["on_the_way"]
                changes = way.index([3.0])
                assert way == [outcome["found"]] * changes + [[3.0]] * (len(way) - changes) and changes > 0, outcome
                assert later["end"] == [3.0] and later["left"] == files[later["size"]], outcome


@pytest.mark.parametrize("exists", [True, False])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, exists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = changed(1.0), changed(2.0)
    if exists:
        save_streamed(old, tmp_path / "out", saved_tensors(old), SHARD)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    save_file, calls = forerun.checkpoint.shards.save_file, itertools.count()

    def full(*arguments: Any) -> None:
        if next(calls) == 2:
            raise SafetensorError("No space left on device")
        save_file(*arguments)

    monkeypatch.setattr(forerun.checkpoint.shards, "save_file", full)
    with pytest.raises(ForerunError, match=r"cannot write .*out: No space left.*free some space"):
        save_streamed(new, tmp_path / "out", saved_tensors(new), SHARD)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == kept
