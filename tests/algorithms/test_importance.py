"""Importance weights and rejection against loops over packed sequences, in float64."""

import math
from typing import get_args

import pytest
import torch

from forerun.algorithms import importance_weights, rejection_mask
from forerun.algorithms.rejection import Bounds, Criterion, parse_criteria, parse_range

IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1], [2, 2, 2, 2, 2, 3, 3, 3], [0, 0, 4, 4, 4, -1, -1, -1]])


@pytest.fixture
def given():
    draw = torch.Generator().manual_seed(5)
    mask = (torch.rand(IDS.shape, generator=draw) < 0.7) & (IDS >= 0)
    mask[2, :2] = False  # a sequence without a token
    trainer = -2 * torch.rand(IDS.shape, generator=draw, dtype=torch.float64)
    rollout = trainer - 0.6 * torch.randn(IDS.shape, generator=draw, dtype=torch.float64)
    return torch.where(mask, trainer, float("nan")), rollout, mask


def members(mask, i, j):
    return [k for k in range(IDS.shape[1]) if mask[i, k] and IDS[i, k] == IDS[i, j]]


@pytest.mark.parametrize("lower", [None, 0.7])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights(given, level, lower):
    trainer, rollout, mask = given
    got = importance_weights(trainer.clone().requires_grad_(), rollout, mask, IDS, level, upper=1.3, lower=lower)
    assert not got.requires_grad
    seen = set()
    for i, j in [(i, j) for i in range(len(IDS)) for j in range(IDS.shape[1])]:
        expected = 0.0
        if mask[i, j]:
            at = [j] if level == "token" else members(mask, i, j)
            ratio = math.exp(sum(float(trainer[i, k] - rollout[i, k]) for k in at))
            seen.add((ratio < 0.7) - (ratio > 1.3))
            expected = min(ratio, 1.3) if lower is None else ratio * (lower <= ratio <= 1.3)
        assert float(got[i, j]) == pytest.approx(expected)
    assert seen == {-1, 0, 1}


@pytest.mark.parametrize("name", get_args(Criterion))
def test_rejection(given, name):
    trainer, rollout, mask = given
    level, kind = name.rsplit("_", 1)
    bounds = Bounds(math.log(0.8), math.log(1.25)) if kind == "k1" else Bounds(None, 0.15)
    got = rejection_mask(trainer, rollout, mask, IDS, {name: bounds})
    value = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}[kind]
    reduce = {"token": sum, "seq_sum": sum, "seq_mean": lambda x: sum(x) / len(x), "seq_max": max}[level]
    expected = torch.zeros_like(mask)
    for i, j in mask.nonzero().tolist():
        at = [j] if level == "token" else members(mask, i, j)
        statistic = reduce([value(float(trainer[i, k] - rollout[i, k])) for k in at])
        expected[i, j] = statistic <= bounds.upper and (bounds.lower is None or statistic >= bounds.lower)
    assert torch.equal(got, expected)
    assert 0 < int(got.sum()) < int(mask.sum())


def test_every_criterion_must_let_a_token_pass(given):
    trainer, rollout, mask = given
    one, two = {"token_k1": Bounds(-0.3, 0.3)}, {"seq_mean_k2": Bounds(None, 0.15)}
    both = rejection_mask(trainer, rollout, mask, IDS, one | two)
    parts = [rejection_mask(trainer, rollout, mask, IDS, each) for each in (one, two)]
    assert torch.equal(both, parts[0] & parts[1])
    assert not torch.equal(both, parts[0]) and not torch.equal(both, parts[1])


def test_a_huge_gap_gives_finite_weights():
    mask, ids = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.long)
    trainer, rollout = torch.tensor([[-1.0, -1e4]]), torch.tensor([[-1e4, -1.0]])
    assert importance_weights(trainer, rollout, mask, ids, upper=1e30).tolist()[0] == pytest.approx(
        [math.exp(20), math.exp(-20)], rel=1e-5
    )


def test_thresholds_as_verl_writes_them():
    assert parse_range("5.0") == (None, 5.0) and parse_range("0.5_5.0") == (0.5, 5.0)
    assert parse_criteria("token_k1, seq_sum_k3,token_k1", "0.5_2.0,3") == {
        "token_k1": Bounds(math.log(0.5), math.log(2)),
        "seq_sum_k3": Bounds(None, 3.0),
    }
    assert parse_criteria("seq_mean_k1", "4")["seq_mean_k1"] == pytest.approx((-math.log(4), math.log(4)))
    assert parse_criteria("token_k2,token_k3", "0.1") == {"token_k2": (None, 0.1), "token_k3": (None, 0.1)}


@pytest.mark.parametrize(
    ("criteria", "thresholds", "reason"),
    [
        ("token_k9", "1", "'token_k9' is not one of token_k1"),
        (" , ", "1", "names no criterion"),
        ("token_k2", "1,2", "1 criteria and 2 thresholds"),
        ("token_k2", "0.1_0.2", "token_k2 takes an upper bound alone"),
        ("token_k1", "2_1", "neither a positive number nor a range"),
        ("token_k1", "0.5", "stands for 1/0.5 to 0.5, which is empty"),
        ("token_k2", "-1", "neither a positive number"),
        ("token_k2", "nan", "neither a positive number"),
        ("token_k2", "much", "neither a positive number"),
    ],
)
def test_thresholds_that_mean_nothing(criteria, thresholds, reason):
    with pytest.raises(ValueError, match=reason):
        parse_criteria(criteria, thresholds)


def test_bounds_out_of_order():
    x, ids = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.long)
    for upper, lower in ((0.0, None), (1.0, 2.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="0 < lower <= upper"):
            importance_weights(x, x, x.bool(), ids, "token", upper, lower)
