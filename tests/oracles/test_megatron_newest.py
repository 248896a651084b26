"""The newest megatron-core builds the same models: tests/engines/test_megatron_model.py has the installed one's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.megatron_checkpoints import LAYOUTS, built, check_computed, check_files, computed, run
from tests.oracles.environments import HERE, packages

pytestmark = pytest.mark.oracle

SOME = {
    "one": LAYOUTS["one"] | {"cases": ["llama-tied", "mimo", "glm4_moe", "deepseek_v3", "deepseek_v3-yarn"]},
    "tp2-sp": LAYOUTS["tp2-sp"] | {"cases": ["deepseek_v3"]},
    "pp2-vp2": LAYOUTS["pp2-vp2"],
    "ep2": LAYOUTS["ep2"] | {"cases": ["glm4_moe"]},
}


@pytest.fixture(scope="module")
def folder(oracle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = run(tmp_path_factory.mktemp("newest"), SOME, packages(oracle("megatron_newest")))
    assert f"megatron-core=={(folder / 'version').read_text()}" in (HERE / "megatron_newest.txt").read_text()
    return folder


@pytest.mark.parametrize(("layout", "case"), built(SOME))
def test_every_bit_of_the_files_returns(folder: Path, layout: str, case: str) -> None:
    check_files(folder, layout, case)


@pytest.mark.parametrize(("layout", "case"), computed(SOME))
def test_logits_and_gradients_of_trunk_and_depths(folder: Path, layout: str, case: str) -> None:
    check_computed(folder, layout, case)
