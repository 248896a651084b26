"""megatron-core's GPTModel built from a Hugging Face checkpoint: every bit comes back, and it computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.megatron_checkpoints import (
    LAYOUTS,
    built,
    check_computed,
    check_files,
    check_named,
    computed,
    run,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("megatron"), LAYOUTS)


@pytest.mark.parametrize(("layout", "case"), built(LAYOUTS))
def test_every_bit_of_the_files_returns(folder: Path, layout: str, case: str) -> None:
    check_files(folder, layout, case)


@pytest.mark.parametrize(("layout", "case"), built(LAYOUTS))
def test_named_weights_are_the_torch_engines(folder: Path, layout: str, case: str) -> None:
    check_named(folder, layout, case)


@pytest.mark.parametrize(("layout", "case"), computed(LAYOUTS))
def test_logits_and_gradients_of_trunk_and_depths(folder: Path, layout: str, case: str) -> None:
    check_computed(folder, layout, case)
