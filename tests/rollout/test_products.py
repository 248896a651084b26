"""Every spelling of a product is the product, follows the weights, and changes no text."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.models.carrier import named_weights
from forerun.rollout.native import products
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.native.products import MEASURED_ROWS, Choice, Plan, ProductTable, Spelling, TunedLinear, choose
from forerun.rollout.protocol import Completion
from tests.rollout import tiny

SPELLINGS: tuple[Spelling, ...] = ("linear", "transposed", "packed")
# Rounding of the result's dtype, and for float32 of sums over 96 terms: oneDNN sums in another order than BLAS.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float64: 1e-12}


def layer(dtype: torch.dtype, bias: bool, choice: Choice, shape: tuple[int, int] = (80, 96)) -> TunedLinear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    offset = torch.randn(shape[0], generator=generator, dtype=torch.float64).to(dtype) if bias else None
    table = ProductTable(choice)
    made = TunedLinear(weight, offset, table)
    table.prepare()
    return made


def error(made: TunedLinear, x: Tensor) -> float:
    """Largest difference to the product in float64, relative to the largest entry."""
    exact = F.linear(x.double(), made.weight.double(), None if made.bias is None else made.bias.double())
    out = made(x)
    assert out.dtype == x.dtype and out.shape == exact.shape and out.is_contiguous()
    return float((out.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_is_the_product_to_rounding(spelling: Spelling, dtype: torch.dtype, bias: bool) -> None:
    made = layer(dtype, bias, spelling)
    for shape in ((1, 96), (2, 96), (1, 1, 96), (3, 2, 96), (7, 1, 96), (33, 96), (150, 96)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert error(made, x) < TOLERANCE[dtype]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_added_rows_change_nothing_but_the_time(spelling: Spelling) -> None:
    made = layer(torch.float32, True, "linear")
    made.plans = [Plan(spelling, 6)] * 7 + [Plan(spelling)]
    for rows in (1, 2, 5, 6, 7):
        x = torch.randn(rows, 1, 96, generator=torch.Generator().manual_seed(rows))
        assert error(made, x) < TOLERANCE[torch.float32]


def test_float32_packing_rounds_no_operand() -> None:
    made = layer(torch.float32, False, "packed")
    assert products.can_pack(made.weight)  # else this file has tested F.linear under another name
    x = torch.zeros(4, 96)
    x[:, 5] = 1
    assert torch.equal(made(x), made.weight[:, 5].expand(4, -1))  # a sum of zeros and one product with 1 is exact


def test_rows_are_filled_up_where_more_of_them_cost_less() -> None:
    cost = {1: 5.0, 2: 4.0, 3: 4.5, 4: 2.0, 6: 2.05, 8: 7.0, 12: 8.0, 16: 7.9, 24: 9.0, 32: 10.0, 64: 11.0, 128: 20.0}
    assert tuple(cost) == MEASURED_ROWS
    plans = choose([{"linear": seconds + (rows > 24), "packed": 10.5} for rows, seconds in cost.items()])
    assert len(plans) == 129
    assert plans[1] == plans[2] == plans[3] == Plan("linear", 4)
    assert plans[4] == plans[5] == plans[6] == Plan("linear")
    assert plans[9] == plans[12] == Plan("linear")  # 16 rows save too little
    assert plans[24] == Plan("linear") and plans[25] == plans[128] == Plan("packed")


def test_packed_is_left_only_for_what_is_clearly_faster() -> None:
    for linear, chosen in ((0.8, "linear"), (0.95, "packed"), (1.1, "packed")):
        assert set(choose([{"linear": linear, "packed": 1.0}] * len(MEASURED_ROWS))) == {Plan(chosen)}  # type: ignore[arg-type]
    assert choose([{"linear": 1.0, "transposed": 0.9}] * len(MEASURED_ROWS))[1] == Plan("transposed")


def test_a_plan_is_measured_once_and_for_every_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_measured", {})
    calls: list[tuple[torch.Size, int]] = []
    measure = products.measure

    def counted(linears: list[TunedLinear], rows: int) -> dict[Spelling, float]:
        calls.append((linears[0].weight.shape, rows))
        return measure(linears, rows)

    monkeypatch.setattr(products, "measure", counted)
    model = tiny.carrier(dtype=torch.float32)
    rows = tiny.prompts(5)
    expected = [tiny.generated(model, row, 10) for row in rows]
    engine = NativeEngine(model, num_speculative_tokens=3)
    assert texts(engine.generate(tiny.requests(rows, max_tokens=10, temperature=0))) == expected
    shapes = {linear.weight.shape for linear in engine.runner.table.linears}
    assert sorted(calls) == sorted((shape, count) for shape in shapes for count in MEASURED_ROWS)
    engine.generate(tiny.requests(rows, max_tokens=2))
    assert len(calls) == len(shapes) * len(MEASURED_ROWS)


def texts(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_spelling_changes_no_text(spelling: Spelling, dtype: torch.dtype) -> None:
    model = tiny.carrier("qwen2", dtype=dtype)
    rows = tiny.prompts(5)
    expected = [tiny.generated(model, row, 12) for row in rows]
    engine = NativeEngine(model, products=spelling)
    for engine.num_speculative_tokens in (0, 1, 3):
        assert texts(engine.generate(tiny.requests(rows, max_tokens=12, temperature=0))) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_an_update_reaches_the_packed_copies(tied: bool) -> None:
    old, new = (tiny.carrier(tied=tied, dtype=torch.float32) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    vocabulary = torch.arange(0, tiny.VOCAB, 2)
    settings: dict[str, object] = {"products": "packed", "num_speculative_tokens": 2, "draft_vocabulary": vocabulary}
    engine, fresh = (NativeEngine(m, **settings) for m in (old, new))  # type: ignore[arg-type]
    requests = tiny.requests(tiny.prompts(4), max_tokens=12, temperature=0)
    before = engine.generate(requests)
    engine.update_weights(named_weights(new), 1)
    after, expected = engine.generate(requests), fresh.generate(requests)
    assert texts(after) == texts(expected) != texts(before)
    assert [c.raw_log_probs for c in after] == [c.raw_log_probs for c in expected]
    # The drafter's own products, too: a stale one costs acceptance and nothing else.
    assert [c.spec_num_accepted_tokens for c in after] == [c.spec_num_accepted_tokens for c in expected]
    assert engine.drafter_digest() == fresh.drafter_digest()


def test_copies_are_kept_only_for_weights_that_use_them() -> None:
    made = layer(torch.float32, False, "packed")
    made(torch.ones(1, 96))
    table = ProductTable("linear")
    table.linears.append(made)
    table.prepare()
    assert made.packed is None
