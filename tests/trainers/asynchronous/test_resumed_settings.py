"""A checkpoint with rollouts in it is resumed by a run that may train on these, and refused by any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ForerunError
from tests.trainers.asynchronous.runs import ASYNC, REPEATABLE, asynchronous, closing, gated, synchronous
from tests.trainers.tiny_rl import PROMPTS

WIDE = [*REPEATABLE, "train_batch_size=2", "ppo_mini_batch_size=2", "async_training.max_staleness=3"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """After a step, with the groups of three more, all sampled by the first weights."""
    with closing(asynchronous(tmp_path_factory.mktemp("saved"), *WIDE)) as made:
        made.turn(pause=True)
        yield json.loads(json.dumps(made.state_dict()))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["async_training.max_staleness=2"], r"rollouts that would be 3 steps old.*max_staleness=2: resume with 3"),
        (["async_training.max_staleness=0"], r"rollouts that would be 3 steps old.*max_staleness=0: resume with 3"),
        (["rollout.max_response_length=2"], r"holds \d tokens of a response, and rollout\.max_response_length=2"),
    ],
)
def test_settings_that_its_responses_break_are_refused(
    tmp_path: Path, saved: dict[str, Any], more: list[str], message: str
) -> None:
    with closing(asynchronous(tmp_path, *WIDE, *more)) as made, pytest.raises(ForerunError, match=message):
        made.load_state_dict(saved)


def test_responses_to_other_prompts_are_refused(tmp_path: Path, saved: dict[str, Any]) -> None:
    made = asynchronous(tmp_path, *WIDE, prompts=PROMPTS[::-1])
    with closing(made), pytest.raises(ForerunError, match=r"response \d-\d-0 is to another prompt"):
        made.load_state_dict(saved)


def test_a_wider_window_and_a_higher_limit_go_on(tmp_path: Path, saved: dict[str, Any]) -> None:
    more = ["async_training.max_staleness=4", "rollout.max_response_length=9"]
    with closing(asynchronous(tmp_path, *WIDE, *more)) as made:
        made.load_state_dict(saved)
        metrics = [made.turn(pause=False) for _ in range(4)]
        assert [line["staleness_max"] for line in metrics] == [1, 2, 3, 3]  # the last are of step 1


def test_a_beginning_without_an_end_is_refused(tmp_path: Path) -> None:
    with closing(gated(tmp_path)) as made:
        made.turn(pause=True)
        state = json.loads(json.dumps(made.state_dict()))
    made = asynchronous(tmp_path, *ASYNC, "rollout.n=3", "rollout.max_response_length=3")
    with closing(made), pytest.raises(ForerunError, match=r"tokens of a response, and rollout\.max_response_length=3"):
        made.load_state_dict(state)


def test_a_checkpoint_is_of_one_mode(tmp_path: Path, saved: dict[str, Any]) -> None:
    plain = synchronous(tmp_path)
    with pytest.raises(ForerunError, match=r"of an asynchronous run: .*async_training\.enable=true"):
        plain.load_state_dict(saved)
    made = asynchronous(tmp_path, *ASYNC)
    advice = r"of a synchronous run: .*async_training\.enable=false and leave the other async_training keys out$"
    with closing(made), pytest.raises(ForerunError, match=advice):
        made.load_state_dict(plain.state_dict())
