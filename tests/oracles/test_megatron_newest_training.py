"""The newest megatron-core trains as the torch engine does: some of tests/engines/test_megatron_engine.py with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.oracles.environments import packages

pytestmark = pytest.mark.oracle

ROOT = Path(__file__).parent.parent.parent
SOME = ("TP2", "PP2, tied", "CP2", "DP2, distributed optimizer, heads", "EP2", "TP2 x PP2, recompute")


def test_trains_as_the_torch_engine_does(oracle: Callable[[str], Path]) -> None:
    """Its packages stand before those of this environment, in a run of the tests of its own."""
    path = os.pathsep.join([str(packages(oracle("megatron_newest"))), str(ROOT)])
    tests = [f"tests/engines/test_megatron_engine.py::test_trains_as_the_torch_engine_does[{name}]" for name in SOME]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "FORERUN_TEST_MEGATRON": "0.19"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(SOME)} passed" in done.stdout
