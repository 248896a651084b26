"""An attached head exported for serving: the same model in another layout, or a reason why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

import forerun
from forerun.checkpoint import shards
from forerun.cli import main
from forerun.errors import UsageError
from forerun.families import ATTACHED, MIMO
from forerun.families.serving import TARGETS
from forerun.models import serving
from forerun.models.carrier import MTPCarrier, file_state_dict
from forerun.models.serving import export
from forerun.models.trunk import base_model, decoder_inputs, embed
from tests.families.tiny import tiny_trunk

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def source(path: Path, kind: str = "Llama", layers: int = 1, **settings: Any) -> MTPCarrier:
    """A trunk with an attached block, every number of it random, saved to `path`."""
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(0)
    trunk = model_class(model_class.config_class(**SHAPE | settings))
    model = forerun.attach(trunk, forerun.MTPConfig(enable=True, num_layers=layers), init="plain")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return model.eval()


@torch.no_grad()
def outputs(model: PreTrainedModel) -> list[Tensor]:
    """Logits of the trunk, and the block's hidden at every depth."""
    assert isinstance(model, MTPCarrier)
    ids = torch.arange(40).view(2, 20) % 61
    hidden = base_model(model)(input_ids=ids, use_cache=False).last_hidden_state
    inputs = decoder_inputs(model, hidden, torch.arange(20).expand(2, -1))
    depths = model.mtp(hidden, lambda depth: embed(model, ids.roll(-depth, 1)), **inputs)
    return [model(input_ids=ids, use_cache=False).logits, *depths]


