"""The model against what others measured: one set of constants, no case's own. docs/planner.md shows these figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.planner.published import CASES, PLAIN_STEPS, Case, plain_step

DOCUMENT = Path(__file__).parents[2] / "docs" / "planner.md"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sign_and_size(case: Case) -> None:
    predicted = case.predict()
    assert predicted == pytest.approx(case.published, rel=case.tolerance)
    if case.published != 1:
        assert (predicted > 1) == (case.published > 1)


def test_the_largest_batch_is_the_one_that_gains_nothing() -> None:
    gains = {case.name: case.predict() for case in CASES if case.model == "deepseek-r1"}
    assert min(gains, key=gains.__getitem__) == "DeepSeek-R1, batch 256"


@pytest.mark.parametrize(("rows", "prompt", "response", "published"), PLAIN_STEPS)
def test_plain_steps(rows: int, prompt: int, response: int, published: float) -> None:
    assert plain_step(rows, prompt, response) == pytest.approx(published, rel=0.15)


def test_the_document_shows_what_the_code_predicts() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for case in CASES:
        row = re.search(rf"^\| {re.escape(case.name)} .*$", text, re.MULTILINE)
        assert row is not None, case.name
        assert f"| {case.published:.2f} | {case.predict():.2f} |" in row.group()
    for rows, prompt, response, published in PLAIN_STEPS:
        assert f"| {rows} | {published:.1f} | {plain_step(rows, prompt, response):.1f} |" in text
