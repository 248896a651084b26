"""What a checkpoint directory may be that is none: one line, exit code 2, nothing unpickled, no file from elsewhere."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun.checkpoint.inspect import examine
from forerun.checkpoint.reader import INDEX, SINGLE, CheckpointReader
from forerun.errors import UsageError
from tests.checkpoint.checkpoints import PROJ, edit_config, index_of, make, write_index


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("whole")
    return {"single": make(at / "single"), "sharded": make(at / "sharded", sharded=True)}


class Bomb:
    """Leaves a file where it was unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (open, (str(self.file), "w"))


def header(content: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(content)) + content + data


def lying_header() -> bytes:
    """Promises 16 bytes, holds 8."""
    return header(json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode(), b"\0" * 8)


def bad_weights(path: Path, content: bytes) -> None:
    (path / SINGLE).write_bytes(content)


def nothing_but(path: Path, name: str) -> None:
    (path / SINGLE).unlink()
    (path / name).write_bytes(b"x")


def a_link_out(path: Path) -> None:
    outside = path.parent / "outside.safetensors"
    shutil.move(path / SINGLE, outside)
    (path / SINGLE).symlink_to(outside)


def replace_config(path: Path, content: bytes) -> None:
    (path / "config.json").write_bytes(content)


def a_config_link_out(path: Path) -> None:
    shutil.move(path / "config.json", path.parent / "secret.json")
    (path / "config.json").symlink_to(path.parent / "secret.json")


def a_directory_as_weights(path: Path) -> None:
    (path / SINGLE).unlink()
    (path / SINGLE).mkdir()


def a_pipe_as_config(path: Path) -> None:
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")


def a_link_in_a_circle(path: Path) -> None:
    (path / SINGLE).unlink()
    (path / SINGLE).symlink_to(SINGLE)


