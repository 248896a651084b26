"""GRPO advantages against a loop over groups in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.algorithms import grpo_advantages


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


def test_equal_rewards_give_exactly_nothing_to_learn():
    advantages = grpo_advantages(torch.tensor([0.1] * 7 + [1.0, 0.0]), torch.tensor([0] * 7 + [1, 1]))
    assert advantages[:7].abs().max() < 1e-9
    torch.testing.assert_close(advantages[7:], torch.tensor([1.0, -1.0]) / math.sqrt(2), rtol=1e-5, atol=0)


def test_groups_do_not_depend_on_order():
    rewards, groups = torch.randn(12, generator=torch.manual_seed(0)), torch.arange(12) % 3
    order = torch.randperm(12, generator=torch.manual_seed(1))
    torch.testing.assert_close(grpo_advantages(rewards[order], groups[order]), grpo_advantages(rewards, groups)[order])


def test_bad_input():
    with pytest.raises(ValueError, match="finite"):
        grpo_advantages(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"\[N\]"):
        grpo_advantages(torch.zeros(2), torch.zeros(3))
