"""Keys of config.json overridden by a run: checked before weights are read, in force in the model, kept by a save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import forerun
from forerun.checkpoint.reader import CheckpointReader
from forerun.config import ModelConfig, RLConfig, SFTConfig
from forerun.config_file import load_config, save_config
from forerun.config_rollout import RolloutConfig
from forerun.errors import UsageError
from forerun.families import MIMO
from forerun.models.attach import attach
from forerun.models.config_overrides import overridden_config
from forerun.mtp.config import MTPConfig
from forerun.trainers.checks import check_config
from tests.families.tiny import tiny_trunk

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MiMo checkpoint whose config.json spells RoPE in the old way, as the published one does."""
    path = tmp_path_factory.mktemp("models") / "mimo"
    attach(tiny_trunk("mimo"), MTPConfig(enable=True), init="plain", family=MIMO).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "max_position_embeddings": 64}
    (path / "config.json").write_text(json.dumps(config))
    return path


def load(path: Path, **overrides: Any) -> Any:
    return forerun.load(path, override_config=overrides)


def hiddens(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12)[None] % 7, output_hidden_states=True).hidden_states[-1]


def test_an_override_is_in_force_and_saved(mimo: Path, tmp_path: Path) -> None:
    plain = load(mimo)
    longer = load(mimo, max_position_embeddings=128, rope_scaling=YARN)
    assert longer.config.max_position_embeddings == 128
    assert longer.config.rope_parameters["factor"] == 4.0
    assert longer.config.rope_parameters["rope_theta"] == plain.config.rope_parameters["rope_theta"]
    assert not torch.allclose(hiddens(plain), hiddens(longer))  # RoPE is made from it
    longer.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["max_position_embeddings"] == 128 and saved["model_type"] == "mimo"
    again = forerun.load(tmp_path / "saved")
    assert again.config.rope_parameters == longer.config.rope_parameters
    assert torch.equal(hiddens(again), hiddens(longer))
    # The saved file has transformers' name for RoPE; the old one still reaches it, and so does rope_theta.
    twice = load(tmp_path / "saved", **{"rope_scaling.factor": 8.0, "rope_theta": 5000.0})
    assert twice.config.rope_parameters == longer.config.rope_parameters | {"factor": 8.0, "rope_theta": 5000.0}


def test_nested_dotted_and_on_the_command_line_are_one(mimo: Path, tmp_path: Path) -> None:
    nested = load(mimo, rope_scaling=YARN).config.rope_parameters
    assert load(mimo, **{f"rope_scaling.{k}": v for k, v in YARN.items()}).config.rope_parameters == nested
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: {mimo}, override_config: {{rope_scaling.rope_type: yarn, max_position_embeddings: 100}}}}\n"
        "data: {train_files: [a.jsonl]}\n"
    )
    config = load_config(
        SFTConfig, file, ["model.override_config.rope_scaling.factor=2", "model.override_config.rope_theta=3000.0"]
    )
    given = config.model.override_config
    assert given == {
        "rope_scaling.rope_type": "yarn",
        "max_position_embeddings": 100,
        "rope_scaling": {"factor": 2},
        "rope_theta": 3000.0,
    }
    made = load(mimo, **given).config
    assert made.max_position_embeddings == 100
    assert (made.rope_parameters["rope_type"], made.rope_parameters["factor"]) == ("yarn", 2)
    assert load_config(SFTConfig, save_config(config, tmp_path)) == config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"max_position_embedings": 128}, "did you mean max_position_embeddings?"),
        ({"rope_scaling": {"fakter": 2.0}}, "rope_scaling.fakter is no key"),
        ({"rope_scaling.fakter": 2.0}, "rope_scaling.fakter is no key"),
        ({"model_type": "llama"}, "model_type cannot be set"),
        ({"torch_dtype": "float32"}, "set model.dtype"),
        ({"max_position_embeddings": "many"}, "makes a configuration that the model refuses"),
    ],
)
def test_a_mistake_is_one_line_and_no_weight_is_read(
    mimo: Path, tmp_path: Path, overrides: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_bytes((mimo / "config.json").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    (tmp_path / "model-1.safetensors").write_bytes(b"no weights")
    config = SFTConfig(ModelConfig(str(tmp_path), override_config=overrides))
    with pytest.raises(UsageError) as caught:
        check_config(config, has_data=True, has_model=False)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    check_config(config, has_data=True, has_model=True)  # the caller's model is as it is
    with pytest.raises(UsageError, match=r"model\.override_config"):
        check_config(RLConfig(ModelConfig(str(tmp_path), override_config=overrides)), has_data=True, has_model=False)


def test_rollouts_are_measured_by_the_context_as_overridden(mimo: Path) -> None:
    def check(context: int) -> None:
        model = ModelConfig(str(mimo), override_config={"max_position_embeddings": context})
        rollout = RolloutConfig(max_prompt_length=20, max_response_length=30)
        check_config(RLConfig(model, rollout=rollout), has_data=True, has_model=False)

    check(50)
    with pytest.raises(UsageError, match=r"max_response_length = 50 is more than the model's context of 49"):
        check(49)


def test_keys_of_a_section(tmp_path: Path) -> None:
    """A multimodal checkpoint has its language model's keys in a section, and says so to who forgets it."""
    attach(tiny_trunk("qwen3_5"), MTPConfig(enable=True), init="plain").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"did you mean text_config\.max_position_embeddings\?"):
        load(tmp_path, max_position_embeddings=128)
    dotted = load(tmp_path, **{"text_config.max_position_embeddings": 128})
    nested = load(tmp_path, text_config={"max_position_embeddings": 128})
    for model in (dotted, nested):
        assert model.config.get_text_config().max_position_embeddings == 128


def test_what_is_there_stays(mimo: Path) -> None:
    reader = CheckpointReader(mimo)
    before = json.dumps(reader.config, sort_keys=True)
    merged = overridden_config(reader, {"rope_scaling.factor": 2.0, "rope_scaling.rope_type": "linear"})
    assert json.dumps(reader.config, sort_keys=True) == before
    assert merged["rope_theta"] == reader.config["rope_theta"]
    assert merged["rope_scaling"] == {"factor": 2.0, "rope_type": "linear"}
