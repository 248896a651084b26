"""The step's cost: against slow references, in its limits, and in the direction that every input pushes it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from forerun.errors import UsageError
from forerun.planner import cost
from forerun.planner.cost import Deployment, Roofline, distinct_experts
from forerun.planner.hardware import Hardware, find
from forerun.planner.shape import LayerShape, ModelShape, load_shape

DEVICE = Hardware("test", bfloat16=1e12, fp8=2e12, float32=5e11, bandwidth=1e11, memory=1e12, source="")
DENSE = LayerShape(weights=1000, cached=64, split_cache=2, attention_flops=300, kernels=10)
EXPERTS = LayerShape(
    weights=500, experts=8, experts_per_token=2, expert_weights=400, cached=32, attention_flops=200, kernels=20
)
DELTA = LayerShape(weights=700, state=900, state_flops=5400, kernels=15)
MODEL = ModelShape("test", (DENSE, EXPERTS, DELTA), replace(DENSE, weights=1500), head=5000)


def test_distinct_experts_equals_enumeration() -> None:
    choices = list(itertools.combinations(range(4), 2))
    for tokens in (1, 2, 3):
        every = list(itertools.product(choices, repeat=tokens))
        expected = sum(len({e for choice in each for e in choice}) for each in every) / len(every)
        assert distinct_experts(4, 2, tokens) == pytest.approx(expected, rel=1e-12)
    assert distinct_experts(0, 0, 5) == 0


def reference(rows: int, depth: int, context: float, deployment: Deployment) -> float:
    """The step, written out part by part."""
    speed, per_byte = 1e12 * cost.ARITHMETIC_SHARE, 1 / (1e11 * cost.BANDWIDTH_SHARE)
    devices = deployment.tensor_parallel
    eager = deployment.launch == "eager"

    def product(weights: float, tokens: float) -> float:
        return max(weights * 2 * per_byte, 2 * weights * tokens / speed) / devices

    def attention(layer: LayerShape, per_row: int) -> float:
        readers = rows * per_row if deployment.expands_batch else rows
        read = readers * context * layer.cached * 2 / min(devices, layer.split_cache)
        return max(read * per_byte, rows * per_row * context * layer.attention_flops / speed / devices)

    def collectives() -> float:
        return 0 if devices == 1 else 2 * cost.COLLECTIVE

    def forward(busy: float, kernels: int) -> float:
        busy += kernels * cost.KERNEL
        return (max(busy, kernels * cost.EAGER_LAUNCH) if eager else busy) + cost.FORWARD[deployment.launch]

    per_row = depth + 1
    tokens = rows * per_row
    unused = (6 / 8) ** tokens
    verify = product(5000, tokens)
    verify += product(1000, tokens) + attention(DENSE, per_row) + collectives()
    verify += product(500, tokens) + attention(EXPERTS, per_row) + collectives()
    verify += max(8 * (1 - unused) * 400 * 2 * per_byte, 2 * tokens * 2 * 400 / speed) / devices
    verify += product(700, tokens) + collectives()
    verify += max(rows * 900 * 4 * (1 + per_row) * per_byte, tokens * 5400 / speed) / devices
    seconds = forward(verify, 10 + 20 + 15 + 4) + rows * cost.ROW
    for _ in range(depth):
        seconds += forward(product(5000, rows) + product(1500, rows) + attention(DENSE, 1) + collectives(), 10 + 4)
    if depth:
        seconds += cost.JUDGE[deployment.launch] + rows * cost.JUDGED_ROW
    return seconds


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 7, 600])
@pytest.mark.parametrize(
    "deployment",
    [
        Deployment(),
        Deployment(launch="eager"),
        Deployment(tensor_parallel=4),
        Deployment(expands_batch=True),
    ],
)
def test_step_equals_its_parts(rows: int, depth: int, deployment: Deployment) -> None:
    expected = reference(rows, depth, 300.0, deployment)
    assert Roofline(MODEL, DEVICE, deployment).seconds(rows, depth, 300.0) == pytest.approx(expected, rel=1e-12)


def test_precision_decides_bytes_and_peak() -> None:
    bare = ModelShape("bare", (LayerShape(weights=10**9),), LayerShape(weights=1), head=1)
    at = {p: Roofline(replace(bare, precision=p), DEVICE).seconds(1, 0, 1) for p in ("float32", "bfloat16", "fp8")}
    once = 1e9 / (1e11 * cost.BANDWIDTH_SHARE)
    assert at["float32"] - at["bfloat16"] == pytest.approx(2 * once, rel=1e-4)
    assert at["bfloat16"] - at["fp8"] == pytest.approx(once, rel=1e-4)
    many = {p: Roofline(replace(bare, precision=p), DEVICE).seconds(10**5, 0, 1) for p in ("bfloat16", "fp8")}
    assert many["bfloat16"] - many["fp8"] == pytest.approx(1e9 * 1e5 / (1e12 * cost.ARITHMETIC_SHARE), rel=1e-4)
    # Without fp8 arithmetic the weights shrink and the peak stays.
    older = replace(DEVICE, fp8=0.0)
    assert Roofline(replace(bare, precision="fp8"), older).seconds(10**5, 0, 1) == pytest.approx(
        many["bfloat16"], rel=1e-6
    )


def test_window_ends_what_attention_reads() -> None:
    layer = replace(DENSE, window=100)
    windowed = Roofline(replace(MODEL, layers=(layer,)), DEVICE)
    assert windowed.seconds(5, 0, 100) == windowed.seconds(5, 0, 5000)
    assert windowed.seconds(5, 0, 50) < windowed.seconds(5, 0, 100)


@pytest.mark.parametrize("model", ["deepseek-r1", "qwen3.5-9b", "mimo-7b"])
def test_more_of_anything_costs_more(model: str) -> None:
    step = Roofline(load_shape(model), find("h100"), Deployment(tensor_parallel=8)).seconds
    for rows, depth, context in itertools.product((1, 8, 64, 512), (0, 1, 3), (128, 2048)):
        base = step(rows, depth, context)
        assert base < step(rows * 2, depth, context) < 2 * base
        assert base < step(rows, depth + 1, context)
        assert base < step(rows, depth, context * 2)
        assert step(rows, depth, context) > Roofline(load_shape(model), find("b200"), Deployment(8)).seconds(
            rows, depth, context
        )


def no_overheads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KERNEL", "ROW", "JUDGED_ROW", "COLLECTIVE"):
        monkeypatch.setattr(cost, name, 0.0)
    monkeypatch.setattr(cost, "FORWARD", {"graph": 0.0, "eager": 0.0})
    monkeypatch.setattr(cost, "JUDGE", {"graph": 0.0, "eager": 0.0})


def test_one_row_pays_tokens_over_one_plus_the_drafters_share(monkeypatch: pytest.MonkeyPatch) -> None:
    no_overheads(monkeypatch)
    shape = load_shape("mimo-7b")
    step = Roofline(shape, find("h100")).seconds
    share = (shape.drafter.weights + shape.head) / shape.parameters
    for depth in (1, 2, 3):
        assert step(1, depth, 1) / step(1, 0, 1) == pytest.approx(1 + depth * share, rel=1e-3)


def test_a_huge_batch_pays_for_every_token_it_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    no_overheads(monkeypatch)
    shape = load_shape("mimo-7b")
    step = Roofline(shape, find("h20")).seconds
    share = (shape.drafter.weights + shape.head) / shape.parameters
    for depth in (1, 3):
        assert step(4096, depth, 1) / step(4096, 0, 1) == pytest.approx(1 + depth + depth * share, rel=1e-2)


def test_an_engines_limit_runs_rows_one_group_after_the_other() -> None:
    free = Roofline(MODEL, DEVICE).seconds
    limited = Roofline(MODEL, DEVICE, Deployment(max_tokens=256)).seconds
    assert limited(128, 1, 100) == free(128, 1, 100)
    assert limited(256, 0, 100) == free(256, 0, 100)
    assert limited(256, 1, 100) == pytest.approx(2 * free(128, 1, 100))
    assert Roofline(MODEL, DEVICE, Deployment(max_tokens=1)).seconds(3, 2, 100) == pytest.approx(3 * free(1, 2, 100))


@pytest.mark.parametrize("settings", [{"tensor_parallel": 0}, {"max_tokens": 0}])
def test_impossible_deployments_are_named(settings: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        Deployment(**settings)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="h100"):
        find("abacus")
