"""Put faults into the code, one process each, and see which tests fail.

A fault never touches a file: the process that runs the tests imports a patched copy of one module. That process is
forked from one that has imported torch, transformers and pytest already, but nothing of forerun and nothing that
computes, so a fault costs about as long as its tests.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import types
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from tests.faults.mutation import ROOT, Mutation

# Imported once, before any process is forked. The models are those that the tests make tiny ones of.
PRELOADED = (
    "hypothesis",
    "_hypothesis_pytestplugin",
    "datasets",
    "torch.distributed",
    "torch.multiprocessing",
    "transformers.models.auto.modeling_auto",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
)
AT_ONCE = 2
TEST_LIMIT_S = 60
PROCESS_LIMIT_S = 240
# A patch that leaves such errors is broken code, not a fault that someone could train with.
BROKEN_CODE = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError")

RAISED = re.compile(r"^([\w.]+(?:Error|Exception|Failed)): .*$", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """A test that failed. `when` is "call", or the phase of pytest that the error was raised in."""

    node_id: str
    when: str
    exception: str
    message: str


@dataclass
class Outcome:
    """What one process saw. `broken` says why it has no result."""

    passed: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    injected: bool = False
    seconds: float = 0.0
    broken: str | None = None


@dataclass(frozen=True)
class Verdict:
    """`problem` is None for a fault that was caught; `caught_by` has a failure for each test that the fault names."""

    mutation: Mutation
    problem: str | None
    caught_by: tuple[Failure, ...] = ()
    seconds: float = 0.0


def run(mutations: Sequence[Mutation]) -> Iterator[Verdict]:
    """Inject every mutation and judge it; verdicts in the order given, as soon as they are known.

    The named tests are run without a fault, too: one that does not pass then has caught nothing.
    """
    _preload()
    verdicts: dict[int, Verdict] = {}
    jobs: list[tuple[int, Mutation | None, str, tuple[str, ...]]] = []
    for index, mutation in enumerate(mutations):
        try:
            jobs.append((index, mutation, mutation.patched_source(), mutation.tests))
        except ValueError as error:
            verdicts[index] = Verdict(mutation, str(error))
    tests = tuple(dict.fromkeys(test for job in jobs for test in job[3]))
    clean: Outcome | None = None
    outcomes: dict[int, Outcome] = {}
    reported = 0
    queue = deque([(-1, None, "", tests), *jobs] if tests else [])
    for index, outcome in _run_jobs(queue):
        if index == -1:
            clean = outcome
        else:
            outcomes[index] = outcome
        while reported < len(mutations) and (reported in verdicts or (clean is not None and reported in outcomes)):
            if reported not in verdicts:
                assert clean is not None
                verdicts[reported] = judge(mutations[reported], outcomes[reported], clean)
            yield verdicts[reported]
            reported += 1
    for index in range(reported, len(mutations)):
        yield verdicts[index]


def judge(mutation: Mutation, outcome: Outcome, clean: Outcome) -> Verdict:
    """Whether every named test fails under the fault, for a reason that counts, and passes without it."""

    def problem(reason: str) -> Verdict:
        return Verdict(mutation, reason)

    if outcome.broken is not None:
        return problem(outcome.broken)
    if not outcome.injected:
        return problem(f"no test imports {mutation.module}")
    caught_by = []
    for test in mutation.tests:
        failed = [failure for failure in outcome.failures if _selects(test, failure.node_id)]
        if not failed and any(_selects(test, node_id) for node_id in outcome.passed):
            return problem(f"{test} passes with the fault in the code")
        if not failed:
            raised = "".join(f": {failure.message}" for failure in outcome.failures[:1])
            return problem(f"{test} did not run{raised}")
        first = failed[0]
        if first.when != "call" or first.exception in BROKEN_CODE or first.message.startswith("Failed: Timeout"):
            return problem(f"{test} did not run to its end: {first.message}")
        if clean.broken is not None:
            return problem(f"without the fault: {clean.broken}")
        if any(_selects(test, failure.node_id) for failure in clean.failures):
            return problem(f"{test} fails without the fault in the code, too")
        if not any(_selects(test, node_id) for node_id in clean.passed):
            return problem(f"{test} did not run without the fault in the code")
        caught_by.append(first)
    return Verdict(mutation, None, tuple(caught_by), outcome.seconds)


def _selects(test: str, node_id: str) -> bool:
    return node_id == test or node_id.startswith((test + "[", test + "::"))


# ---- processes


def _preload() -> None:
    # Read by transformers and OpenMP when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    # With one thread there is no pool of threads, which a fork would lose.
    torch.set_num_threads(1)
    assert not any(name.startswith("forerun") for name in sys.modules), "a fault must be there before forerun is"
    gc.collect()
    gc.freeze()


def _run_jobs(
    queue: deque[tuple[int, Mutation | None, str, tuple[str, ...]]],
) -> Iterator[tuple[int, Outcome]]:
    fork = multiprocessing.get_context("fork")
    running: dict[Connection, tuple[int, multiprocessing.process.BaseProcess, float]] = {}
    with tempfile.TemporaryDirectory(prefix="faults") as scratch:
        try:
            while queue or running:
                while queue and len(running) < AT_ONCE:
                    index, mutation, source, tests = queue.popleft()
                    ours, theirs = fork.Pipe(duplex=False)
                    arguments = (theirs, mutation, source, tests, Path(scratch) / str(index))
                    process = fork.Process(target=_run_tests, args=arguments)
                    process.start()
                    theirs.close()
                    running[ours] = (index, process, time.monotonic() + PROCESS_LIMIT_S)
                ready = wait(list(running), timeout=1.0)
                for connection, (index, process, deadline) in list(running.items()):
                    if connection in ready:
                        try:
                            outcome = connection.recv()
                        except EOFError:
                            process.join()
                            outcome = Outcome(broken=f"the tests' process ended with exit code {process.exitcode}")
                    elif time.monotonic() > deadline:
                        _kill(process)
                        outcome = Outcome(broken=f"the tests ran longer than {PROCESS_LIMIT_S} s")
                    else:
                        continue
                    process.join()
                    connection.close()
                    del running[connection]
                    yield index, outcome
        finally:
            for _, process, _ in running.values():
                _kill(process)
                process.join()


def _kill(process: multiprocessing.process.BaseProcess) -> None:
    """End a process and those that it started; `_run_tests` made it the leader of a group."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _run_tests(
    connection: Connection, mutation: Mutation | None, source: str, tests: tuple[str, ...], scratch: Path
) -> None:
    os.setpgid(0, 0)
    start = time.monotonic()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    outcome = Outcome()
    if mutation is not None:
        sys.meta_path.insert(0, _Injector(mutation, source, outcome))
    _fork_instead_of_spawn()
    _quicken_hypothesis()
    os.chdir(ROOT)
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={scratch}", "-o", f"timeout={TEST_LIMIT_S}"]
    if len(tests) == 1:
        options.append("-x")
    files = dict.fromkeys(test.split("::")[0] for test in tests if (ROOT / test.split("::")[0]).is_file())
    if files:  # pytest without any would collect the whole suite
        pytest.main([*options, *files], plugins=[_Selector(tests), _Recorder(outcome)])
    outcome.seconds = time.monotonic() - start
    connection.send(outcome)


