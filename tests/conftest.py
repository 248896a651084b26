"""What every test runs under: no network for model hubs, one seed, messages that do not depend on the terminal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mtp.ranks import Ranks

# Before any test module imports transformers or datasets, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("COLUMNS", "120")
# A shell's background job starts with SIGINT ignored, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch

    monkeypatch.delenv("FORERUN_TRACEBACK", raising=False)
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory; for tests with the marker `model`."""
    from forerun.data.gguf import smollm2

    return smollm2()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes, and gloo groups of two and four of them."""
    from tests.mtp.ranks import Ranks

    with Ranks(4, [2, 4], tmp_path_factory.mktemp("ranks") / "store") as made:
        yield made
