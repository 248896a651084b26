"""docs/scaling.md shows what the code computes, and that agrees with what can be worked out or was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forerun.errors import UsageError
from forerun.planner.hardware import find
from forerun.planner.megatron_memory import megatron_peaks
from forerun.planner.memory import torch_peaks
from forerun.planner.scaling import pretraining_hours, reference_run, tables, with_mtp, write
from forerun.planner.shape import load_shape
from forerun.planner.traffic import arithmetic_seconds, flops, traffic
from forerun.planner.training import Layout

DOCUMENT = Path(__file__).parents[2] / "docs" / "scaling.md"
GIB = 2**30


def test_the_document_shows_these_tables(tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, table in tables().items():
        assert f"<!-- {name} -->\n{table}<!-- end -->" in text, f"run python -m forerun.planner.scaling {DOCUMENT}"
    copy = tmp_path / "scaling.md"
    copy.write_text(text.replace("FSDP2 x 8 |", "FSDP2 x 9 |"), encoding="utf-8")
    write(copy)
    assert copy.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("model", "billions", "active", "layer"),
    [
        ("deepseek-r1", 671.0, 37.5, 11.6),  # "671B total, 37B activated"; 14B with embedding and head for MTP: 11.5
        ("mimo-7b", 7.62, 7.0, 0.21),
        ("glm-4.5-air", 106.8, 12.6, 2.4),
        ("qwen3-next-80b-a3b", 79.7, 3.5, 1.6),
        ("qwen3.5-9b", 9.0, 8.0, 0.25),
    ],
)
def test_sizes_are_the_published_ones(model: str, billions: float, active: float, layer: float) -> None:
    shape = load_shape(model)
    run = reference_run(model, Layout())
    assert run.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active / 1e9 == pytest.approx(active, rel=0.03)
    assert shape.drafter.parameters / 1e9 == pytest.approx(layer, rel=0.05)


def test_operations_are_six_per_weight_and_token_and_attention() -> None:
    run = replace(reference_run("mimo-7b", Layout(), recompute=False), micro_batches=1)
    layers = 36 * (4096 * 128 * 80 + 3 * 4096 * 11008)
    attention = 36 * 3 * 4 * 32 * 128 * run.row_length / 2
    head = 4096 * 151680
    assert flops(run) == run.row_length * (6 * layers + attention + 8 * head)
    again = 2 * layers + attention / 3
    assert flops(replace(run, recompute=True)) == flops(run) + run.row_length * again


def test_a_published_training_time() -> None:
    """DeepSeek-V3: 180 thousand H800 hours per trillion tokens, with FP8 products and half of our bubble."""
    assert pretraining_hours() == pytest.approx(180e3, rel=0.25)


def test_megatron_state_by_hand() -> None:
    """TP 2, DP 4: half of the weights in bfloat16, their gradients in float32, 12 bytes of state cut over four."""
    run = reference_run("mimo-7b", Layout("megatron", 8, tensor=2))
    weights = run.parameters / 2
    parts = megatron_peaks(run)[1].parts
    assert parts["weights"] == 2 * weights and parts["gradients"] == 4 * weights
    assert parts["optimizer"] == 12 * weights / 4
    # Two bytes of each layer's input, cut over the tensor-parallel ranks, and one layer that is run again.
    hidden = run.row_length * 4096 * 2
    layer = run.row_length * (2 * 4096 * (4 + 2 + 2) + 2 * (2 * 4096 + 2 * 1024 + 4 * 11008) + 4 * 32)
    assert megatron_peaks(run)[0].parts["activations, trunk"] == 36 * hidden / 2 + layer / 2 + 2 * hidden


def test_stages_bear_what_the_layout_says() -> None:
    layout = Layout("megatron", 32, pipeline=4, expert=8)
    run = with_mtp(reference_run("deepseek-r1", layout), isolated=False)
    plain = megatron_peaks(reference_run("deepseek-r1", layout))[1].total
    assert megatron_peaks(run)[1].total > plain  # the last stage's MTP layer outweighs the first one's sixteenth
    wide = megatron_peaks(replace(run, layout=replace(layout, ranks=64, expert=16)))[1].parts
    assert wide["weights"] < 0.62 * megatron_peaks(run)[1].parts["weights"]  # nearly all weights are experts'


def test_pipelines_pay_for_filling() -> None:
    h100 = find("h100")
    flat = replace(reference_run("mimo-7b", Layout("megatron", 8)), micro_batches=8)
    deep = replace(flat, layout=Layout("megatron", 8, pipeline=8))
    assert arithmetic_seconds(deep, h100) == pytest.approx(arithmetic_seconds(flat, h100) * 15 / 8)


def test_links_by_where_a_group_lies() -> None:
    """Tensor-parallel ranks share a machine, the sum over replicas of a model that fills one does not."""
    run = replace(reference_run("mimo-7b", Layout(ranks=16, shards=8)), micro_batches=16)
    h100 = find("h100")
    seconds = {kind.what: (kind.bytes, kind.seconds(h100)) for kind in traffic(run)}
    sent, inside = seconds["scatter gradients"]
    assert inside == pytest.approx(sent / (450e9 * 0.8))
    sent, outside = seconds["sum over replicas"]
    assert outside == pytest.approx(sent / (50e9 * 0.8))
    assert sent == pytest.approx(2 * 0.5 * run.parameters / 8 * 4)


def test_offloading_leaves_activations_and_what_is_gathered() -> None:
    run = reference_run("mimo-7b", Layout(ranks=8, shards=8, offload=True))
    kept = replace(run, layout=replace(run.layout, offload=False))
    static = sum(torch_peaks(kept)[0].parts[name] for name in ("weights", "optimizer"))
    assert torch_peaks(run)[0].total <= torch_peaks(kept)[0].total - static
    assert torch_peaks(run)[1].total == 0


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"ranks": 0}, "ranks=0 ranks: give at least 1"),
        ({"ranks": 8, "shards": 3}, "8 ranks are no multiple of the 3"),
        ({"engine": "megatron", "ranks": 8, "tensor": 3}, "8 ranks are no multiple of the 3"),
        ({"engine": "megatron", "ranks": 8, "pipeline": 4, "expert": 4}, "expert=4 must divide"),
    ],
)
def test_layouts_that_do_not_divide(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Layout(**sizes)  # type: ignore[arg-type]