def _fork_instead_of_spawn() -> None:
    """Processes that a test starts, the ranks of a group for instance, run with the same fault."""
    import torch.multiprocessing

    fork = multiprocessing.get_context("fork")
    for module in (multiprocessing, torch.multiprocessing):
        module.get_context = lambda method=None: fork  # type: ignore[attr-defined]


def _quicken_hypothesis() -> None:
    """Always the same examples, no search for the smallest one, nothing written."""
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "faults",
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("faults")


class _Injector:
    """A finder that gives the patched source in place of one module's own."""

    def __init__(self, mutation: Mutation, source: str, outcome: Outcome) -> None:
        self.mutation = mutation
        self.source = source
        self.outcome = outcome

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != self.mutation.module:
            return None
        self.outcome.injected = True
        file = str(self.mutation.file)
        return importlib.util.spec_from_file_location(name, file, loader=_Patched(name, file, self.source))


class _Patched(SourceFileLoader):
    def __init__(self, name: str, file: str, source: str) -> None:
        super().__init__(name, file)
        self.source = source

    def get_code(self, name: str) -> types.CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


class _Selector:
    """A pytest plugin that keeps the named tests. Named as arguments, one that does not exist would stop them all."""

    def __init__(self, tests: tuple[str, ...]) -> None:
        self.tests = tests

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if any(_selects(test, item.nodeid) for test in self.tests)]


class _Recorder:
    """A pytest plugin that notes what passed, and what failed with which error."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.outcome.passed.append(report.nodeid)

    def pytest_exception_interact(
        self, call: pytest.CallInfo[object], report: pytest.TestReport | pytest.CollectReport
    ) -> None:
        assert call.excinfo is not None
        name, text = call.excinfo.typename, call.excinfo.exconly().strip()
        message = (text.splitlines() or [name])[0]
        # A process that the test started sends its traceback, in which the error itself comes last.
        sent = list(RAISED.finditer(text)) if "Traceback" in text else []
        if sent:
            name, message = sent[-1][1].rpartition(".")[2], sent[-1][0]
        self.outcome.failures.append(Failure(report.nodeid, call.when, name, message[:300]))
