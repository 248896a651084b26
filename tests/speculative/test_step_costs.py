"""What is learnt about the cost of steps, against the costs that made the measurements."""

from __future__ import annotations

import math
import random

import pytest
import torch

from forerun.speculative.step_costs import StepCosts, _solve


def truth(rows: int, depth: int) -> float:
    return 0.03 + 0.008 * rows * (depth + 1) + depth * (0.004 + 0.001 * rows)


def test_a_law_carries_over_to_steps_that_were_never_run() -> None:
    costs = StepCosts(1e9)
    for rows in (1, 4, 32):
        for depth in (0, 1, 2):
            for _ in range(4):
                costs.observe(rows, depth, truth(rows, depth))
    for rows in (1, 2, 8, 16, 24, 32, 48):
        for depth in range(4):
            assert costs.predict(rows, depth)[0] == pytest.approx(truth(rows, depth), rel=0.08), (rows, depth)


def test_one_measurement_already_gives_an_order_of_size() -> None:
    costs = StepCosts(1e9)
    assert not costs
    costs.observe(32, 0, 1.0)
    assert costs
    assert costs.predict(32, 0)[0] == pytest.approx(1.0, rel=0.01)
    assert 0.3 < costs.predict(8, 0)[0] < 1.0 < costs.predict(32, 1)[0] < 2.5


def test_measurements_correct_the_law_where_they_were_made() -> None:
    def cornered(rows: int) -> float:
        return 0.1 if rows <= 8 else 0.5

    costs = StepCosts(1e9)
    for _ in range(16):
        for rows in (1, 2, 4, 8, 9, 16, 32):
            costs.observe(rows, 0, cornered(rows))
    for rows in (2, 16, 32):
        assert costs.predict(rows, 0)[0] == pytest.approx(cornered(rows), rel=0.25)
    assert costs.predict(16, 0)[1] > 1 > costs.predict(300, 0)[1]
    assert costs.predict(16, 1)[1] == 0


def test_a_changed_cost_is_followed_down_at_once_and_up_in_some_steps() -> None:
    costs = StepCosts(200.0)
    for _ in range(50):
        costs.observe(4, 0, 1.0)
    costs.observe(4, 0, 30.0)  # an interruption
    assert costs.predict(4, 0)[0] < 1.05
    for _ in range(60):
        costs.observe(4, 0, 2.0)
    assert costs.predict(4, 0)[0] == pytest.approx(2.0, rel=0.1)
    for _ in range(60):
        costs.observe(4, 0, 0.5)
    assert costs.predict(4, 0)[0] == pytest.approx(0.5, rel=0.1)


def test_old_measurements_speak_less() -> None:
    costs = StepCosts(100.0)
    costs.observe(4, 1, 1.0)
    fresh = costs.predict(4, 1)[1]
    for _ in range(100):
        costs.observe(4, 0, 1.0)
    assert costs.predict(4, 1)[1] == pytest.approx(fresh / 2, rel=1e-6)


@pytest.mark.parametrize("times", [(0.0,), (0.0, 60.0), (1e-4, 1e6)])
def test_steps_of_no_time_and_of_much_are_survived(times: tuple[float, ...]) -> None:
    """A coarse clock and a process that was stopped: their ratio must not leave the law without a solution."""
    for seed in range(20):
        chance, costs = random.Random(seed), StepCosts(200.0)
        for _ in range(100):
            rows, depth = chance.randint(1, 40), chance.randint(0, 3)
            costs.observe(rows, depth, chance.choice(times))
            assert 0 < costs.predict(rows, depth)[0] < math.inf


def test_solver_equals_torch() -> None:
    torch.manual_seed(0)
    half = torch.randn(4, 4, dtype=torch.float64)
    matrix = half @ half.T + torch.eye(4, dtype=torch.float64)
    target = torch.randn(4, dtype=torch.float64)
    expected = torch.linalg.solve(matrix, target)
    assert _solve(matrix.tolist(), target.tolist()) == pytest.approx(expected.tolist(), rel=1e-9)
