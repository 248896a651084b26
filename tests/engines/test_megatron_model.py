"""megatron-core's GPTModel built from a Hugging Face checkpoint: every bit comes back, and it computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.engines.megatron.layout import ParallelLayout
from forerun.errors import UsageError
from tests.engines.megatron_checkpoints import (
    LAYOUTS,
    built,
    check_computed,
    check_files,
    check_named,
    computed,
    run,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("megatron"), LAYOUTS)


@pytest.mark.parametrize(("layout", "case"), built(LAYOUTS))
def test_every_bit_of_the_files_returns(folder: Path, layout: str, case: str) -> None:
    check_files(folder, layout, case)


@pytest.mark.parametrize(("layout", "case"), built(LAYOUTS))
def test_named_weights_are_the_torch_engines(folder: Path, layout: str, case: str) -> None:
    check_named(folder, layout, case)


@pytest.mark.parametrize(("layout", "case"), computed(LAYOUTS))
def test_logits_and_gradients_of_trunk_and_depths(folder: Path, layout: str, case: str) -> None:
    check_computed(folder, layout, case)


def test_weights_pass_one_by_one(folder: Path) -> None:
    held = json.loads((folder / "held.json").read_text())
    # Of an attention, weights and biases of keys and queries wait for those of the values.
    assert held["most"] <= 6 and held["all"] > 50, held


REFUSALS = {
    "no depth": "UsageError: config.json declares no MTP layers (num_nextn_predict_layers): attach a block",
    "two repeated": "UsageError: mtp.repeat_layer=true repeats one layer, and the model has 2",
    "pre-norm repeated": "UsageError: family mimo reads hiddens before their norm",
    "heads": "UsageError: config.json has num_attention_heads=1, which tensor_model_parallel_size=2 does not divide",
    "no sequence parallelism": "UsageError: megatron-core trains experts and latent attention under tensor parallelism",
    "stages": "UsageError: 4 layers cannot fill 8 pipeline stages",
    "state": "ForerunError: megatron-core's parallel state has a size of 1 where the layout has 2",
    "setting": "UsageError: megatron-core refuses this configuration: ",
    "config": "UsageError: transformers cannot read this config.json: ",
    "missing": "UsageError: model.layers.1.self_attn.q_proj.weight is missing (1 weights in all)",
    "shape": "UsageError: model.layers.1.self_attn.q_proj.weight has shape (14, 16), (16, 16), (16, 16), which config",
    "unknown": "UsageError: model.layers.1.self_attn.sinks has no place in megatron-core's GPTModel",
    "quantised": "UsageError: model.layers.1.self_attn.q_proj.weight is quantised (torch.float8_e4m3fn)",
    "zero norm": "UsageError: the trunk's final norm has a zero weight",
    "copy": "UsageError: model.layers.2.shared_head.head.weight differs from lm_head.weight",
}


def test_refusals_are_one_line_for_the_user(folder: Path) -> None:
    said = json.loads((folder / "refusals.json").read_text())
    assert said.keys() == REFUSALS.keys()
    for attempt, line in said.items():
        assert line.startswith(REFUSALS[attempt]) and "\n" not in line, line


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"context_parallel_size": 0}, "context_parallel_size=0 must be at least 1"),
        ({"virtual_pipeline_model_parallel_size": 2}, "divides pipeline stages further"),
        ({"sequence_parallel": True}, "divides positions over the tensor-parallel ranks"),
    ],
)
def test_sizes_that_mean_nothing(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ParallelLayout(**sizes)


def test_ranks_and_stages() -> None:
    layout = ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=4, expert_model_parallel_size=2)
    assert layout.data_parallel_size(32) == 4
    for ranks, message in ((12, "cannot be divided"), (8, "does not divide the 1 data- and context-parallel ranks")):
        with pytest.raises(UsageError, match=message):
            layout.data_parallel_size(ranks)
    assert layout.stage_sizes(61) == [16, 15, 15, 15]
