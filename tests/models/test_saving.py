"""Attach, save, load: every MTP tensor is written once, under its family's name, and comes back bit for bit."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forerun import MTPConfig, attach, load
from forerun.checkpoint.reader import INDEX
from forerun.checkpoint.writer import scratch_directory
from forerun.config import ModelConfig
from forerun.errors import ForerunError, UsageError
from forerun.families import ATTACHED, MIMO
from forerun.models.carrier import MTPCarrier, load_named_weights, named_weights
from forerun.trainers.setup import load_model
from tests.models.tiny import tiny_model, token_rows

MIMO_LAYER = [
    "final_layernorm.weight",
    "hidden_layernorm.weight",
    "input_layernorm.weight",
    "input_proj.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_proj.bias",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.bias",
    "self_attn.v_proj.weight",
    "token_layernorm.weight",
]


@pytest.mark.parametrize("init", ["carry", "plain"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_round_trip(tmp_path: Path, init: str, tied: bool, sharded: bool) -> None:
    model = attach(tiny_model(tied=tied, dtype=torch.float32), MTPConfig(enable=True, num_layers=2), init=init)
    model.save_pretrained(tmp_path / "out", **({"max_shard_size": "5KB"} if sharded else {}))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == sharded
    again = load(tmp_path / "out")
    assert isinstance(again, MTPCarrier)
    assert again.mtp.num_depths == 2
    for (name, ours), (other, theirs) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == other and torch.equal(ours, theirs), name


def test_the_trunk_is_still_a_checkpoint_for_transformers(tmp_path: Path) -> None:
    plain = tiny_model(dtype=torch.float32).eval()
    ids = token_rows(2, 9)
    expected = plain(ids).logits
    attach(plain, MTPConfig(enable=True)).save_pretrained(tmp_path / "out")
    trunk = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(trunk(ids).logits, expected)


def test_mimo_layout_and_config(tmp_path: Path) -> None:
    model = attach(tiny_model("qwen2", dtype=torch.float32), MTPConfig(enable=True), family=MIMO)
    model.save_pretrained(tmp_path / "out")
    names = {n for n in load_file(tmp_path / "out" / "model.safetensors") if "mtp" in n}
    assert names == {f"model.mtp_layers.0.{n}" for n in MIMO_LAYER}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("mimo", ["MiMoForCausalLM"])
    again = load(tmp_path / "out")
    assert isinstance(again, MTPCarrier) and again.mtp_family is MIMO
    again.save_pretrained(tmp_path / "again")
    first, second = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def test_remote_code_and_auto_map_are_carried_over(tmp_path: Path) -> None:
    attach(tiny_model("qwen2"), MTPConfig(enable=True), family=MIMO).save_pretrained(tmp_path / "out")
    (tmp_path / "out" / "configuration_mimo.py").write_text("# the family's own code\n")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    load(tmp_path / "out").save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "configuration_mimo.py").exists()
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"] == config["auto_map"]


def test_what_belongs_to_the_checkpoint_goes_along(tmp_path: Path) -> None:
    """Tokenizer, chat template, generation settings; nothing else, and nothing over what is there already."""
    attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True)).save_pretrained(tmp_path / "out")
    files = {
        "tokenizer.json": "tokenizer",
        "tokenizer_config.json": "settings",
        "chat_template.jinja": "template",
        "generation_config.json": '{"temperature": 0.25, "do_sample": true}',
        "optimizer.json": "of a run",
        "own_code.py": "not named in config.json",
    }
    for name, text in files.items():
        (tmp_path / "out" / name).write_text(text)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "tokenizer_config.json").write_text("the user's")
    load(tmp_path / "out").save_pretrained(tmp_path / "again")
    texts = {name: (tmp_path / "again" / name).read_text() for name in files if (tmp_path / "again" / name).exists()}
    assert json.loads(texts.pop("generation_config.json"))["temperature"] == 0.25
    assert texts == {
        "tokenizer.json": "tokenizer",
        "tokenizer_config.json": "the user's",
        "chat_template.jinja": "template",
    }


def test_a_tokenizer_that_is_a_link_out_of_the_directory_is_not_copied(tmp_path: Path) -> None:
    attach(tiny_model(), MTPConfig(enable=True)).save_pretrained(tmp_path / "out")
    (tmp_path / "secret").write_text("of somebody else")
    (tmp_path / "out" / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match="leads out of the directory"):
        load(tmp_path / "out").save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_hub_repository_is_loaded_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True), init="plain")
    repository = tmp_path / "models--somebody--tiny"
    model.save_pretrained(repository / "snapshots" / "a1")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    again = load("somebody/tiny")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(UsageError, match=r"somebody/else is no directory here.*hub") as caught:
        load("somebody/else")
    assert "\n" not in str(caught.value)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        load("models--somebody--tiny/else")  # a path, as the directory is there


def test_remote_code_runs_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True)).save_pretrained(path)
    (path / "own_code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((path / "config.json").read_text()) | {"model_type": "own"}
    config["auto_map"] = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    (path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(UsageError, match="trust_remote_code"):
        load(path)
    model = load_model(ModelConfig(str(path), trust_remote_code=True), MTPConfig(enable=True), torch.device("cpu"))
    assert type(model).__name__ == "OwnForCausalLM" and isinstance(model, MTPCarrier)


def test_disabled_mtp_skips_the_tensors_and_clears_the_key(tmp_path: Path) -> None:
    attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True)).save_pretrained(tmp_path / "out")
    model = load(tmp_path / "out", MTPConfig(enable=False))
    assert not isinstance(model, MTPCarrier)
    assert model.config.num_nextn_predict_layers == 0
    model.save_pretrained(tmp_path / "plain")
    assert not [n for n in load_file(tmp_path / "plain" / "model.safetensors") if "mtp" in n]


def test_a_state_dict_without_the_block_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    model = attach(tiny_model(), MTPConfig(enable=True))
    trunk_only = {k: v for k, v in model.state_dict().items() if not k.startswith("mtp.")}
    with pytest.raises(ForerunError, match="lacks 13 of 13 MTP tensors"):
        model.save_pretrained(tmp_path / "out", state_dict=trunk_only)
    assert not list(tmp_path.iterdir())


def test_a_failing_write_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attach(tiny_model(), MTPConfig(enable=True))
    model.save_pretrained(tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with torch.no_grad():
        model.mtp.layers[0].proj.weight.zero_()
    with pytest.raises(OSError, match="No space"):
        model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_other_files_of_the_directory_stay(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "trainer_state.json").write_text("{}")
    attach(tiny_model(), MTPConfig(enable=True)).save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "trainer_state.json").exists() and (tmp_path / "out" / "model.safetensors").exists()


def test_a_save_writes_where_a_link_leads(tmp_path: Path) -> None:
    """Renames work within one file system alone, and a link may lead to another."""
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    (tmp_path / "dangling").symlink_to(tmp_path / "disk" / "new")
    with scratch_directory(tmp_path / "link") as scratch:
        assert scratch.parent == tmp_path / "disk"
    model = attach(tiny_model(dtype=torch.float32))
    for link, real in (("link", "out"), ("dangling", "new")):
        model.save_pretrained(tmp_path / link)
        assert (tmp_path / link).is_symlink()
        assert isinstance(load(tmp_path / "disk" / real), MTPCarrier)
    assert sorted(file.name for file in tmp_path.rglob("*.partial")) == []


def test_a_save_into_a_mounted_directory_stays_on_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == out)
    with scratch_directory(out) as scratch:
        assert scratch.parent == out
    attach(tiny_model(dtype=torch.float32)).save_pretrained(out)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("sharded_first", [True, False])
def test_a_save_over_another_layout_leaves_none_of_its_weights(tmp_path: Path, sharded_first: bool) -> None:
    """A reader takes whichever layout it looks for first, so the stale one would come back as trunk or as head."""
    model = attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True), init="plain")
    layouts = [{"max_shard_size": "5KB"}, {}]
    for layout in layouts if sharded_first else layouts[::-1]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        model.save_pretrained(tmp_path / "out", **layout)
    again = load(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert (tmp_path / "out" / INDEX).exists() != sharded_first


def test_a_full_disk_is_named_in_one_line(tmp_path: Path) -> None:
    """safetensors has an error of its own for it, which is no OSError."""
    model = attach(tiny_model(), MTPConfig(enable=True))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(ForerunError, match=r"cannot write .*out.*free some space") as caught:
            model.save_pretrained(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def broken(tmp_path: Path, how: str) -> Path:
    path = tmp_path / "checkpoint"
    attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True)).save_pretrained(path)
    weights, config = path / "model.safetensors", path / "config.json"
    if how == "not a directory":
        shutil.rmtree(path)
    elif how == "no config":
        config.unlink()
    elif how == "broken json":
        config.write_text("{")
    elif how == "no weights":
        weights.unlink()
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:100])
    elif how == "head gone":
        save_file({k: v for k, v in load_file(weights).items() if "mtp" not in k}, weights, {"format": "pt"})
    elif how == "head undeclared":
        config.write_text(config.read_text().replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0'))
    elif how == "one tensor gone":
        tensors = load_file(weights)
        del tensors["model.mtp_layers.0.mlp.up_proj.weight"]
        save_file(tensors, weights, {"format": "pt"})
    elif how == "trunk weight gone":
        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, weights, {"format": "pt"})
    elif how == "broken shard":
        shutil.rmtree(path)
        attach(tiny_model(), MTPConfig(enable=True)).save_pretrained(path, max_shard_size="5KB")
        (path / json.loads((path / INDEX).read_text())["weight_map"]["model.norm.weight"]).write_bytes(b"x" * 99)
    elif how == "depth is no number":
        config.write_text(
            config.read_text().replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": "a"')
        )
    elif how == "wrong value":
        config.write_text(config.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 0'))
    elif how == "trunk weight of another shape":
        tensors = load_file(weights)
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:3].clone()
        save_file(tensors, weights, {"format": "pt"})
    elif how == "wrong shape":
        tensors = load_file(weights)
        tensors["model.mtp_layers.0.input_proj.weight"] = tensors["model.mtp_layers.0.input_proj.weight"][:, :3].clone()
        save_file(tensors, weights, {"format": "pt"})
    elif how == "missing shard":
        weights.unlink()
        index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
        (path / INDEX).write_text(json.dumps(index))
    return path


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("not a directory", "is not a directory"),
        ("no config", "has no config.json"),
        ("broken json", "cannot read"),
        ("no weights", "only safetensors"),
        ("truncated", "cannot read"),
        ("head gone", "declares num_nextn_predict_layers=1 but holds 0"),
        ("head undeclared", "declares num_nextn_predict_layers=0 but holds 1"),
        ("one tensor gone", "has no tensor model.mtp_layers.0.mlp.up_proj.weight"),
        ("trunk weight gone", "lacks 1 of the trunk's weights, first model.layers.1.mlp.up_proj.weight"),
        ("broken shard", "cannot"),
        ("depth is no number", "num_nextn_predict_layers='a'"),
        ("wrong value", "check config.json"),
        ("wrong shape", "has shape"),
        (
            "trunk weight of another shape",
            r"model\.layers\.1\.mlp\.up_proj\.weight has shape \(3, 16\), config\.json asks for",
        ),
        ("missing shard", "lacks model-00001-of-00002.safetensors"),
    ],
)
def test_a_broken_checkpoint_is_named_in_one_line(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(ForerunError, match=message) as caught:
        load(broken(tmp_path, how), MTPConfig(enable=True))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_tensors_without_a_use_are_named(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    family = {"llama": ATTACHED, "qwen2": MIMO}[kind]
    attach(tiny_model(kind), MTPConfig(enable=True, num_layers=2), family=family).save_pretrained(tmp_path / "out")
    load(tmp_path / "out")
    assert not caplog.messages
    weights = tmp_path / "out" / "model.safetensors"
    save_file(load_file(weights) | {"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}, weights, {"format": "pt"})
    load(tmp_path / "out")
    assert "holds 1 tensors that config.json has no use for, first model.layers.2.mlp.up_proj" in caplog.text


def test_enable_on_a_checkpoint_without_mtp_says_how_to_attach(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "plain")
    with pytest.raises(UsageError, match=r"forerun\.attach"):
        load(tmp_path / "plain", MTPConfig(enable=True))


def test_repeating_one_of_several_layers_is_refused_rather_than_dropping_the_others(tmp_path: Path) -> None:
    attach(tiny_model(), MTPConfig(enable=True, num_layers=3)).save_pretrained(tmp_path / "out")
    with pytest.raises(UsageError, match="holds 3"):
        load(tmp_path / "out", MTPConfig(enable=True, num_layers=3, repeat_layer=True))


def test_attach_refuses_a_second_block() -> None:
    with pytest.raises(UsageError, match="already"):
        attach(attach(tiny_model(), MTPConfig(enable=True)))


def test_a_block_on_a_frozen_trunk_is_trainable_as_a_whole() -> None:
    """The copied decoder layer must not inherit the freeze: half the head would silently stay as it was."""
    model = attach(tiny_model().requires_grad_(False), MTPConfig(enable=True))
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if name.startswith("mtp.")
    }


def test_an_mtp_parameter_without_a_name_is_an_error() -> None:
    with pytest.raises(KeyError, match="no name"):
        ATTACHED.tensor_name(0, "surprise.weight")


def test_named_weights_cover_everything_once_and_load_in_place() -> None:
    model = attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True), init="plain")
    other = attach(tiny_model(dtype=torch.float32, seed=1), MTPConfig(enable=True), init="plain", seed=1)
    weights = dict(named_weights(model))
    assert "lm_head.weight" not in weights  # tied: under the embedding's name
    assert sum("mtp_layers" in n for n in weights) == 13
    load_named_weights(other, weights)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_an_incomplete_update_changes_nothing(fault: str) -> None:
    model = attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True))
    before = copy.deepcopy(model.state_dict())
    weights = {n: torch.ones_like(t) for n, t in named_weights(model)}
    name = "model.mtp_layers.0.input_proj.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        weights["model.mtp_layers.7.input_proj.weight"] = weights[name]
    else:
        weights[name] = torch.ones(1)
    with pytest.raises(ForerunError, match="mtp_layers"):
        load_named_weights(model, weights)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_load_state_dict_takes_the_names_of_the_file(tmp_path: Path) -> None:
    """Trainers resume this way; without the renaming the head would silently stay as it was initialised."""
    model = attach(tiny_model(tied=False, dtype=torch.float32), MTPConfig(enable=True), init="plain")
    model.save_pretrained(tmp_path / "out")
    other = attach(tiny_model(tied=False, dtype=torch.float32, seed=1), MTPConfig(enable=True), init="plain", seed=1)
    result = other.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_others_may_read_the_weights_where_the_umask_lets_them(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        attach(tiny_model(), MTPConfig(enable=True)).save_pretrained(tmp_path / "out")
    finally:
        os.umask(mask)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {0o644}
