"""Interpreters of the oracles' environments. Without one its tests skip, or fail where oracles are required."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.oracles.environments import OracleUnavailable, environment


def find_oracle(name: str, say: Callable[[str], None]) -> Path:
    """The interpreter of an oracle's environment; skips or fails the test where it cannot be had.

    Args:
        say: told when it is being built.
    """
    try:
        return environment(name, say)
    except OracleUnavailable as error:
        reason = f"the oracle {name} cannot be built here: {error}"
    if os.environ.get("FORERUN_REQUIRE_ORACLES") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def oracle(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """name -> the interpreter of that oracle's environment.

    With FORERUN_REQUIRE_ORACLES=1 in the environment an oracle that cannot be had fails its tests; else it skips them.
    """
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", flush=True)

    return lambda name: find_oracle(name, say)


@pytest.fixture(scope="session")
def megatron_env(oracle: Callable[[str], Path]) -> Path:
    """The interpreter that has megatron-core."""
    return oracle("megatron")


@pytest.fixture(scope="session")
def verl_env(oracle: Callable[[str], Path]) -> Path:
    """The interpreter that has verl."""
    return oracle("verl")


@pytest.fixture(scope="session")
def vllm_env(oracle: Callable[[str], Path]) -> Path:
    """The interpreter that has vLLM."""
    return oracle("vllm")
