"""Fixtures of the oracles, for engines that run in an environment of their own."""

from tests.oracles.conftest import oracle, vllm_env  # noqa: F401
