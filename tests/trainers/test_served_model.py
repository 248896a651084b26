"""What vLLM and SGLang are started on: the run's own files wherever they do, and no weight of theirs is read."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from forerun.checkpoint.reader import CheckpointReader
from forerun.config import EngineConfig, ModelConfig, RLConfig
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.errors import UsageError
from forerun.models.attach import attach
from forerun.models.loading import load
from forerun.mtp.config import MTPConfig
from forerun.rollout.served import ServedFiles
from forerun.trainers.served_model import served_model
from forerun.trainers.setup import load_model
from tests.checkpoint.test_reader import as_hub_cache
from tests.engines.test_sharded import Case, mesh_of
from tests.families.handmade import read
from tests.families.test_round_trip import same
from tests.families.tiny import TRUNKS, tiny_trunk
from tests.mtp.ranks import Ranks
from tests.trainers.tiny import make_model, make_tokenizer

OWN_BLOCK = [name for name in TRUNKS if "attached" not in name and name != "mimo"]
WEIGHTS = "model.safetensors"


def config_of(path: Path | str, mtp: bool = True, **model: Any) -> RLConfig:
    return RLConfig(model=ModelConfig(str(path), **model), mtp=MTPConfig(enable=mtp))


def carrier(path: Path, name: str = "glm4_moe", depths: int = 1, **saving: Any) -> Path:
    model = attach(tiny_trunk(name), MTPConfig(enable=True, num_layers=depths), init="plain", seed=1)
    model.save_pretrained(path, **saving)
    make_tokenizer().save_pretrained(path)
    return path


def written(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model may be loaded, nor a tensor of a file be read; biases are, which may be zeros that an export added."""
    read_one = CheckpointReader.tensor

    def read_biases(reader: CheckpointReader, name: str) -> Tensor:
        assert name.endswith(".bias"), f"{name} is read"
        return read_one(reader, name)

    monkeypatch.setattr(CheckpointReader, "tensor", read_biases)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)


@pytest.mark.parametrize("name", OWN_BLOCK)
def test_a_model_that_carries_its_block_is_linked_to(name: str, tmp_path: Path, no_weights: None) -> None:
    path = carrier(tmp_path / "model", name)
    before = contents(path)
    with served_model(config_of(path), None, make_tokenizer()) as served:
        assert {file.name for file in served.iterdir() if file.is_symlink()} == {WEIGHTS}
        assert os.path.realpath(served / WEIGHTS) == os.path.realpath(path / WEIGHTS)
        assert written(served) == written(path) and (served / "tokenizer.json").exists()
        assert ServedFiles(served).depth == 1
    assert not served.parent.exists() and contents(path) == before


def test_overrides_and_dtype_are_in_what_is_served(tmp_path: Path, no_weights: None) -> None:
    path = carrier(tmp_path / "model")
    before = contents(path)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    override = {"max_position_embeddings": 256, "rope_scaling": rope}
    with served_model(config_of(path, dtype="bfloat16", override_config=override), None, None) as served:
        found = written(served)
    assert found["max_position_embeddings"] == 256 and found["dtype"] == "bfloat16"
    assert found["rope_parameters"]["factor"] == 4.0 and found["rope_parameters"]["rope_theta"] > 0
    changed = {key for key, value in written(path).items() if found[key] != value}
    assert changed == {"max_position_embeddings", "dtype", "rope_parameters"} and contents(path) == before


def test_files_with_more_than_the_model_are_written_and_not_linked_to(tmp_path: Path) -> None:
    """A tensor that no model reads, or layers that an override leaves out, would be missing from every update."""
    path = carrier(tmp_path / "model", "glm4_moe")
    stored = read(path)
    save_file(stored | {"model.layers.0.self_attn.masked_bias": torch.ones(2)}, path / WEIGHTS, {"format": "pt"})
    with served_model(config_of(path), None, make_tokenizer()) as served:
        assert not (served / WEIGHTS).is_symlink() and same(read(served), stored)
    trunk = tmp_path / "trunk"
    tiny_trunk("LlamaForCausalLM").save_pretrained(trunk)
    fewer = config_of(trunk, mtp=False, override_config={"num_hidden_layers": 1})
    with served_model(fewer, None, None) as served:
        assert not [name for name in read(served) if name.startswith("model.layers.1.")]
        assert written(served)["num_hidden_layers"] == 1


@pytest.mark.parametrize("trusted", [False, True])
def test_a_checkpoint_s_own_code_goes_along_with_a_plain_trunk_where_it_is_trusted(
    trusted: bool, tmp_path: Path
) -> None:
    path = tmp_path / "trunk"
    tiny_trunk("LlamaForCausalLM").save_pretrained(path)
    (path / "own.py").write_text("")
    (path / "config.json").write_text(json.dumps(written(path) | {"auto_map": {"AutoModel": "own.Own"}}))
    with served_model(config_of(path, mtp=False, trust_remote_code=trusted), None, None) as served:
        assert ("auto_map" in written(served)) == (served / "own.py").exists() == trusted


