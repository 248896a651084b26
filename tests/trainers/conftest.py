"""A tiny checkpoint on disk, one thread for tiny models, and the fixtures of the oracles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.oracles.conftest import oracle, vllm_env  # noqa: F401
from tests.trainers.tiny import make_model, make_tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    make_model().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads only get in each other's way in models this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
