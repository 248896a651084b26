"""Faults put into small real checkpoints: from headers alone, each is named once, with its mend."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from forerun.checkpoint.reader import SINGLE
from tests.checkpoint.checkpoints import (
    PROJ,
    edit,
    edit_config,
    index_of,
    look,
    make,
    only_problem,
    shards,
    write,
    write_index,
)
from tests.models.tiny import tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("whole")
    for name, settings in (("one", {}), ("two", {"depth": 2}), ("sharded", {"sharded": True})):
        make(at / name, **settings)
    return at


@pytest.fixture
def path(tmp_path: Path, whole: Path) -> Path:
    return shutil.copytree(whole / "one", tmp_path / "one")


@pytest.fixture
def sharded(tmp_path: Path, whole: Path) -> Path:
    return shutil.copytree(whole / "sharded", tmp_path / "sharded")


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(("name", "depth"), [("one", 1), ("two", 2), ("sharded", 1)])
def test_a_healthy_checkpoint(whole: Path, name: str, depth: int) -> None:
    found = look(whole / name)
    assert found.healthy, found.problems
    assert (found.family, found.declared_depth, found.present_depth) == ("attached", depth, depth)
    assert len(found.tensors) == 13 * depth
    assert all(row.states == [] and row.shape == row.expected_shape for row in found.tensors.values())
    assert {row.file for row in found.tensors.values()} <= set(shards(whole / name))


def test_a_checkpoint_without_mtp_is_healthy(tmp_path: Path) -> None:
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "plain")
    found = look(tmp_path / "plain")
    assert found.healthy and not found.tensors
    assert found.notes == ["no MTP block; attach one with forerun.attach"]


def test_mtp_dropped_by_transformers(path: Path, tmp_path: Path) -> None:
    """Fault 18: fine-tune and save with a tool that does not know MTP; config.json goes on declaring it."""
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(tmp_path / "tuned")
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    problem = only_problem(tmp_path / "tuned")
    assert problem.kind == "mtp_dropped" and "num_nextn_predict_layers=1" in problem.message
    assert "copy the MTP tensors" in problem.mend and "to 0" in problem.mend
    rows = look(tmp_path / "tuned").tensors
    assert len(rows) == 13 and all(row.states == ["missing"] for row in rows.values())
    assert rows[PROJ].expected_shape == (16, 32)


@pytest.mark.parametrize(("declared", "shown"), [(0, "=0"), (3, "=3"), (None, "has no num_nextn_predict_layers")])
def test_depth_declared_against_present(tmp_path: Path, whole: Path, declared: int | None, shown: str) -> None:
    path = shutil.copytree(whole / "two", tmp_path / "two")
    edit_config(path, num_nextn_predict_layers=declared)
    found = look(path)
    assert "depth_mismatch" in [p.kind for p in found.problems]
    problem = found.problems[0]
    assert shown in problem.message and "hold 2 MTP layers" in problem.message and "to 2" in problem.mend
    assert {row.name for row in found.tensors.values() if row.states == ["missing"]} == {
        name for name in found.tensors if ".mtp_layers.2." in name
    }


@pytest.mark.parametrize("lost", [PROJ, "model.mtp_layers.0.self_attn.q_proj.weight"])
def test_a_missing_tensor(path: Path, lost: str) -> None:
    edit(path, lambda tensors: {n: t for n, t in tensors.items() if n != lost})
    problem = only_problem(path)
    assert (problem.kind, problem.tensors) == ("missing", (lost,)) and lost in problem.message
    assert look(path).tensors[lost].states == ["missing"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (PROJ, (16, 16)),
        ("model.mtp_layers.0.mlp.up_proj.weight", (33, 16)),
        ("model.mtp_layers.0.token_layernorm.weight", (17,)),
    ],
)
def test_a_wrong_shape(path: Path, name: str, shape: tuple[int, ...]) -> None:
    edit(path, lambda tensors: tensors | {name: torch.randn(shape)})
    problem = only_problem(path)
    assert problem.kind == "wrong_shape" and problem.tensors == (name,)
    assert str(list(shape)) in problem.message
    assert look(path).tensors[name].states == ["wrong_shape"]


def test_an_unknown_tensor(path: Path) -> None:
    edit(path, lambda tensors: tensors | {"model.mtp_layers.0.extra.weight": torch.ones(3)})
    problem = only_problem(path)
    assert problem.kind == "unknown" and problem.tensors == ("model.mtp_layers.0.extra.weight",)


def test_a_tensor_renamed_is_missing_and_unknown(path: Path) -> None:
    """Fault 16: a live tensor under a name to which nothing maps."""
    edit(path, lambda tensors: renamed(tensors, "input_proj", "inputproj"))
    assert [p.kind for p in look(path).problems] == ["missing", "unknown"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.mtp_layers.", "model.language_model.mtp_layers."),
        ("model.mtp_layers.", "language_model.model.mtp_layers."),
        ("model.mtp_layers.", "mtp_layers."),
    ],
)
def test_mtp_under_another_prefix(path: Path, old: str, new: str) -> None:
    """Fault 16: the prefix does not match, so the block would load as random numbers."""
    edit(path, lambda tensors: renamed(tensors, old, new))
    problem = only_problem(path)
    assert problem.kind == "prefixed" and len(problem.tensors) == 13
    assert "model.mtp_layers.0." in problem.message and "rename" in problem.mend
    assert all(row.states == ["prefixed"] and row.name.startswith(new) for row in look(path).tensors.values())


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_fsdp_wrapped_module."])
@pytest.mark.parametrize("inside", [False, True])
def test_names_of_training_wrappers(path: Path, wrapper: str, inside: bool) -> None:
    """Fault 16, all over: the wrapped model's state dict was saved."""

    def wrap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n.replace("model.", f"model.{wrapper}", 1) if inside else wrapper + n: t for n, t in tensors.items()}

    edit(path, wrap)
    problem = only_problem(path)
    assert problem.kind == "prefixed" and "training wrapper" in problem.message
    assert look(path).tensors[PROJ].shape == (16, 32)