def test_a_hub_snapshot_is_linked_to_and_other_links_are_refused(tmp_path: Path, no_weights: None) -> None:
    path = as_hub_cache(carrier(tmp_path / "model"), tmp_path)
    with served_model(config_of(path), None, make_tokenizer()) as served:
        assert ServedFiles(served).depth == 1
        copy = shutil.copytree(served, tmp_path / "copy", symlinks=True)
        with pytest.raises(UsageError, match="leads out of the directory"):  # somebody else's links
            ServedFiles(copy)
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).symlink_to(tmp_path / "model" / WEIGHTS)
    with (
        pytest.raises(UsageError, match="leads out of the directory"),
        served_model(config_of(path), None, None),
    ):
        pass


def test_a_block_that_the_run_is_without_is_left_out_of_its_file(tmp_path: Path) -> None:
    path = carrier(tmp_path / "model", "qwen3_next", max_shard_size="10KB")
    with served_model(config_of(path, mtp=False), None, None) as served:
        files = ServedFiles(served)
        assert files.depth == 0 and written(served)["num_nextn_predict_layers"] == 0
        assert not [name for name in files.shapes if name.startswith("mtp.")]
        whole = CheckpointReader(path)
        trunk = {name: whole.tensor(name) for name in whole.tensor_names if not name.startswith("mtp.")}
        assert same(read(served), trunk)
        changed = {whole.file_of(name) for name in whole.tensor_names if name.startswith("mtp.")}
        links = {file.name for file in served.glob("*.safetensors") if file.is_symlink()}
        assert links == set(whole.shards) - changed != set()
    with served_model(config_of(path), None, None) as served:  # with it, every one of several files
        assert all(file.is_symlink() for file in served.glob("*.safetensors")) and same(read(served), read(path))


def test_an_attached_head_of_the_checkpoint_is_exported_from_it(tmp_path: Path, monkeypatch: Any) -> None:
    path = carrier(tmp_path / "model", "attached")
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    config = config_of(path, override_config={"max_position_embeddings": 128})
    with served_model(config, None, make_tokenizer()) as served:
        assert written(served)["model_type"] == "mimo" and written(served)["max_position_embeddings"] == 128
        assert same(subset(read(served), read(path)), read(path))
        assert not (served.parent / "model").exists() and (served / "tokenizer.json").exists()


def subset(tensors: dict[str, Tensor], of: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in of}


def test_a_trunk_without_a_block_is_served_as_it_is(tmp_path: Path, no_weights: None) -> None:
    make_model().save_pretrained(tmp_path / "trunk")
    with served_model(config_of(tmp_path / "trunk", mtp=False), None, make_tokenizer()) as served:
        assert written(served) == written(tmp_path / "trunk") and (served / WEIGHTS).is_symlink()
        assert (served / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["attached", "deepseek_v3"])
def test_a_new_head_is_made_on_the_cpu(name: str, tmp_path: Path) -> None:
    """Whatever device the run computes on; on this one no weights could be."""
    trunk: Any = tiny_trunk(name)
    trunk.config.num_nextn_predict_layers = 0
    trunk.save_pretrained(tmp_path / "trunk")
    config = replace(config_of(tmp_path / "trunk"), engine=EngineConfig(device="meta"))
    with served_model(config, None, make_tokenizer()) as served:
        assert ServedFiles(served).depth == 1
        assert written(served)["model_type"] == ("mimo" if name == "attached" else name)
        old = read(tmp_path / "trunk")
        assert same(subset(read(served), old), old)


def test_a_model_that_the_caller_brought_is_served_and_not_that_at_model_path(tmp_path: Path) -> None:
    path = carrier(tmp_path / "model")
    brought = attach(tiny_trunk("glm4_moe", seed=9), MTPConfig(enable=True), init="plain", seed=9)
    with served_model(config_of(path), TorchEngine(brought), None) as served:
        assert not (served / WEIGHTS).is_symlink()
        assert torch.equal(read(served)["model.norm.weight"], brought.state_dict()["model.norm.weight"])
        assert not same(read(served), read(path))
    with served_model(config_of(path), TorchEngine(load(path)), None) as served:
        assert (served / WEIGHTS).is_symlink()


def rank_serves(group: dist.ProcessGroup, path: Path) -> tuple[int, bool] | None:
    """Rank 0 alone, while the model lies in shards and the other one does not take part."""
    config = config_of(path)
    model = load_model(config.model, config.mtp, torch.device("cpu"))
    made = TorchEngine(model, TorchEngineConfig(), mesh=mesh_of(Case(), group))
    if made.ranks.rank:
        return None
    with served_model(config, made, None) as served:
        return ServedFiles(served).depth, (served / WEIGHTS).is_symlink()


def test_one_rank_serves_what_lies_in_shards(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(rank_serves, [carrier(tmp_path / "model")] * 2) == [(1, True), None]
    make_model().save_pretrained(tmp_path / "trunk")
    assert ranks.run(rank_serves, [tmp_path / "trunk"] * 2) == [(1, False), None]


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    path = carrier(tmp_path / "model")
    (path / "config.json").write_text(json.dumps(written(path) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UsageError, match="write it in bfloat16 first"), served_model(config_of(path), None, None):
        pass


def test_nothing_is_left_where_a_server_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), served_model(config_of(carrier(tmp_path / "model")), None, None) as served:
        raise KeyboardInterrupt
    assert not served.parent.exists()
    with pytest.raises(UsageError):
        CheckpointReader(served)
