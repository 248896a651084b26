"""Which record reads which config.json, and what a record says of names."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.errors import UsageError
from forerun.families import (
    ATTACHED,
    DEEPSEEK_V3,
    NEMOTRON_H,
    QWEN3_5,
    QWEN3_NEXT,
    RECORDS,
    UNSUPPORTED,
    declared_depth,
    family_of,
    present_depth,
)
from tests.families.tiny import TRUNKS, tiny_trunk


@pytest.mark.parametrize("name", [name for name in TRUNKS if name != "mimo"])
def test_every_family_is_found_by_the_configuration_that_transformers_writes(name: str) -> None:
    known = [record.name for record in RECORDS if name.startswith(record.name)]
    assert family_of(tiny_trunk(name).config.to_dict()).name == max(known, key=len)


def test_no_model_type_belongs_to_two_records() -> None:
    claimed = [model_type for record in RECORDS for model_type in record.model_types] + list(UNSUPPORTED)
    assert len(claimed) == len(set(claimed))


def test_a_text_configuration_inside_another_is_found() -> None:
    config = {"model_type": "someone_s_wrapper", "text_config": {"model_type": "qwen3_5_moe_text"}}
    assert family_of(config) is QWEN3_5
    assert family_of({"model_type": "llama"}) is ATTACHED


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_an_unsupported_family_is_refused_with_the_reason(model_type: str) -> None:
    for config in ({"model_type": model_type}, {"model_type": "x", "text_config": {"model_type": model_type}}):
        with pytest.raises(UsageError) as caught:
            family_of(config)
        assert UNSUPPORTED[model_type] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "depth"),
    [
        ({"mtp_num_hidden_layers": 2}, 2),
        ({"text_config": {"mtp_num_hidden_layers": 3}}, 3),
        ({"mtp_num_hidden_layers": 0, "text_config": {"mtp_num_hidden_layers": 3}}, 0),
        ({"text_config": {}}, None),
        ({"num_nextn_predict_layers": 1}, None),
        ({"mtp_num_hidden_layers": None}, None),
    ],
)
def test_the_declared_depth(config: dict[str, Any], depth: int | None) -> None:
    assert declared_depth(QWEN3_5, config) == depth


@pytest.mark.parametrize("value", ["a", -1, 1.5, [1]])
def test_a_depth_that_is_no_number_of_layers_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="give the number of MTP layers"):
        declared_depth(QWEN3_5, {"mtp_num_hidden_layers": value})


def test_the_present_depth_counts_decoder_layers() -> None:
    names = ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.layers.1.mlp.up_proj.weight"]
    assert present_depth(QWEN3_NEXT, {}, names) == 2
    assert present_depth(QWEN3_NEXT, {}, ["mtp.fc.weight"]) == 0
    assert present_depth(NEMOTRON_H, {}, ["mtp.layers.0.norm.weight", "mtp.layers.1.norm.weight"]) == 1
    names = [f"model.layers.{i}.input_layernorm.weight" for i in range(4)]
    assert present_depth(DEEPSEEK_V3, {"num_hidden_layers": 3}, names) == 1
    assert present_depth(DEEPSEEK_V3, {"num_hidden_layers": 4}, names) == 0


def test_what_belongs_to_the_block() -> None:
    assert QWEN3_NEXT.owns("mtp.surprise.weight", 1)
    assert not QWEN3_NEXT.owns("model.layers.0.mlp.up_proj.weight", 1)
    assert DEEPSEEK_V3.owns("model.layers.61.surprise", 1, 61)
    assert not DEEPSEEK_V3.owns("model.layers.6.mlp.gate.weight", 1, 61)
    assert not DEEPSEEK_V3.owns("model.layers.62.mlp.gate.weight", 1, 61)


def test_experts_lie_apart_in_files() -> None:
    assert DEEPSEEK_V3.piece_names("model.layers.61.mlp.experts.gate_up_proj", 2) == [
        [f"model.layers.61.mlp.experts.{e}.{part}_proj.weight" for part in ("gate", "up")] for e in range(2)
    ]
    assert DEEPSEEK_V3.piece_names("model.layers.61.mlp.gate.weight", 2) is None
    assert NEMOTRON_H.piece_names("mtp.layers.1.mixer.experts.up_proj", 1) == [
        ["mtp.layers.1.mixer.experts.0.up_proj.weight"]
    ]
