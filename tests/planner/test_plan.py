"""Timelines and plans against loops over single tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from forerun.errors import UsageError
from forerun.planner.plan import make_plan, settings, survival
from forerun.planner.timeline import Span, from_lengths, long_tail, parse


@dataclass
class Affine:
    """A machine that is busy with `per_token` seconds a token once its fixed part is paid."""

    fixed: float = 1.0
    per_token: float = 0.1
    drafter: float = 0.05
    per_context: float = 0.0

    def seconds(self, rows: int, depth: int, context: float) -> float:
        return (
            self.fixed + self.per_token * rows * (depth + 1) + self.drafter * depth + self.per_context * rows * context
        )


def test_survival_reads_and_extends_acceptance() -> None:
    assert survival([0.8, 0.6, 0.3], 2) == [0.8, 0.6]
    assert survival([0.8, 0.6], 4) == pytest.approx([0.8, 0.6, 0.45, 0.3375])
    assert survival([0.8], 3) == pytest.approx([0.8, 0.64, 0.512])
    assert survival([0.0], 2) == [0.0, 0.0]
    for wrong in ([], [1.1], [-0.1], [0.5, 0.6], [float("nan")]):
        with pytest.raises(UsageError, match="acceptance"):
            survival(wrong, 3)


def test_a_rollout_is_the_sum_over_its_tokens() -> None:
    lengths, prompt, shares = [3, 3, 7, 20, 20, 41], 10, [0.7, 0.4]
    cost = Affine(per_context=0.003)
    plan = make_plan(cost, shares, from_lengths(lengths, prompt), 2)
    seconds = [0.0] * 3
    best = 0.0
    for token in range(max(lengths)):
        rows = sum(length > token for length in lengths)
        each = [cost.seconds(rows, k, prompt + token + 0.5) / (1 + sum(shares[:k])) for k in range(3)]
        seconds = [a + b for a, b in zip(seconds, each, strict=True)]
        best += min(each)
    assert plan.run_speedups == pytest.approx([seconds[0] / s for s in seconds], rel=1e-9)
    assert plan.adaptive_speedup == pytest.approx(seconds[0] / best, rel=1e-9)
    assert plan.best_depth == max(range(3), key=lambda k: plan.run_speedups[k])
    assert [batch.rows for batch in plan.batches] == [6, 4, 3, 1]
    for batch in plan.batches:
        assert batch.speedups[0] == 1 and batch.best_depth == max(range(3), key=lambda k: batch.speedups[k])
        assert batch.speedups[1] == pytest.approx(batch.step_seconds[0] * 1.7 / batch.step_seconds[1])


def test_break_even_is_the_first_batch_that_one_draft_slows_down() -> None:
    cost = Affine()
    plan = make_plan(cost, [0.7], [Span(4, 1, 100)], 1)
    pays = [cost.seconds(rows, 0, 100) * 1.7 > cost.seconds(rows, 1, 100) for rows in range(1, 100)]
    assert plan.break_even == pays.index(False) + 1 == 22
    assert make_plan(Affine(per_token=0.0), [0.7], [Span(4, 1, 100)], 1).break_even is None
    assert make_plan(Affine(drafter=9.0), [0.7], [Span(4, 1, 100)], 1).break_even == 1


def test_the_sentence_says_what_to_do() -> None:
    on = make_plan(Affine(), [0.9, 0.8], [Span(1, 1, 100)], 2).sentence()
    assert on.startswith("Enable it: 2 drafts per step") and settings(2) in on and on.count(". ") == 0
    assert '{"method": "mtp", "num_speculative_tokens": 2}' in on
    assert "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3" in on
    off = make_plan(Affine(), [0.3], [Span(200, 1, 100)], 1).sentence()
    assert off.startswith("Leave it off") and "num_speculative_tokens=0" in off
    # Alone neither depth is worth it over the whole, but the tail is.
    mixed = make_plan(Affine(), [0.6], [Span(60, 10, 100), Span(1, 48, 100)], 1)
    assert mixed.run_speedups[1] < 1.05 < mixed.adaptive_speedup
    assert mixed.sentence().startswith("Enable it with depth control only")
    nowhere = make_plan(Affine(drafter=9.0), [0.3], [Span(2, 1, 100)], 1).sentence()
    assert "at no batch size" in nowhere


def test_timelines_as_written(tmp_path: Path) -> None:
    assert parse("32", 5, 100) == [Span(32, 1, 100)]
    assert parse("32:10,1:90.5", 5, 100) == [Span(32, 10, 100), Span(1, 90.5, 100)]
    file = tmp_path / "lengths"
    file.write_text("3, 9\n20 9")
    assert parse(f"@{file}", 5, 100) == from_lengths([3, 9, 9, 20], 5)
    assert parse("tail:8:100", 5, 100) == from_lengths(long_tail(8, 100), 5)
    assert long_tail(4, 160) == [10, 40, 90, 160]
    for wrong in ("", "x", "0", "-3", "4:0", "4:-1", "4:inf", "tail:4", "tail:0:5", "tail:4:0", "1,,2", "4:nan"):
        with pytest.raises(UsageError, match=r"timeline|lengths"):
            parse(wrong, 5, 100)
    with pytest.raises(UsageError, match="cannot read"):
        parse("@nowhere", 5, 100)
    file.write_text(f"1 {10**400}")
    with pytest.raises(UsageError, match="longer than"):
        parse(f"@{file}", 5, 100)


def test_spans_hold_every_token_once() -> None:
    lengths = [1, 5, 5, 300, 1000]
    spans = from_lengths(lengths, 7)
    assert sum(span.rows * span.tokens for span in spans) == pytest.approx(sum(lengths))
    assert [span.rows for span in spans] == sorted((span.rows for span in spans), reverse=True)
    contexts = [span.context for span in spans]
    assert contexts == sorted(contexts) and contexts[0] == 7.5 and contexts[-1] < 1007
    with pytest.raises(UsageError, match="at least 1"):
        from_lengths([3, 0], 7)


def test_depths_below_one_are_refused() -> None:
    with pytest.raises(UsageError, match="max_depth"):
        make_plan(Affine(), [0.5], [Span(1, 1, 1)], 0)