def test_another_familys_names(path: Path) -> None:
    """Fault 16: complete tensors, under names that the family in config.json does not have."""
    edit(path, lambda tensors: renamed(tensors, "model.mtp_layers.", "mtp.layers."))
    found = look(path)
    assert [p.kind for p in found.problems] == ["mtp_dropped", "unknown"]
    assert "model.mtp_layers.0.input_proj.weight" in found.problems[1].message


@pytest.mark.parametrize("second", ["module.model.mtp_layers.", "model.language_model.mtp_layers."])
def test_two_names_of_one_tensor(path: Path, second: str) -> None:
    def double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {n.replace("model.mtp_layers.", second): t.clone() for n, t in tensors.items() if "mtp" in n}

    edit(path, double)
    problem = next(p for p in look(path).problems if p.kind == "duplicated")
    assert len(problem.tensors) == 13 and all(name.startswith(second) for name in problem.tensors)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    """Fault 19: a tensor is written twice."""
    files = shards(sharded)
    home = next(name for name, tensors in files.items() if PROJ in tensors)
    other = next(name for name in files if name != home)
    tensors = files[other] | {PROJ: files[home][PROJ] + 1}
    save_file(tensors, sharded / other, {"format": "pt"})
    content = index_of(sharded)
    content["metadata"]["total_size"] += files[home][PROJ].numel() * 4
    write_index(sharded, content)
    problem = only_problem(sharded)
    assert problem.kind == "duplicated" and problem.tensors == (PROJ,)
    assert home in problem.message and other in problem.message
    assert look(sharded).tensors[PROJ].states == ["duplicated"]


def test_index_names_a_tensor_that_no_shard_holds(sharded: Path) -> None:
    content = index_of(sharded)
    content["weight_map"]["ghost"] = next(iter(content["weight_map"].values()))
    write_index(sharded, content)
    assert only_problem(sharded).kind == "index_names_absent_tensor"


def test_index_does_not_name_a_tensor(sharded: Path) -> None:
    content = index_of(sharded)
    del content["weight_map"][PROJ]
    write_index(sharded, content)
    problem = only_problem(sharded)
    assert (problem.kind, problem.tensors) == ("tensor_not_in_index", (PROJ,))