def stored(path: Path) -> dict[str, Tensor]:
    tensors = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dictionary
    return tensors


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"rope_parameters": LLAMA3}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}),
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0}}),
        ("Llama", {"rms_norm_eps": 1e-2, "layers": 2}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {}),
        ("Qwen2", {"dtype": torch.bfloat16}),
    ],
)
def test_the_export_is_the_same_model(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    model = source(tmp_path / "source", kind, **settings)
    export(tmp_path / "source", tmp_path / "out")
    dtype = settings.get("dtype", torch.float32)
    before, after = (forerun.load(tmp_path / name, dtype=dtype).eval() for name in ("source", "out"))
    # Past depth 1 the two layouts hand on another hidden.
    after.mtp.recurrence = before.mtp.recurrence
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs(before), outputs(after), strict=True))
    # And the export lost nothing of what was saved, nor changed it.
    written = stored(tmp_path / "out")
    for name, tensor in stored(tmp_path / "source").items():
        assert torch.equal(written.pop(name), tensor)
    assert all(name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")) for name in written)
    assert not any(tensor.any() for tensor in written.values())
    assert after.config.tie_word_embeddings is model.config.tie_word_embeddings
    assert after.mtp_family is MIMO


@pytest.mark.parametrize("tied", [True, False])
def test_with_the_norm_folded_either_hidden_gives_the_same_drafts(tmp_path: Path, tied: bool) -> None:
    model = source(tmp_path / "source", tie_word_embeddings=tied)
    with torch.no_grad():  # a multiple of the trunk's norm, which training leaves nearly so
        model.mtp.layer(1).final_norm.weight.copy_(0.8 * base_model(model).norm.weight)
    model.save_pretrained(tmp_path / "source")
    export(tmp_path / "source", tmp_path / "out", fold_norm=True)
    before, after = (forerun.load(tmp_path / name, dtype=torch.float32).eval() for name in ("source", "out"))
    assert after.config.tie_word_embeddings is False
    before.mtp.num_depths = after.mtp.num_depths = 2  # the same layer again, as an engine chains it
    ours, theirs = outputs(before), outputs(after)
    torch.testing.assert_close(theirs[0], ours[0])
    for depth in (1, 2):
        drafted = before.get_output_embeddings()(ours[depth])
        torch.testing.assert_close(after.get_output_embeddings()(theirs[depth]), drafted, rtol=1e-4, atol=1e-4)
    # SGLang's way: the hidden after the norm, at depth 1 too.
    after.mtp.undo_norm = None
    torch.testing.assert_close(outputs(after)[1:], theirs[1:], rtol=1e-4, atol=1e-4)
    # Without folding, the chained hidden is another one.
    export(tmp_path / "source", tmp_path / "plain")
    plain = forerun.load(tmp_path / "plain", dtype=torch.float32).eval()
    plain.mtp.num_depths = 2
    assert (outputs(plain)[2] - ours[2]).abs().max() > 1e-2


def test_a_head_that_a_tied_model_does_not_use_is_left_behind(tmp_path: Path) -> None:
    source(tmp_path / "source", tie_word_embeddings=True)
    tensors = stored(tmp_path / "source")
    same = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": same}, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    export(tmp_path / "source", tmp_path / "plain")
    assert "lm_head.weight" not in stored(tmp_path / "plain")
    export(tmp_path / "source", tmp_path / "folded", fold_norm=True, shard_bytes=8_000)
    files = [load_file(file) for file in (tmp_path / "folded").glob("*.safetensors")]
    (head,) = [held["lm_head.weight"] for held in files if "lm_head.weight" in held]
    torch.testing.assert_close(head, tensors["model.embed_tokens.weight"] * tensors["model.norm.weight"])


@pytest.mark.parametrize("to", ["mimo", "megatron"])
def test_a_tied_model_with_another_head_in_its_files_is_refused(
    tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers runs it with that head, engines with the embedding: an export would choose without a word."""
    source(tmp_path / "source", tie_word_embeddings=True)
    tensors = stored(tmp_path / "source")
    other = tensors["model.embed_tokens.weight"] + 1.0
    save_file(tensors | {"lm_head.weight": other}, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    trunk = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    assert torch.equal(trunk.get_output_embeddings().weight, other)
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--to", to]) == 2
    assert "lm_head.weight in the files is another: set tie_word_embeddings to false" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_final_norm_of_another_size_is_refused(tmp_path: Path) -> None:
    source(tmp_path / "source")
    tensors = stored(tmp_path / "source") | {"model.norm.weight": torch.ones(3)}
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"model\.norm\.weight has shape \(3,\), config.json says hidden_size=16"):
        export(tmp_path / "source", tmp_path / "out", fold_norm=True)


def test_the_layout_is_what_a_mimo_carrier_has(tmp_path: Path) -> None:
    """Names and shapes are those that a MiMo model saves."""
    source(tmp_path / "source")
    export(tmp_path / "source", tmp_path / "out")
    mimo = forerun.attach(tiny_trunk("mimo", **SHAPE), forerun.MTPConfig(enable=True), family=MIMO)
    shapes = {name: tensor.shape for name, tensor in file_state_dict(mimo, mimo.state_dict()).items()}
    assert {name: tensor.shape for name, tensor in stored(tmp_path / "out").items()} == shapes


def test_transformers_reads_the_configuration_with_its_code(tmp_path: Path) -> None:
    source(tmp_path / "source", rope_parameters=LLAMA3, layers=2)
    export(tmp_path / "source", tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert (config.model_type, config.architectures) == ("mimo", ["MiMoForCausalLM"])
    assert config.num_nextn_predict_layers == 2
    assert config.rope_parameters == LLAMA3
    assert isinstance(config, transformers.Qwen2Config)


def test_an_empty_directory_and_a_link_to_one_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source(tmp_path / "source")
    for name in ("out", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    export(tmp_path / "source", tmp_path / "link")
    monkeypatch.chdir(tmp_path / "here")
    export("../source", ".")
    for name in ("out", "here"):
        assert isinstance(forerun.load(tmp_path / name), MTPCarrier)
    assert (tmp_path / "link").is_symlink() and Path("config.json").exists()


def test_what_belongs_to_a_checkpoint_goes_along(tmp_path: Path) -> None:
    source(tmp_path / "source")
    carried = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": '{"eos_token_id": 7}',
    }
    for name, text in carried.items():
        (tmp_path / "source" / name).write_text(text)
    export(tmp_path / "source", tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_text() for name in carried} == carried


def test_shards_hold_what_fits_and_the_index_finds_it(tmp_path: Path) -> None:
    source(tmp_path / "source")
    export(tmp_path / "source", tmp_path / "whole")
    export(tmp_path / "source", tmp_path / "out", shard_bytes=8_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = stored(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and {file.name for file in files} == set(index["weight_map"].values())
    assert all(file.stat().st_size < 8_000 + 3_000 for file in files)  # tensors and header
    whole = stored(tmp_path / "whole")
    assert index["weight_map"].keys() == tensors.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors.items())
    assert forerun.load(tmp_path / "out").config.num_nextn_predict_layers == 1


def test_one_shard_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source(tmp_path / "source")
    held: list[Tensor] = []
    largest = 0
    read, save = serving.CheckpointReader.tensor, shards.save_file

    def reading(self: Any, name: str) -> Tensor:
        nonlocal largest
        held.append(read(self, name))
        largest = max(largest, sum(tensor.nbytes for tensor in held))
        return held[-1]

    def saving(*args: Any) -> None:
        save(*args)
        held[:-1] = []  # the last one read did not fit

    monkeypatch.setattr(serving.CheckpointReader, "tensor", reading)
    monkeypatch.setattr(shards, "save_file", saving)
    export(tmp_path / "source", tmp_path / "out", shard_bytes=8_000)
    assert 0 < largest < 16_000 < sum(tensor.nbytes for tensor in stored(tmp_path / "source").values())


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("Qwen3", {"head_dim": 8}, "normalises queries and keys"),
        ("Llama", {"attention_bias": True}, "bias on its attention's output"),
        ("Llama", {"mlp_bias": True}, "biases in its MLP"),
        ("Llama", {"head_dim": 4}, "head_dim is 4"),
        ("Mistral", {"sliding_window": 8}, "not full in every layer (sliding_window)"),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, "(sliding_attention)"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type is dynamic"),
        ("Llama", {"hidden_act": "gelu"}, "activation is gelu"),
        ("Granite", {"logits_scaling": 2.0}, "logits_scaling=2.0"),
        ("Granite", {"embedding_multiplier": 2.0}, "embedding_multiplier=2.0"),
        ("Gemma", {"head_dim": 8}, "activation is gelu"),
        ("Olmo2", {}, "normalises queries and keys"),
        ("Glm", {"head_dim": 8, "pad_token_id": 0}, "partial_rotary_factor=0.5"),
        ("Ernie4_5", {"head_dim": 8}, "layout of its own"),
        ("SmolLM3", {"no_rope_layers": [1, 0], "pad_token_id": 0}, "model_type smollm3"),
        ("Mixtral", {"num_local_experts": 2, "sliding_window": None}, "mixture of experts"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, kind: str, settings: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source(tmp_path / "source", kind, **settings)
    capsys.readouterr()
    code = main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--to", "mimo"])
    printed = capsys.readouterr()
    assert code == UsageError.exit_code
    assert reason in printed.err and printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "source"]


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("trunk_hidden", "post_norm"),
        ("concat_order", "embed_hidden"),
        ("final_norm", False),
    ],
)
def test_a_block_trained_for_another_formula_is_refused(
    tmp_path: Path, change: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source(tmp_path / "source")
    monkeypatch.setattr(serving, "family_of", lambda config: replace(ATTACHED, **{change: value}))
    with pytest.raises(UsageError, match=f"trained with {change}={value}"):
        export(tmp_path / "source", tmp_path / "out")


def test_other_sources_are_refused(tmp_path: Path) -> None:
    source(tmp_path / "source")
    export(tmp_path / "source", tmp_path / "out")
    with pytest.raises(UsageError, match="in that layout already"):
        export(tmp_path / "out", tmp_path / "again")
    with pytest.raises(UsageError, match="name a new directory"):
        export(tmp_path / "source", tmp_path / "out")
    with pytest.raises(UsageError, match="choose one of mimo"):
        export(tmp_path / "source", tmp_path / "again", to="gguf")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "plain")
    with pytest.raises(UsageError, match="carries no MTP block"):
        export(tmp_path / "plain", tmp_path / "again")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "own.Own"}}))
    with pytest.raises(UsageError, match="Python code of its own"):
        export(tmp_path / "source", tmp_path / "again")


def test_an_incomplete_source_is_refused(tmp_path: Path) -> None:
    source(tmp_path / "source")
    tensors = stored(tmp_path / "source")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks 1 tensors, first model\.layers\.1\.mlp\.up_proj\.weight"):
        export(tmp_path / "source", tmp_path / "out")
    save_file(tensors | {"model.extra": torch.ones(1)}, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"no place for, first model\.extra"):
        export(tmp_path / "source", tmp_path / "out")


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    source(tmp_path / "source")
    (tmp_path / "out").mkdir()
    export(tmp_path / "source", tmp_path / "out")
    assert forerun.load(tmp_path / "out").config.num_nextn_predict_layers == 1


def test_every_target_writes_a_family_that_is_read_again() -> None:
    assert all(target.family.architecture and target.family.model_types for target in TARGETS.values())
