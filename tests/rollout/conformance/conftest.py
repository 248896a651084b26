"""One engine per kind, for the tests of this package; what it leaves running after `close` is an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.rollout.conformance import native, sglang, vllm
from tests.rollout.conformance.subjects import Launch, Subject

ENGINES = [
    pytest.param(native.rejection, id="native-rejection"),
    pytest.param(native.match, id="native-match"),
    pytest.param(sglang.launch, id="sglang"),
    pytest.param(vllm.launch, id="vllm", marks=pytest.mark.oracle),
]


def running() -> set[str]:
    """Threads and child processes of this process."""
    children = {f"process {child.pid}" for child in psutil.Process().children()}
    return children | {f"thread {thread.name}" for thread in threading.enumerate()}


@pytest.fixture(scope="package", params=ENGINES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    launch: Launch = request.param
    before = running()
    with launch(tmp_path_factory) as made:
        yield made
    patience = time.monotonic() + 10
    while left := running() - before:
        assert time.monotonic() < patience, f"close() left {sorted(left)} running"
        time.sleep(0.1)
