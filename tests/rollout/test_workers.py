"""A worker in a thread keeps the worker protocol, and a pool of workers goes on without those that are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.rollout.dispatch import Dispatch
from forerun.rollout.local_worker import LocalWorker
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.pool import WorkerPool
from forerun.rollout.protocol import Completion, Request
from forerun.rollout.workers import RolloutWorker, WorkerLostError
from tests.rollout import tiny


@pytest.fixture(scope="module")
def model() -> MTPCarrier:
    return tiny.carrier()


class Batching(NativeEngine):
    """Takes no request on the way, as some engines do not."""

    def add(self, requests: Sequence[Request]) -> None:
        raise ForerunError("one call at a time")


class Broken(NativeEngine):
    """Fails in its first call, behind the first answer."""

    def generate(
        self, requests: Sequence[Request], on_finish: Callable[[Completion], None] | None = None, _: Any = None
    ) -> list[Completion]:
        def fail(completion: Completion) -> None:
            assert on_finish is not None
            on_finish(completion)
            raise ForerunError("no power")

        return super().generate(requests, fail)


class OutOfMemory(NativeEngine):
    """In its first call."""

    def generate(self, *_: Any) -> list[Completion]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")


@pytest.fixture
def make(model: MTPCarrier) -> Iterator[Callable[..., LocalWorker]]:
    made: list[LocalWorker] = []

    def worker(kind: type[NativeEngine] = NativeEngine, name: str = "w", capacity: int = 4) -> LocalWorker:
        engine = kind(model, num_speculative_tokens=1, products="linear", max_num_seqs=4)
        made.append(LocalWorker(engine, capacity, name))
        return made[-1]

    yield worker
    for each in made:
        each.close()


def asked(count: int, first: int = 0, **sampling: object) -> list[Request]:
    rows = tiny.prompts(first + count)[first:]
    return [
        Request(f"r{first + i}", made.prompt_token_ids, made.sampling)
        for i, made in enumerate(tiny.requests(rows, **{"max_tokens": 8, "seed": 3, **sampling}))
    ]


def collected(worker: RolloutWorker, count: int) -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    until = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < until, f"{len(found)} of {count} requests ended"
        for completion in worker.collect(0.1):
            assert completion.request_id not in found
            found[completion.request_id] = completion
    assert worker.collect(0) == []
    return found


@pytest.mark.parametrize("kind", [NativeEngine, Batching])
def test_requests_go_in_at_any_time_and_each_comes_out_once(
    make: Callable[..., LocalWorker], kind: type[NativeEngine]
) -> None:
    worker = make(kind)
    assert isinstance(worker, RolloutWorker)
    requests = asked(12)
    expected = {c.request_id: c.token_ids for c in make().engine.generate(requests)}
    for start in range(0, 12, 3):
        worker.submit(requests[start : start + 3])
    done = collected(worker, 12)
    assert {name: c.token_ids for name, c in done.items()} == expected
    worker.submit(requests[:1])  # the id is free again
    assert collected(worker, 1)["r0"].token_ids == expected["r0"]


def test_an_abort_meets_what_runs_and_what_waits(make: Callable[..., LocalWorker]) -> None:
    worker = make(Batching)
    started, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        started.set()
        assert go_on.wait(30)

    worker.engine.runner.tune = hold  # type: ignore[attr-defined]
    worker.submit(asked(2, max_tokens=60))
    assert started.wait(30)
    worker.submit(asked(2, first=2))  # wait behind these
    worker.abort(["r2", "r1", "nobody"])
    waited = worker.collect(5)
    assert [(c.request_id, c.finish_reason, c.token_ids) for c in waited] == [("r2", "abort", [])]
    go_on.set()
    found: dict[str, Completion] = {}
    while len(found) < 3:
        worker.abort(["r1"])  # the first one came before the engine had begun
        found |= {c.request_id: c for c in worker.collect(0.05)}
    assert found["r1"].finish_reason in ("abort", "length")
    assert len(found["r0"].token_ids) == 60 and len(found["r3"].token_ids) == 8


def test_weights_are_updated_when_nothing_runs(make: Callable[..., LocalWorker], model: MTPCarrier) -> None:
    worker = make()
    worker.submit(asked(3))
    assert {v for c in collected(worker, 3).values() for v in c.weight_versions} == {0}
    worker.update_weights(named_weights(model), 4)
    worker.submit(asked(3))
    assert {v for c in collected(worker, 3).values() for v in c.weight_versions} == {4}
    assert worker.drafter_digest() == worker.engine.drafter_digest()


def test_a_worker_whose_engine_fails_is_lost_and_its_answers_are_not(make: Callable[..., LocalWorker]) -> None:
    worker = make(Broken)
    worker.submit(asked(3, max_tokens=4))
    done: list[Completion] = []
    with pytest.raises(WorkerLostError, match="rollout worker w: no power"):
        while True:
            done += worker.collect(1)
    assert len(done) == 1
    for call in (lambda: worker.submit(asked(1)), lambda: worker.abort(["r0"]), worker.drafter_digest):
        with pytest.raises(WorkerLostError):
            call()
    worker.close()
    worker.close()


class Unreachable(NativeEngine):
    """Nobody hears an abort, and nothing ends before one."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.asked = threading.Event()

    def generate(self, *arguments: Any) -> list[Completion]:
        assert self.asked.wait(60), "nobody asked for an abort"
        return super().generate(*arguments)

    def abort(self, _: Any) -> None:
        self.asked.set()
        raise ForerunError("the process has ended")


