"""GRPO and RLOO advantages against a loop over groups in float64; which groups dynamic sampling keeps."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.algorithms import advantages, grpo_advantages, informative_groups, rloo_advantages


def slow(rewards, groups, normalize, epsilon):
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(members) == 1:
            out.append(reward)
            continue
        mean = sum(members) / len(members)
        std = math.sqrt(sum((r - mean) ** 2 for r in members) / (len(members) - 1))
        out.append((reward - mean) / (std + epsilon) if normalize else reward - mean)
    return out


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-3, 3, width=32), st.integers(0, 4)), min_size=1, max_size=24),
    st.booleans(),
)
def test_equals_the_loop(samples, normalize):
    rewards = [float(r) for r, _ in samples]
    groups = [g * 17 - 5 for _, g in samples]
    got = grpo_advantages(torch.tensor(rewards), torch.tensor(groups), normalize, epsilon=1e-2)
    expected = slow(rewards, groups, normalize, 1e-2)
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 3, width=32), st.integers(0, 4)), min_size=1, max_size=24))
def test_rloo_compares_each_with_the_mean_of_the_others(samples):
    rewards, groups = [float(r) for r, _ in samples], [g for _, g in samples]
    expected = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for k, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and k != i]
        expected.append(reward - sum(others) / len(others) if others else reward)
    got = rloo_advantages(torch.tensor(rewards), torch.tensor(groups))
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_estimators_by_name():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.2]), torch.tensor([0, 0, 1, 1])
    for estimator, normalize, expected in (
        ("grpo", True, grpo_advantages(rewards, groups)),
        ("grpo", False, torch.tensor([0.5, -0.5, 0.15, -0.15])),
        ("rloo", True, torch.tensor([1.0, -1.0, 0.3, -0.3])),
    ):
        torch.testing.assert_close(advantages(rewards, groups, estimator, normalize), expected)
    with pytest.raises(ValueError, match="adv_estimator='gae' is not one of grpo, rloo"):
        advantages(rewards, groups, "gae")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 5)), min_size=1, max_size=24))
def test_a_group_is_informative_when_its_values_differ_or_it_is_alone(samples):
    values, groups = [v for v, _ in samples], [3 * g - 7 for _, g in samples]
    expected = []
    for group in groups:
        members = [v for v, g in zip(values, groups, strict=True) if g == group]
        expected.append(len(members) == 1 or len(set(members)) > 1)
    got = informative_groups(torch.tensor(values, dtype=torch.float64), torch.tensor(groups))
    assert got.tolist() == expected


def test_equal_values_whose_standard_deviation_is_not_zero_are_equal():
    values = torch.tensor([0.1] * 7, dtype=torch.float64)
    assert values.numpy().std() > 0  # 1.4e-17
    assert not informative_groups(values, torch.zeros(7, dtype=torch.long)).any()


def test_equal_rewards_give_exactly_nothing_to_learn():
    found = grpo_advantages(torch.tensor([0.1] * 7 + [1.0, 0.0]), torch.tensor([0] * 7 + [1, 1]))
    assert found[:7].abs().max() < 1e-9
    torch.testing.assert_close(found[7:], torch.tensor([1.0, -1.0]) / math.sqrt(2), rtol=1e-5, atol=0)


def test_groups_do_not_depend_on_order():
    rewards, groups = torch.randn(12, generator=torch.manual_seed(0)), torch.arange(12) % 3
    order = torch.randperm(12, generator=torch.manual_seed(1))
    torch.testing.assert_close(grpo_advantages(rewards[order], groups[order]), grpo_advantages(rewards, groups)[order])


def test_bad_input():
    with pytest.raises(ValueError, match="finite"):
        grpo_advantages(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"\[N\]"):
        grpo_advantages(torch.zeros(2), torch.zeros(3))
