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