def test_index_looks_in_the_wrong_shard(sharded: Path) -> None:
    content = index_of(sharded)
    home = content["weight_map"][PROJ]
    content["weight_map"][PROJ] = next(name for name in content["weight_map"].values() if name != home)
    write_index(sharded, content)
    assert only_problem(sharded).kind == "index_names_wrong_shard"


@pytest.mark.parametrize("total", [1, "many", True, [], 1e400])
def test_index_with_a_wrong_size(sharded: Path, total: object) -> None:
    write_index(sharded, index_of(sharded) | {"metadata": {"total_size": total}})
    problem = only_problem(sharded)
    size = sum(t.numel() * t.element_size() for tensors in shards(sharded).values() for t in tensors.values())
    assert problem.kind == "index_total_size" and f"the shards hold {size} bytes" in problem.message


def test_a_head_in_a_file_that_the_index_does_not_name(sharded: Path) -> None:
    files = shards(sharded)
    trunk = {name: {n: t for n, t in ts.items() if "mtp" not in n} for name, ts in files.items()}
    write(sharded, {name: tensors for name, tensors in trunk.items() if tensors}, index=True)
    save_file({n: t for ts in files.values() for n, t in ts.items() if "mtp" in n}, sharded / "mtp.safetensors")
    kinds = {p.kind: p for p in look(sharded).problems}
    assert kinds.keys() == {"file_not_in_index", "mtp_dropped"}
    assert len(kinds["file_not_in_index"].tensors) == 13


def test_two_layouts_side_by_side(sharded: Path, path: Path) -> None:
    shutil.copy(path / SINGLE, sharded / SINGLE)
    assert only_problem(sharded).kind == "two_layouts"


def test_config_of_another_model(path: Path) -> None:
    edit_config(path, vocab_size=99)
    problem = only_problem(path)
    assert problem.kind == "config_contradicts_trunk" and "[99, 16]" in problem.message
    edit_config(path, vocab_size=61, num_key_value_heads=1)
    assert only_problem(path).message.startswith("self_attn.k_proj.weight of the trunk has shape [8, 16]")


def test_trunk_layers_are_missing(path: Path) -> None:
    edit_config(path, num_hidden_layers=3)
    assert only_problem(path).kind == "trunk_layers_missing"


def quantise(tensors: dict[str, Tensor], block: bool) -> dict[str, Tensor]:
    """float8 weights with scales in the trunk's linear layers, as DeepSeek ships them; of the block too, if asked."""
    out = {}
    for name, tensor in tensors.items():
        linear = name.endswith("_proj.weight") and (block or "mtp" not in name) and "input_proj" not in name
        out[name] = tensor.to(torch.float8_e4m3fn) if linear else tensor
        if linear:
            out[name.replace(".weight", ".weight_scale_inv")] = torch.ones(1, 1)
    return out


def test_quantised_trunk_with_an_unquantised_head(path: Path) -> None:
    """Fault 21: the loader looks for a quantised block, skips the names that it has, and never accepts a draft."""
    edit(path, lambda tensors: quantise(tensors, block=False))
    edit_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    problem = only_problem(path)
    assert problem.kind == "quantisation" and len(problem.tensors) == 7
    assert "modules_to_not_convert" in problem.mend


@pytest.mark.parametrize(
    ("key", "patterns"),
    [
        ("modules_to_not_convert", ["model.mtp_layers"]),
        ("modules_to_not_convert", ["mtp_layers"]),
        ("ignore", ["lm_head", r"re:.*mtp_layers.*"]),
        ("exclude_modules", ["model.mtp_layers.0.*"]),
        ("ignored_layers", [f"model.mtp_layers.0.self_attn.{p}_proj" for p in "qkvo"] + ["model.mtp_layers.0.mlp"]),
    ],
)
def test_an_unquantised_head_that_is_exempted(path: Path, key: str, patterns: list[str]) -> None:
    edit(path, lambda tensors: quantise(tensors, block=False))
    edit_config(path, quantization_config={"quant_method": "fp8", key: patterns})
    found = look(path)
    assert found.healthy and "as quantization_config says" in found.notes[0]
    edit_config(path, quantization_config={"quant_method": "fp8", key: ["lm_head", "re:(", "model.mtp_layers.1"]})
    assert not look(path).healthy