def test_a_worker_whose_engine_cannot_be_asked_to_abort_is_lost(make: Callable[..., LocalWorker]) -> None:
    pool, dispatch = WorkerPool([make(Unreachable, name="a"), make(name="b")]), Dispatch()
    for request in asked(4, max_tokens=64):
        dispatch.add(request)
    pool.serve(dispatch)
    assert len(dispatch.held("a")) == 2
    pool.serve(dispatch, give=False, abort=True)
    assert [worker.name for worker in pool.workers] == ["b"] and pool.num_reissued == 2
    worker = make(Unreachable, name="c")
    worker.submit(asked(1, max_tokens=64))
    with pytest.raises(WorkerLostError, match="rollout worker c: the process has ended"):
        worker.abort(["r0"])


def test_a_worker_without_memory_is_lost(make: Callable[..., LocalWorker], model: MTPCarrier) -> None:
    pool = WorkerPool([make(OutOfMemory, name="a"), make(name="b")])
    assert len(pool.generate(asked(6), Dispatch()) or []) == 6
    assert [worker.name for worker in pool.workers] == ["b"]
    with pytest.raises(WorkerLostError, match=r"a: CUDA out of memory\. Tried to allocate 2 GiB"):
        lost(make(OutOfMemory, name="a"))

    def weights() -> Iterator[Any]:
        yield from list(named_weights(model))[:2]
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker = make(name="c")
    for call in (lambda: worker.update_weights(weights(), 1), worker.drafter_digest):
        with pytest.raises(WorkerLostError, match="c: CUDA out of memory"):
            call()


def lost(worker: LocalWorker) -> None:
    worker.submit(asked(1))
    while True:
        worker.collect(1)


def test_an_error_of_the_program_is_no_loss(make: Callable[..., LocalWorker]) -> None:
    class Wrong(NativeEngine):
        def generate(self, *_: Any) -> list[Completion]:
            raise ZeroDivisionError("rows")

    with pytest.raises(ZeroDivisionError, match="rows"):
        lost(make(Wrong))


def test_an_engine_that_leaves_requests_unanswered_is_lost(make: Callable[..., LocalWorker]) -> None:
    class Forgetful(NativeEngine):
        def generate(self, requests: Sequence[Request], *others: Any) -> list[Completion]:
            return super().generate(requests[:-1], *others)

    expected = [c.token_ids for c in make().engine.generate(asked(6))]
    worker = make(Forgetful)
    worker.submit(asked(3))
    with pytest.raises(WorkerLostError, match="rollout worker w: the engine returned and left 1 requests unanswered"):
        collected(worker, 3)
    pool = WorkerPool([make(Forgetful, name="a"), make(name="b")])
    assert [c.token_ids for c in pool.generate(asked(6), Dispatch()) or []] == expected
    assert [each.name for each in pool.workers] == ["b"] and pool.num_reissued == 1


def test_an_unusable_request_is_no_loss(make: Callable[..., LocalWorker]) -> None:
    worker = make()
    with pytest.raises(UsageError, match="empty prompt"):
        worker.submit([Request("r", [])])
        worker.collect(10)


