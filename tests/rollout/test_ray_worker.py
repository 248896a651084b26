"""Rollout workers that are Ray actors: what they answer, how weights come to them, and what becomes of a dead one's
requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
from torch import Tensor

from forerun.cluster import connected
from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import named_weights
from forerun.rollout.dispatch import Dispatch
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.pool import WorkerPool
from forerun.rollout.protocol import Completion, Request
from forerun.rollout.ray_worker import RayWorker, RayWorkerSettings, start_workers
from forerun.rollout.workers import RolloutWorker, WorkerLostError
from tests.rollout.tiny import carrier, prompts, requests

# A bucket holds a few of the tiny model's tensors.
SETTINGS = RayWorkerSettings(capacity=4, bucket_bytes=8192, start_timeout_s=300, timeout_s=60)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    before = dict(os.environ)
    with connected(None, cpus=4) as module:
        yield module
    os.environ.clear()
    os.environ |= before


@pytest.fixture(scope="module")
def shared(ray: Any) -> Iterator[RayWorker]:
    """A worker for the tests that do it no harm."""
    (worker,) = start_workers(ray, make_engine, SETTINGS, ["shared"])
    yield worker
    worker.close()


def make_engine() -> NativeEngine:
    return NativeEngine(carrier(), num_speculative_tokens=1, products="linear")


def refuse() -> NativeEngine:
    raise UsageError("no such model: /nowhere")


def scaled(factor: float) -> dict[str, Tensor]:
    return {name: tensor.detach() * factor for name, tensor in named_weights(carrier())}


def asked(count: int, length: int = 24) -> list[Request]:
    return requests(prompts(count), max_tokens=length, seed=5)


def drained(worker: RolloutWorker, count: int) -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    while len(found) < count:
        for completion in worker.collect(5.0):
            assert completion.request_id not in found
            found[completion.request_id] = completion
    return found


def expected(given: list[Request], factor: float) -> dict[str, list[int]]:
    engine = make_engine()
    engine.update_weights(scaled(factor).items(), 7)
    return {completion.request_id: completion.token_ids for completion in engine.generate(given)}


def test_it_answers_as_its_engine_does_with_the_weights_it_was_sent(shared: RayWorker) -> None:
    assert isinstance(shared, RolloutWorker) and shared.process[1] != os.getpid()
    weights = scaled(1.25)
    shared.update_weights((pair for pair in weights.items()), 7)  # read once
    given = asked(9)
    shared.submit(given[:5])
    shared.submit(given[5:])
    found = drained(shared, 9)
    assert {name: completion.token_ids for name, completion in found.items()} == expected(given, 1.25)
    assert all(set(completion.weight_versions) == {7} for completion in found.values())
    engine = make_engine()
    engine.update_weights(weights.items(), 7)
    assert shared.drafter_digest() == engine.drafter_digest() and shared.dtype == engine.dtype


def test_what_is_aborted_comes_back_with_what_it_has(shared: RayWorker) -> None:
    given = asked(160, length=60)  # more than it answers before it hears of the abort
    shared.submit(given)
    shared.abort(request.request_id for request in given)
    found = drained(shared, 160)
    assert any(completion.finish_reason == "abort" for completion in found.values())


def test_a_killed_workers_requests_are_answered_once_each_and_another_takes_its_place(
    ray: Any, caplog: pytest.LogCaptureFixture
) -> None:
    workers = start_workers(ray, make_engine, SETTINGS, ["first", "second"])
    pool = WorkerPool(workers, lambda name: start_workers(ray, make_engine, SETTINGS, [name])[0])
    weights = scaled(1.25)
    pool.update_weights(weights.items, 7)
    dispatch, given = Dispatch(), asked(160, length=60)
    for request in given:
        dispatch.add(request)
    answers = pool.serve(dispatch, at_once=True)
    os.kill(workers[0].process[1], signal.SIGKILL)
    held = dispatch.held("first")
    while len(answers) < len(given):
        answers += pool.serve(dispatch, at_once=True)
    assert held and pool.num_reissued == len(held)
    host, process = workers[0].process
    assert f"rollout worker first: process {process} on {host} has died: {len(held)} requests go" in caplog.text
    assert [worker.name for worker in pool.workers] == ["second"]
    assert sorted(answer.request_id for answer in answers) == sorted(request.request_id for request in given)
    assert {answer.request_id: answer.token_ids for answer in answers} == expected(given, 1.25)

    pool.update_weights(scaled(0.75).items, 8)
    assert [worker.name for worker in pool.workers] == ["second", "first"]
    digests = {digest for _, digest in pool.drafters()}
    engine = make_engine()
    engine.update_weights(scaled(0.75).items(), 8)
    assert digests == {engine.drafter_digest()}
    pool.workers[1].submit(given[:3])
    assert all(set(found.weight_versions) == {8} for found in drained(pool.workers[1], 3).values())
    pool.close()
    with pytest.raises(WorkerLostError, match="it was closed"):
        workers[1].submit(given)


def test_one_that_hangs_is_lost_and_ended(ray: Any) -> None:
    (worker,) = start_workers(ray, make_engine, replace(SETTINGS, timeout_s=1), ["hanging"])
    process = psutil.Process(worker.process[1])
    process.suspend()
    with pytest.raises(WorkerLostError, match="no answer to drafter_digest within 1 s"):
        worker.drafter_digest()
    process.wait(30)


def test_an_update_that_lacks_a_weight_leaves_no_worker_with_a_part_of_it(shared: RayWorker) -> None:
    """The last test of the worker: it is lost then."""
    *some, _ = scaled(1.5).items()
    with pytest.raises(ForerunError, match="1 weights are missing"):
        shared.update_weights(some, 8)
    with pytest.raises(WorkerLostError, match="a weight update broke off"):
        shared.submit(asked(1))


def test_what_keeps_a_worker_from_starting_is_one_line(ray: Any) -> None:
    with pytest.raises(UsageError, match=r"^no such model: /nowhere$"):
        start_workers(ray, refuse, SETTINGS, ["refusing"])
    large = replace(SETTINGS, num_cpus=10_000, start_timeout_s=1)
    with pytest.raises(ForerunError, match="large: no answer to start within 1 s; it asks Ray for 10000 CPU and 0 GPU"):
        start_workers(ray, make_engine, large, ["large"])