def test_all_quantised_is_healthy_and_undeclared_is_not(path: Path) -> None:
    edit(path, lambda tensors: quantise(tensors, block=True))
    edit_config(path, quantization_config={"quant_method": "fp8"})
    assert look(path).healthy
    edit_config(path, quantization_config=None)
    assert only_problem(path).kind == "quantisation"


def test_a_packed_head_is_accounted_for(path: Path) -> None:
    """GPTQ's names: x.qweight, x.scales, ... instead of x.weight."""

    def pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight") and "input_proj" not in name:
                base = name.removesuffix("weight")
                out |= {f"{base}qweight": torch.ones(tensor.shape[1] // 8, tensor.shape[0], dtype=torch.int32)}
                out |= {f"{base}scales": torch.ones(1), f"{base}qzeros": torch.ones(1, dtype=torch.int32)}
            else:
                out[name] = tensor
        return out

    edit(path, pack)
    edit_config(path, quantization_config={"quant_method": "gptq"})
    found = look(path)
    assert found.healthy, found.problems
    edit(path, lambda tensors: {n: t for n, t in tensors.items() if n != "model.mtp_layers.0.mlp.up_proj.qweight"})
    assert "missing" in [p.kind for p in look(path).problems]


def sparse_shard(file: Path, tensors: dict[str, list[int]]) -> int:
    """A BF16 shard of the stated shapes that takes no room on the disk; returns the bytes that it seems to have."""
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    content = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(content)) + content)
        stream.truncate(8 + len(content) + offset)
    return offset


def test_hundreds_of_gigabytes_from_headers(tmp_path: Path) -> None:
    """A 61-layer mixture of experts (sparse files): no tensor is read, so it takes about what its headers take."""
    size, experts, layers = 7168, 256, 61
    config = {
        "model_type": "deepseek_v3", "hidden_size": size, "vocab_size": 129280, "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1, "num_attention_heads": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    total = 0
    for layer in range(layers + 1):
        at = f"model.layers.{layer}."
        tensors = {f"{at}input_layernorm.weight": [size], f"{at}self_attn.o_proj.weight": [size, 16384]}
        for expert in range(experts):
            for name, shape in (("gate_proj", [2048, size]), ("up_proj", [2048, size]), ("down_proj", [size, 2048])):
                tensors[f"{at}mlp.experts.{expert}.{name}.weight"] = shape
        if layer == 0:
            tensors |= {"model.embed_tokens.weight": [129280, size], "lm_head.weight": [129280, size]}
        if layer == layers:
            tensors |= {f"{at}{n}.weight": [size] for n in ("enorm", "hnorm", "shared_head.norm")}
            tensors |= {f"{at}eh_proj.weight": [size, 2 * size]}
            tensors |= {f"{at}embed_tokens.weight": [129280, size], f"{at}shared_head.head.weight": [129280, size]}
            del tensors[f"{at}mlp.experts.255.up_proj.weight"]
        shard = f"model-{layer + 1:05}-of-{layers + 1:05}.safetensors"
        total += sparse_shard(tmp_path / shard, tensors)
        weight_map |= dict.fromkeys(tensors, shard)
    write_index(tmp_path, {"metadata": {"total_size": total}, "weight_map": weight_map})
    on_disk = sum(os.stat(file).st_blocks * 512 for file in tmp_path.iterdir())
    assert total > 1_000_000_000_000 and on_disk < 100_000_000
    before = time.process_time()
    problem = only_problem(tmp_path, values=False)
    assert problem.kind == "missing" and problem.tensors == ("model.layers.61.mlp.experts.255.up_proj.weight",)
    assert time.process_time() - before < 60  # reading even one shard would take longer


def test_names_that_would_garble_a_terminal(path: Path) -> None:
    edit(path, lambda tensors: tensors | {"model.mtp_layers.0.\x1b[31m\nred.weight": torch.ones(2)})
    problem = only_problem(path)
    assert problem.message.isprintable() and "\\x1b[31m\\nred" in problem.message