def test_closing_ends_what_runs(make: Callable[..., LocalWorker]) -> None:
    worker = make()
    worker.submit(asked(4, max_tokens=80))
    worker.close()
    assert not worker._thread.is_alive()
    with pytest.raises(WorkerLostError, match="closed"):
        worker.collect(0)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_pool_shares_out_evenly_and_no_more_than_there_is_room_for(
    make: Callable[..., LocalWorker], at_once: bool
) -> None:
    workers = [make(name="a", capacity=4), make(name="b", capacity=2)]
    submitted: dict[str, list[int]] = {"a": [], "b": []}
    for worker in workers:
        original = worker.submit

        def note(requests: Sequence[Request], name: str = worker.name, submit: Any = original) -> None:
            submitted[name].append(len(requests))
            submit(requests)

        worker.submit = note  # type: ignore[method-assign]
    pool = WorkerPool(workers)
    done = (pool.generate(asked(12), Dispatch()) if at_once else None) or []
    if not at_once:
        dispatch = Dispatch()
        for request in asked(12):
            dispatch.add(request)
        while len(done) < 12:
            done += pool.serve(dispatch)
            assert len(dispatch.held("a")) <= 4 and len(dispatch.held("b")) <= 2
    assert {c.request_id for c in done} == {f"r{i}" for i in range(12)}
    assert submitted == {"a": [6], "b": [6]} if at_once else (submitted["a"][0], submitted["b"][0]) == (4, 2)
    assert pool.idle_seconds() > 0


def test_a_pool_goes_on_without_lost_workers_until_none_is_left(
    make: Callable[..., LocalWorker], model: MTPCarrier
) -> None:
    expected = [c.token_ids for c in make().engine.generate(asked(8))]
    pool = WorkerPool([make(Broken, name="a"), make(name="b")])
    assert [c.token_ids for c in pool.generate(asked(8), Dispatch()) or []] == expected
    assert [worker.name for worker in pool.workers] == ["b"] and pool.num_reissued == 3
    last = WorkerPool([make(Broken, name="c")])
    with pytest.raises(
        ForerunError, match="every rollout worker is lost: rollout worker c: no power; the same command"
    ):
        last.generate(asked(3), Dispatch())
    assert not last.can_recover
    heirs = WorkerPool([make(Broken, name="d")], lambda name: make(name=f"{name}'s heir"))
    assert heirs.generate(asked(3), Dispatch()) is None
    heirs.update_weights(lambda: named_weights(model), 2)
    assert [c.weight_versions for c in heirs.generate(asked(2), Dispatch()) or []] == [[2] * 8, [2] * 8]
    assert [(worker.name, digest is not None) for worker, digest in heirs.drafters()] == [("d's heir", True)]


class Refusing(NativeEngine):
    """Of the weights that it is given."""

    def update_weights(self, *_: Any) -> None:
        raise ForerunError("the line is down")


def test_the_last_worker_that_is_lost_in_an_update_is_replaced_in_it(
    make: Callable[..., LocalWorker], model: MTPCarrier
) -> None:
    pool = WorkerPool([make(Refusing, name="a")], lambda name: make(name=f"{name}'s heir"))
    pool.update_weights(lambda: named_weights(model), 2)
    assert [c.weight_versions for c in pool.generate(asked(1), Dispatch()) or []] == [[2] * 8]


def test_where_one_finds_no_place_no_other_is_tried_until_the_next_update(
    make: Callable[..., LocalWorker], model: MTPCarrier
) -> None:
    asked_for: list[str] = []

    def replace(name: str) -> LocalWorker:
        asked_for.append(name)
        if len(asked_for) == 2:
            raise ForerunError("no room")
        return make(name=name)

    pool = WorkerPool([make(name=name) for name in "abcd"], replace)
    for worker in pool.workers[:3]:
        pool._try(worker, None, raising)
    pool.update_weights(lambda: named_weights(model), 1)
    assert asked_for == ["a", "b"] and [worker.name for worker in pool.workers] == ["d", "a"]
    pool.update_weights(lambda: named_weights(model), 2)
    assert asked_for == ["a", "b", "b", "c"] and [worker.name for worker in pool.workers] == ["d", "a", "b", "c"]


def test_workers_that_are_replaced_in_vain_end_it(make: Callable[..., LocalWorker], model: MTPCarrier) -> None:
    """One that answered in between begins the count anew."""
    kinds = iter([Refusing, Refusing, NativeEngine, *[Refusing] * 9])
    pool = WorkerPool([make(Refusing, name="a")], lambda name: make(next(kinds), name=name))
    pool.update_weights(lambda: named_weights(model), 2)
    assert len(pool.generate(asked(1), Dispatch()) or []) == 1
    with pytest.raises(ForerunError, match="every rollout worker is lost: rollout worker a: the line is down"):
        pool._try(pool.workers[0], None, raising)
        pool.update_weights(lambda: named_weights(model), 3)
    assert len(list(kinds)) == 6 and not pool.can_recover


def raising() -> None:
    raise WorkerLostError("gone")
