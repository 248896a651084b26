"""Ways into a model's weights that do not complain by themselves: a lenient load_state_dict, a trunk filled up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import MTPConfig, attach, load
from forerun.errors import ForerunError
from tests.families.tiny import tiny_trunk
from tests.models.tiny import tiny_model

Tensors = dict[str, torch.Tensor]


def test_a_lenient_load_state_dict_fills_the_block(tmp_path: Path) -> None:
    """Trainers resume with strict=False, which says nothing of names that match no parameter."""
    model, other = (
        attach(tiny_model(tied=False, dtype=torch.float32, seed=s), MTPConfig(enable=True), init="plain", seed=s)
        for s in (0, 1)
    )
    model.save_pretrained(tmp_path / "out")
    other.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=False)
    for name, parameter in model.mtp.named_parameters():
        assert torch.equal(other.mtp.get_parameter(name), parameter), name


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_missing_embedding_or_head_is_named(tmp_path: Path, name: str) -> None:
    """The block shares both with the trunk: random numbers there make every draft wrong."""
    attach(tiny_model(tied=False, dtype=torch.float32), MTPConfig(enable=True)).save_pretrained(tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    save_file({n: t for n, t in load_file(weights).items() if n != name}, weights, {"format": "pt"})
    with pytest.raises(ForerunError, match=f"lacks 1 of the trunk's weights, first {name}"):
        load(tmp_path / "out")


UP = "model.layers.1.mlp.up_proj.weight"
HEAD = "lm_head.weight"


def packed(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].to(torch.float8_e4m3fn)
    tensors[UP + "_scale_inv"] = torch.full((1, 1), 3.0)


def rounded(tensors: Tensors) -> None:
    tensors[UP] = tensors[UP].to(torch.int8)


def second_head(tensors: Tensors) -> None:
    tensors[HEAD] = 2 * tensors["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (packed, rf"^{UP} in .*model.safetensors is quantised \(F8_E4M3\), and config.json has no quantization_config"),
        (rounded, r"is quantised \(I8\)"),
        (second_head, f"ties the LM head to the embedding, and {HEAD} in the files is another: set tie_word_emb"),
    ],
)
def test_numbers_that_mean_something_else_are_refused(
    change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    """transformers reads them without a word."""
    attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ForerunError, match=message):
        load(tmp_path)
    if change is rounded:
        return
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": change is packed}
    if change is packed:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if change is packed:
        with pytest.raises(ForerunError, match=r"is quantised \(fp8\): write it in bfloat16 first, with forerun"):
            load(tmp_path)
        return
    assert torch.equal(dict(load(tmp_path).named_parameters())[HEAD], weights[HEAD])


@pytest.mark.parametrize("in_section", [False, True])
def test_a_second_head_of_a_multimodal_model_is_refused(in_section: bool, tmp_path: Path) -> None:
    """It has other names, and config.json may tie it in the language model's section."""
    attach(tiny_trunk("qwen3_5"), MTPConfig(enable=True), init="plain").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
    (config["text_config"] if in_section else config)["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ForerunError, match=f"ties the LM head to the embedding, and {HEAD} in the files is another"):
        load(tmp_path)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True)).save_pretrained(tmp_path, max_shard_size=3000)
    shard = sorted(tmp_path.glob("model-*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ForerunError, match=f"^cannot read {shard}: .* damaged or cut short, copy it again$"):
        load(tmp_path)


def test_shards_of_two_saves_are_refused(tmp_path: Path) -> None:
    """As half of a copy leaves them; the same tensor twice does no harm."""
    model = attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True))
    model.save_pretrained(tmp_path, max_shard_size=3000)
    first, *_, last = sorted(tmp_path.glob("model-*.safetensors"))
    tensors, (name, tensor) = load_file(first), next(iter(load_file(last).items()))
    save_file(tensors | {name: tensor}, first, {"format": "pt"})
    assert torch.equal(load(tmp_path).state_dict()["model.embed_tokens.weight"], model.model.embed_tokens.weight)
    save_file(tensors | {name: tensor + 1}, first, {"format": "pt"})
    with pytest.raises(ForerunError, match=f"{first.name} and {last.name} hold {name} and differ in it"):
        load(tmp_path)


@pytest.mark.parametrize("one_file", [True, False])
def test_one_file_beside_an_index_is_refused_unless_it_is_the_same(one_file: bool, tmp_path: Path) -> None:
    """transformers reads that file, and the MTP block comes from what the index names."""
    model = attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True))
    model.save_pretrained(tmp_path, max_shard_size="1GB" if one_file else 3000)
    index = tmp_path / "model.safetensors.index.json"
    if one_file:
        aside = tmp_path / "model-900001-of-900001.safetensors"
        aside.hardlink_to(tmp_path / "model.safetensors")
        names = load_file(aside)
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, aside.name)}))
        load(tmp_path)
        save_file({name: tensor + 1 for name, tensor in names.items()}, tmp_path / "model.safetensors")
    else:
        tensors = {name: tensor for shard in tmp_path.glob("model-*") for name, tensor in load_file(shard).items()}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        load(tmp_path)
        save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(
        ForerunError, match=r"holds model.safetensors and, by its model.safetensors.index.json, another"
    ):
        load(tmp_path)


def test_an_adapter_is_not_passed_over(tmp_path: Path) -> None:
    attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True)).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ForerunError, match=r"holds an adapter beside the model, adapter_config.json: merge the two"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        ForerunError, match=r"no Hugging Face checkpoint directory \(adapter_config.json: an adapter, to"
    ):
        load(tmp_path)
