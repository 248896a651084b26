"""Ledger, dispatch and their stored form under random orders of events: nothing lost, doubled or too stale."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ForerunError
from forerun.rewards.protocol import RewardResult
from forerun.rollout.dispatch import Dispatch
from forerun.rollout.protocol import Completion, Request, SamplingParams
from forerun.trainers.asynchronous.ledger import Group, Ledger
from forerun.trainers.asynchronous.stored import (
    completion_state,
    ledger_state,
    restore_ledger,
    restored_completion,
)


def full_text(name: str) -> list[int]:
    """What the request `name` is answered with, however often it is interrupted."""
    draw = random.Random(name)
    return [draw.randrange(1000) for _ in range(draw.randint(1, 9))]


def asked(group: int, place: int) -> Request:
    name = f"{group}-{place}"
    return Request(name, [group, place], SamplingParams(max_tokens=len(full_text(name)), seed=group * 10 + place))


def work(request: Request, version: int, cut: int | None) -> Completion:
    """An engine: goes on where the prompt ends, to the end or for `cut` tokens."""
    text = full_text(request.request_id)
    rest = text[len(request.prompt_token_ids) - 2 :]
    assert request.prompt_token_ids[2:] == text[: len(text) - len(rest)]
    assert request.sampling.max_tokens == len(rest) > 0
    finished = cut is None or cut >= len(rest)
    tokens = rest if finished else rest[:cut]
    return Completion(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        token_ids=tokens,
        log_probs=[-1.0 / (token + 1) for token in tokens],
        raw_log_probs=None,
        finish_reason="length" if finished else "abort",
        weight_versions=[version] * len(tokens),
        spec_num_draft_tokens=2 * len(tokens),
        spec_num_accepted_tokens=len(tokens),
        spec_num_verify_steps=1,
        drafted_per_depth=[2 * len(tokens)],
        accepted_per_depth=[len(tokens)],
        accepted_draft=[token % 2 == 0 for token in tokens],
    )


class Simulation:
    """A run whose events come in any order that a trainer, its workers and their losses can bring about."""

    def __init__(self, draw: random.Random, batch: int, size: int, staleness: int) -> None:
        self.draw, self.batch, self.size, self.staleness = draw, batch, size, staleness
        self.ledger, self.dispatch = Ledger(batch, size, staleness), Dispatch()
        self.running: dict[str, list[Request]] = {"a": [], "b": [], "c": []}
        self.late: list[tuple[str, Completion]] = []  # answers of workers that are thought lost
        self.complete: list[int] = []
        self.steps: list[list[Group]] = []
        self.dropped: list[int] = []
        self.trained = 0
        self.calm = False  # nothing is cut or dropped any more

    def event(self) -> None:
        self.draw.choice(
            [self.open, self.hand_out, self.answer, self.answer, self.lose, self.repeat, self.judge, self.take,
             self.train, self.update, self.store]
        )()  # fmt: skip

    def open(self) -> None:
        if not self.ledger.room:
            with pytest.raises(ValueError, match="newer weights"):
                self.ledger.open(0)
            return
        group = self.ledger.open(item=self.ledger.num_opened * 7)
        for place in range(self.size):
            self.dispatch.add(asked(group.number, place))

    def hand_out(self) -> None:
        worker = self.draw.choice(list(self.running))
        self.running[worker] += self.dispatch.hand_out(worker, self.draw.randint(0, 4))

    def answer(self) -> None:
        worker = self.draw.choice(list(self.running))
        if not self.running[worker]:
            return
        request = self.running[worker].pop(self.draw.randrange(len(self.running[worker])))
        cut = None if self.calm else self.draw.choice([None, None, 0, 1, 3])
        completion = work(request, self.ledger.version, cut)
        self.late.append((worker, completion))  # it may come again
        self.enter(self.dispatch.take_back(worker, completion))

    def enter(self, answer: Completion | None) -> None:
        if answer is None:
            return
        number, place = map(int, answer.request_id.split("-"))
        assert answer.token_ids == full_text(answer.request_id)
        assert answer.prompt_token_ids == [number, place]
        if (group := self.ledger.put(number, place, answer)) is not None:
            self.complete.append(group.number)

    def lose(self) -> None:
        worker = self.draw.choice(list(self.running))
        lost, self.running[worker] = self.running[worker], []
        assert self.dispatch.lose(worker) == len(lost)
        self.late += [(worker, work(request, self.ledger.version, None)) for request in lost]

    def repeat(self) -> None:
        """An answer that comes twice, or from a worker that was given up: dropped, unless that worker has it again."""
        if self.late:
            worker, completion = self.late.pop(self.draw.randrange(len(self.late)))
            if completion.request_id not in self.dispatch.held(worker):
                assert self.dispatch.take_back(worker, completion) is None
        assert self.dispatch.take_back("a", replace(work(asked(0, 0), 0, None), request_id="nobody")) is None

    def judge(self) -> None:
        if not self.complete:
            return
        number = self.complete.pop(self.draw.randrange(len(self.complete)))
        self.ledger.judge(number, [RewardResult(float(place), fields={"acc": 1.0}) for place in range(self.size)])
        if not self.calm and self.draw.random() < 0.3:
            self.ledger.drop(number)
            self.dropped.append(number)

    def take(self) -> None:
        if self.trained < self.ledger.steps_done:
            return  # still training
        if (found := self.ledger.take_step()) is not None:
            groups, dropped = found
            self.steps.append(groups)
            assert all(group.number < groups[-1].number for group in dropped)

    def train(self) -> None:
        self.trained = self.ledger.steps_done

    def update(self) -> None:
        self.ledger.updated(self.draw.randint(self.ledger.version, self.trained))

    def store(self) -> None:
        """As a checkpoint does: what runs was cut short first, so that nothing is held."""
        for worker, requests in self.running.items():
            for request in requests:
                cut = self.draw.randint(0, request.sampling.max_tokens)
                self.enter(self.dispatch.take_back(worker, work(request, self.ledger.version, cut)))
            requests.clear()
        written = {
            (int(p.request.request_id.split("-")[0]), int(p.request.request_id.split("-")[1])): p.written
            for p in self.dispatch.pending()
            if p.written is not None
        }
        state: Any = json.loads(json.dumps(ledger_state(self.ledger, written)))
        before = self.ledger
        self.ledger, self.dispatch = Ledger(self.batch, self.size, self.staleness), Dispatch()
        assert restore_ledger(self.ledger, state) == written
        assert vars(self.ledger) == vars(before)
        for group in self.ledger.groups.values():
            for place in range(self.size):
                if place not in group.completions:
                    self.dispatch.add(asked(group.number, place), written.get((group.number, place)))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))
def test_every_response_is_trained_on_once_in_order_and_no_older_than_allowed(
    seed: int, batch: int, size: int, staleness: int
) -> None:
    run = Simulation(random.Random(seed), batch, size, staleness)
    for _ in range(150):
        run.event()
    run.calm = True
    before = len(run.steps)
    for _ in range(1000):
        if len(run.steps) == before + 3:
            break
        for event in (run.open, run.hand_out, run.answer, run.judge, run.take, run.train, run.update):
            event()
    assert len(run.steps) == run.ledger.steps_done == before + 3  # it comes to further steps, whatever was
    trained = [group.number for groups in run.steps for group in groups]
    assert all(len(groups) == batch for groups in run.steps)
    assert trained == sorted(set(trained)) == [n for n in range(trained[-1] + 1) if n not in run.dropped]
    for step, groups in enumerate(run.steps):
        for group in groups:
            assert group.item == group.number * 7 and len(group.answers()) == size
            for place, completion in enumerate(group.answers()):
                assert completion.token_ids == full_text(f"{group.number}-{place}")
                assert all(0 <= step - version <= staleness for version in completion.weight_versions)
                assert completion.weight_versions == sorted(completion.weight_versions)
                count = len(completion.token_ids)
                assert len(completion.weight_versions) == count
                assert completion.log_probs == [-1.0 / (token + 1) for token in completion.token_ids]
                assert completion.accepted_draft == [token % 2 == 0 for token in completion.token_ids]
                assert (completion.spec_num_draft_tokens, completion.accepted_per_depth) == (2 * count, [count])
                assert completion.raw_log_probs is None


def test_without_drops_step_s_trains_on_the_groups_of_its_own_batch() -> None:
    ledger = Ledger(groups_per_step=2, group_size=1, max_staleness=1)
    assert ledger.room == 4
    for number in range(4):
        ledger.open(number)
    assert ledger.room == 0
    for number in (3, 1, 2):
        ledger.put(number, 0, work(asked(number, 0), 0, None))
        ledger.judge(number, [RewardResult(1.0)])
        assert ledger.take_step() is None  # the oldest is missing
    ledger.put(0, 0, work(asked(0, 0), 0, None))
    assert ledger.take_step() is None  # it is not judged
    ledger.judge(0, [RewardResult(1.0)])
    first, _ = ledger.take_step() or ([], [])
    second, _ = ledger.take_step() or ([], [])
    assert [[group.number for group in groups] for groups in (first, second)] == [[0, 1], [2, 3]]
    assert ledger.room == 0  # the weights have not moved
    ledger.updated(1)
    assert ledger.room == 2
    with pytest.raises(ForerunError, match="weights of step 3"):
        ledger.updated(3)


def test_a_response_is_entered_once() -> None:
    ledger = Ledger(1, 2, 0)
    ledger.open(5)
    completion = work(asked(0, 0), 0, None)
    assert ledger.put(0, 0, completion) is None
    for number, place in ((0, 0), (1, 0), (0, 2)):
        with pytest.raises(ValueError, match="not open"):
            ledger.put(number, place, completion)
    with pytest.raises(ValueError, match="1 responses, and 2 rewards"):
        ledger.judge(0, [RewardResult(0.0), RewardResult(0.0)])


def test_every_bit_of_a_completion_is_stored() -> None:
    completion = Completion(
        request_id="é",
        prompt_token_ids=[2**40],
        token_ids=[1, 2],
        log_probs=[-0.1 - 2**-50, float("-inf")],
        raw_log_probs=[-1e-300, 0.0],
        finish_reason="stop",
        weight_versions=[3, 4],
        stop_reason="\n",
        spec_num_draft_tokens=3,
        accepted_per_depth=[1, 0],
        accepted_draft=[True, False],
    )
    state = json.loads(json.dumps(completion_state(completion)))
    assert restored_completion(state) == completion


def test_an_account_of_other_batches_or_a_damaged_one_is_refused() -> None:
    state = ledger_state(Ledger(2, 2, 1), {})
    with pytest.raises(ForerunError, match="train_batch_size=2, not 3"):
        restore_ledger(Ledger(3, 2, 1), state)
    with pytest.raises(ForerunError, match=r"rollout.n=2, not 4"):
        restore_ledger(Ledger(2, 4, 1), state)
    with pytest.raises(ForerunError, match="cannot be read"):
        restore_ledger(Ledger(2, 2, 1), {**state, "groups": [{}]})
