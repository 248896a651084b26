"""Megatron's names and layouts and back: every byte returns, and the layout is the one that the loops below spell out.

That megatron-core itself takes these weights for the same model is asked in tests/oracles.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import forerun
from forerun.checkpoint.megatron import from_megatron, to_megatron
from forerun.cli import main
from forerun.errors import UsageError
from tests.families.handmade import checkpoint
from tests.families.tiny import tiny_trunk

KINDS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def saved(path: Path, kind: str, *, tied: bool = False, depths: int = 2) -> Path:
    model = tiny_trunk(KINDS[kind], num_attention_heads=4, head_dim=4, tie_word_embeddings=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    forerun.attach(model, forerun.MTPConfig(enable=True, num_layers=depths), init="plain").save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_there_and_back_is_bit_exact(tmp_path: Path, kind: str, tied: bool) -> None:
    source = saved(tmp_path / "source", kind, tied=tied)
    to_megatron(source, tmp_path / "megatron", shard_bytes=5_000)
    from_megatron(tmp_path / "megatron", tmp_path / "back")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert isinstance(forerun.load(tmp_path / "back").mtp, torch.nn.Module)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_experts_and_latent_attention_return_bit_by_bit(tmp_path: Path, kind: str) -> None:
    model = forerun.attach(tiny_trunk(kind), forerun.MTPConfig(enable=True), init="plain")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_()
    model.save_pretrained(tmp_path / "source")
    to_megatron(tmp_path / "source", tmp_path / "megatron")
    theirs = load_file(tmp_path / "megatron" / "model.safetensors")
    assert theirs["mtp.layers.0.transformer_layer.mlp.experts.local_experts.3.linear_fc1.weight"].shape == (16, 16)
    assert not any("embed_tokens" in name or "shared_head" in name for name in theirs)
    from_megatron(tmp_path / "megatron", tmp_path / "back")
    before = load_file(tmp_path / "source" / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_layout(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "qwen2")
    to_megatron(source, tmp_path / "megatron")
    ours, theirs = load_file(source / "model.safetensors"), load_file(tmp_path / "megatron" / "model.safetensors")
    attention = "model.layers.1.self_attn."
    for part in ("weight", "bias"):
        rows = []
        for group in range(2):  # four query heads share two key heads: two each, four rows a head
            rows += [ours[f"{attention}q_proj.{part}"][8 * group + i] for i in range(8)]
            rows += [ours[f"{attention}k_proj.{part}"][4 * group + i] for i in range(4)]
            rows += [ours[f"{attention}v_proj.{part}"][4 * group + i] for i in range(4)]
        assert torch.stack(rows).equal(theirs[f"decoder.layers.1.self_attention.linear_qkv.{part}"])
    fc1 = theirs["mtp.layers.1.transformer_layer.mlp.linear_fc1.weight"]
    assert fc1[:24].equal(ours["model.mtp_layers.1.mlp.gate_proj.weight"])
    assert fc1[24:].equal(ours["model.mtp_layers.1.mlp.up_proj.weight"])
    # mimo's projection reads [hidden, embedding], Megatron's [embedding, hidden].
    projection = theirs["mtp.layers.0.eh_proj.weight"]
    assert projection[:, :16].equal(ours["model.mtp_layers.0.input_proj.weight"][:, 16:])
    assert projection[:, 16:].equal(ours["model.mtp_layers.0.input_proj.weight"][:, :16])


def test_a_head_that_reads_another_hidden_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        to_megatron(saved(tmp_path / "source", "llama"), tmp_path / "megatron")
    assert "family attached reads the trunk's hidden before its final norm" in caplog.text


def test_what_has_no_place_is_named(tmp_path: Path) -> None:
    tiny_trunk("attached_moe", mlp_only_layers=[]).save_pretrained(tmp_path / "moe")
    with pytest.raises(UsageError, match=r"no Megatron name in the table, first model\.layers\.0\.mlp\.experts"):
        to_megatron(tmp_path / "moe", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_family_whose_block_megatron_has_not_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "source", "nemotron_h")
    with pytest.raises(UsageError, match="has no Megatron names: family 'nemotron_h' has no name for"):
        to_megatron(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_key_value_heads", 3, "not the shape that the heads in config.json imply"),
        ("num_key_value_heads", True, "num_key_value_heads=True"),
        ("num_attention_heads", 10**30, "num_attention_heads=10"),
        ("num_hidden_layers", 10**18, "num_hidden_layers='10"),
        ("num_nextn_predict_layers", 10**18, "num_nextn_predict_layers=10"),
    ],
)
@pytest.mark.parametrize("back", [False, True])
def test_numbers_that_cannot_be_are_told_in_one_line(
    tmp_path: Path, key: str, value: object, message: str, back: bool
) -> None:
    source, convert = saved(tmp_path / "source", "llama"), to_megatron
    if back:
        to_megatron(source, tmp_path / "megatron")
        source, convert = tmp_path / "megatron", from_megatron
    config = json.loads((source / "config.json").read_text()) | {key: value}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=message):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "lost", ["model.norm.weight", "model.layers.1.self_attn.o_proj.weight", "model.mtp_layers.1.input_proj.weight"]
)
def test_a_lost_tensor_is_named(tmp_path: Path, lost: str) -> None:
    file = saved(tmp_path / "source", "llama") / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(UsageError, match=f"{lost} is missing: restore it"):
        to_megatron(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_megatron_names_are_told_where_others_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to_megatron(saved(tmp_path / "source", "llama"), tmp_path / "megatron")
    way_back = "holds Megatron-Core's names: bring it back first"
    with pytest.raises(UsageError, match=way_back):
        forerun.load(tmp_path / "megatron")
    for command in (["inspect"], ["convert", "--to", "mimo", str(tmp_path / "out")]):
        assert main([command[0], str(tmp_path / "megatron"), *command[3:], *command[1:3]]) == 2
        assert way_back in capsys.readouterr().err


def test_the_wrong_way_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "llama")
    with pytest.raises(UsageError, match="holds Hugging Face names already"):
        from_megatron(source, tmp_path / "out")
    with pytest.raises(UsageError, match="source is there already: name a new directory"):
        to_megatron(source, source)


def test_the_command(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "llama", depths=1)
    assert main(["convert", str(source), str(tmp_path / "megatron"), "--to", "megatron"]) == 0
    assert main(["convert", str(tmp_path / "megatron"), str(tmp_path / "back"), "--to", "hf"]) == 0
    assert main(["convert", str(source), str(tmp_path / "x"), "--to", "onnx"]) == 2
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
