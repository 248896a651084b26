"""Every known kind of fault, put into the code, fails the tests that are named for it; and the bench can tell."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest

from tests.faults.bench import Failure, Outcome, judge
from tests.faults.catalogue import MUTATIONS
from tests.faults.mutation import KINDS, ROOT, Mutation


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The whole bench, in a process of its own: it has to fork before anything computes."""
    file = tmp_path_factory.mktemp("faults") / "verdicts.json"
    bench = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--json", str(file)], cwd=ROOT, capture_output=True, text=True
    )
    assert file.exists(), bench.stderr[-2000:]
    found = {verdict["mutation"]["name"]: verdict for verdict in json.loads(file.read_text(encoding="utf-8"))}
    assert bench.returncode == int(any(verdict["problem"] for verdict in found.values()))
    return found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.kind}-{m.name}")
def test_the_fault_is_caught(verdicts: dict[str, dict[str, Any]], mutation: Mutation) -> None:
    verdict = verdicts[mutation.name]
    assert verdict["problem"] is None, f"{mutation.story} Not caught: {verdict['problem']}"
    assert len(verdict["caught_by"]) == len(mutation.tests) > 0


def test_every_kind_has_a_fault_and_every_fault_a_name() -> None:
    assert {mutation.kind for mutation in MUTATIONS} == KINDS.keys()
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1


# ---- the bench itself

TEST = "tests/mtp/test_shift.py::test_labels_may_differ_from_the_tokens_read"
LABELS = "labels=target[0 if labels is None else 3],"


def mutation(old: str, new: str, *tests: str, module: str = "forerun.mtp.shift") -> Mutation:
    return Mutation(1, f"{old} -> {new}", "", module, old, new, tests or (TEST,))


# A change, and what is wrong with it as a fault that the tests catch.
CASES: list[tuple[Mutation, str | None]] = [
    (mutation(LABELS, "labels=target[0],"), None),
    (mutation(LABELS, LABELS + "  # harmless"), f"{TEST} passes with the fault in the code"),
    (mutation(LABELS, "labels=target[0],", TEST, TEST + "_by_far"), f"{TEST}_by_far did not run"),
    (mutation(LABELS, "labels=no_such_name,"), f"{TEST} did not run to its end: NameError"),
    (mutation("no such text", "", module="forerun.mtp.stats"), "stands in forerun.mtp.stats 0 times"),
    (mutation("def greedy", "def  greedy", module="forerun.speculative.rules"), "no test imports forerun.speculative"),
    (mutation(LABELS, "labels=("), "the patched forerun.mtp.shift is no Python"),
]


def test_the_bench_tells_a_caught_fault_from_every_other_change() -> None:
    code = (
        "import json, sys\n"
        "from tests.faults.bench import run\n"
        "from tests.faults.mutation import Mutation\n"
        "given = [Mutation(**m) for m in json.load(sys.stdin)]\n"
        "print(json.dumps([v.problem for v in run(given)]))"
    )
    given = json.dumps([asdict(made) for made, _ in CASES])
    bench = subprocess.run([sys.executable, "-c", code], cwd=ROOT, input=given, capture_output=True, text=True)
    assert bench.returncode == 0, bench.stderr[-2000:]
    problems = json.loads(bench.stdout)
    for (made, expected), problem in zip(CASES, problems, strict=True):
        if expected is None:
            assert problem is None
        else:
            assert problem is not None and expected in problem, made.name


def test_a_test_that_fails_without_the_fault_catches_nothing() -> None:
    made = mutation(LABELS, "labels=target[0],")
    failure = Failure(TEST, "call", "AssertionError", "assert False")
    under_fault = Outcome(failures=[failure], injected=True)
    assert judge(made, under_fault, Outcome(passed=[TEST])).problem is None
    for clean in (Outcome(failures=[failure]), Outcome(), Outcome(broken="died")):
        assert "without the fault" in (judge(made, under_fault, clean).problem or "")