def a_config_too_large(path: Path) -> None:
    with (path / "config.json").open("wb") as file:
        file.truncate(1 << 40)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty file": (lambda p: bad_weights(p, b""), "model.safetensors is empty: copy it again"),
    "truncated": (lambda p: bad_weights(p, (p / SINGLE).read_bytes()[:2000]), "damaged or cut short"),
    "one byte less": (lambda p: bad_weights(p, (p / SINGLE).read_bytes()[:-1]), "damaged or cut short"),
    "huge header": (lambda p: bad_weights(p, struct.pack("<Q", 1 << 60) + b"{}"), "header too large"),
    "lying header": (lambda p: bad_weights(p, lying_header()), "damaged or cut short"),
    "header no JSON": (lambda p: bad_weights(p, header(b"[1, 2")), "damaged or cut short"),
    "header nested": (lambda p: bad_weights(p, header(b"[" * 100_000)), "damaged or cut short"),
    "header not UTF-8": (lambda p: bad_weights(p, header(b'{"\xff":1}')), "damaged or cut short"),
    "zip": (lambda p: torch.save({"a": torch.ones(1)}, p / SINGLE), "is a pickle in a zip archive"),
    "pickle": (lambda p: bad_weights(p, pickle.dumps(Bomb(p / "ran"))), "is a pickle: convert it"),
    "no pickle": (lambda p: bad_weights(p, header(b"{" + b" " * 0x27F)), "damaged or cut short"),  # of length 0x280
    "GGUF": (lambda p: bad_weights(p, b"GGUF\x03\0\0\0" + b"\0" * 64), "is a GGUF file"),
    "LFS pointer": (lambda p: bad_weights(p, b"version https://git-lfs.github.com/spec/v1\n"), "run `git lfs pull`"),
    "only .bin": (lambda p: nothing_but(p, "pytorch_model.bin"), r"pytorch_model\.bin: pickles"),
    "only .gguf": (lambda p: nothing_but(p, "model.gguf"), r"model\.gguf: GGUF"),
    "no weights": (lambda p: (p / SINGLE).unlink(), "holds no model.safetensors and no"),
    "directory as weights": (a_directory_as_weights, "no regular file"),
    "link out": (a_link_out, "a symbolic link that leads out of the directory: copy the file there"),
    "link in a circle": (a_link_in_a_circle, "no regular file"),
    "config missing": (lambda p: (p / "config.json").unlink(), "has no config.json"),
    "config a link out": (a_config_link_out, "a symbolic link that leads out"),
    "config a pipe": (a_pipe_as_config, "no regular file"),
    "config too large": (a_config_too_large, "bytes, too many for"),
    "config broken": (lambda p: replace_config(p, b'{"a": '), "cannot read .*config.json: Expecting value"),
    "config a list": (lambda p: replace_config(p, b"[]"), "does not hold a JSON object"),
    "config not UTF-8": (lambda p: replace_config(p, b'{"a": "\xff"}'), "can't decode byte"),
    "config nested": (lambda p: replace_config(p, b'{"a":' * 100_000), "nested too deeply"),
    "config key twice": (lambda p: replace_config(p, b'{"a": 1, "a": 2}'), "the key 'a' twice: restore the file"),
    "config huge number": (lambda p: replace_config(p, b'{"a": ' + b"9" * 5000 + b"}"), "cannot read .*config.json"),
    "model_type a list": (lambda p: edit_config(p, model_type=["llama"]), "model_type"),
    "depth a bool": (lambda p: edit_config(p, num_nextn_predict_layers=True), "num_nextn_predict_layers=True"),
    "depth a string": (lambda p: edit_config(p, num_nextn_predict_layers="1"), "num_nextn_predict_layers='1'"),
    "depth negative": (lambda p: edit_config(p, num_nextn_predict_layers=-1), "num_nextn_predict_layers=-1"),
    "depth huge": (lambda p: edit_config(p, num_nextn_predict_layers=10**12), "num_nextn_predict_layers=1000000000000"),
    "hidden size a string": (lambda p: edit_config(p, hidden_size="16"), "hidden_size='16'"),
    "layers a bool": (lambda p: edit_config(p, num_hidden_layers=True), "num_hidden_layers='True'"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_directory_is_one_line(tmp_path: Path, whole: dict[str, Path], how: str) -> None:
    path = shutil.copytree(whole["single"], tmp_path / "checkpoint")
    spoil, message = BAD[how]
    spoil(path)
    with pytest.raises(UsageError, match=message) as caught:
        examine(path)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert not (path / "ran").exists()


def names_a_file(path: Path, shard: object) -> None:
    content = index_of(path)
    content["weight_map"][PROJ] = shard
    write_index(path, content)


BAD_INDEX: dict[str, tuple[Callable[[Path], object], str]] = {
    "parent": (lambda p: names_a_file(p, "../x.safetensors"), "no file of the directory"),
    "absolute": (lambda p: names_a_file(p, "/etc/x.safetensors"), "no file of the directory"),
    "nul": (lambda p: names_a_file(p, "a\0.safetensors"), "a.x00.safetensors"),
    "long": (lambda p: names_a_file(p, "a" * 5000 + ".safetensors"), r"lacks a+\.\.\."),
    "pickle": (lambda p: names_a_file(p, "pytorch_model.bin"), "no safetensors file"),
    "number": (lambda p: names_a_file(p, 3), "no safetensors file"),
    "list": (lambda p: names_a_file(p, ["x.safetensors"]), "no safetensors file"),
    "absent": (lambda p: names_a_file(p, "model-9.safetensors"), "lacks model-9.safetensors: copy the missing file"),
    "no map": (lambda p: write_index(p, {"metadata": {}}), "has no weight_map"),
    "map empty": (lambda p: write_index(p, {"weight_map": {}}), "has no weight_map"),
    "map a list": (lambda p: write_index(p, {"weight_map": [1]}), "has no weight_map"),
    "key twice": (lambda p: (p / INDEX).write_text('{"weight_map": {"a": "b", "a": "c"}}'), "the key 'a' twice"),
}


@pytest.mark.parametrize("how", BAD_INDEX)
def test_a_bad_index_is_one_line(tmp_path: Path, whole: dict[str, Path], how: str) -> None:
    path = shutil.copytree(whole["sharded"], tmp_path / "checkpoint")
    spoil, message = BAD_INDEX[how]
    spoil(path)
    with pytest.raises(UsageError, match=message) as caught:
        examine(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_a_tensor_that_the_index_names_and_its_shard_lacks(tmp_path: Path, whole: dict[str, Path]) -> None:
    path = shutil.copytree(whole["sharded"], tmp_path / "checkpoint")
    content = index_of(path)
    content["weight_map"]["ghost"] = content["weight_map"][PROJ]
    write_index(path, content)
    with pytest.raises(UsageError, match="cannot read ghost from"):
        CheckpointReader(path).tensor("ghost")


@pytest.mark.parametrize("given", ["nowhere", "file"])
def test_a_path_that_is_no_directory(tmp_path: Path, given: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"is a file: give the checkpoint directory|is not a directory"):
        CheckpointReader(tmp_path / given)


def test_a_path_that_is_not_there_gets_the_way_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, way in (
        ("forerun-demo/model", "run `forerun demo`, which makes it"),
        ("Qwen/Qwen3-8B", "`hf download Qwen/Qwen3-8B --local-dir DIR`"),
        ("models/a/b", "is not a directory: give a Hugging Face checkpoint directory"),
    ):
        with pytest.raises(UsageError, match=way):
            CheckpointReader(path)
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"^run has no config\.json: give run/model, which has one$"):
        CheckpointReader("run")


def as_hub_cache(whole: Path, at: Path) -> Path:
    """The layout of the Hugging Face hub's cache: a snapshot is links to the repository's blobs."""
    snapshot = at / "models--me--tiny" / "snapshots" / ("0" * 40)
    blobs = at / "models--me--tiny" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(whole.iterdir())):
        shutil.copy(file, blobs / f"{number:064}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{number:064}"))
    return snapshot


def test_a_hub_snapshot_is_read_through_its_links(tmp_path: Path, whole: dict[str, Path]) -> None:
    snapshot = as_hub_cache(whole["sharded"], tmp_path)
    assert examine(snapshot).inspection.healthy
    assert torch.equal(CheckpointReader(snapshot).tensor(PROJ), CheckpointReader(whole["sharded"]).tensor(PROJ))
    (tmp_path / "nickname").symlink_to(snapshot)  # the directory itself may be a link, too
    assert examine(tmp_path / "nickname").inspection.healthy


def test_a_hub_snapshot_does_not_reach_another_repository(tmp_path: Path, whole: dict[str, Path]) -> None:
    snapshot = as_hub_cache(whole["single"], tmp_path)
    other = tmp_path / "models--you--private" / "blobs" / "weights"
    other.parent.mkdir(parents=True)
    shutil.copy(whole["single"] / SINGLE, other)
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to(other)
    with pytest.raises(UsageError, match="leads out of the directory"):
        CheckpointReader(snapshot)


def test_a_link_inside_the_directory_is_followed(tmp_path: Path, whole: dict[str, Path]) -> None:
    path = shutil.copytree(whole["single"], tmp_path / "checkpoint")
    (path / "weights").mkdir()
    shutil.move(path / SINGLE, path / "weights" / SINGLE)
    (path / SINGLE).symlink_to(Path("weights", SINGLE))
    assert examine(path).inspection.healthy
