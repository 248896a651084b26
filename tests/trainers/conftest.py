"""A tiny checkpoint on disk, one thread for tiny models, and the fixtures of the oracles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import _one_thread  # noqa: F401
from tests.oracles.conftest import oracle, vllm_env  # noqa: F401
from tests.trainers.tiny import make_model, make_tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    make_model().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose `checkpoint` is the tiny model of RL runs, with its tokenizer."""
    path = tmp_path_factory.mktemp("rl")
    make_model().save_pretrained(path / "checkpoint")
    make_tokenizer().save_pretrained(path / "checkpoint")
    return path
