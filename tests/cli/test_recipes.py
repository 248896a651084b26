"""The recipes that users copy: each loads, says what its name says, and its data is what its script makes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from forerun.config import RLConfig, SFTConfig
from forerun.config_file import load_config
from forerun.data.chat import read_examples
from forerun.data.prompts import read_prompts

RECIPES = Path(__file__).parents[2] / "recipes"


def kind(path: Path) -> type[SFTConfig] | type[RLConfig]:
    return {"sft": SFTConfig, "rl": RLConfig}[path.stem.split("_")[0]]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_loads_and_its_data_is_there(path: Path) -> None:
    config = load_config(kind(path), path)
    assert config.trainer.output_dir == f"runs/{path.stem}"
    assert config.data.train_files
    for name in config.data.train_files:
        read = read_examples if isinstance(config, SFTConfig) else read_prompts
        assert len(read(RECIPES.parent / name)) >= 64


def test_the_four_set_ups() -> None:
    def switches(name: str) -> tuple[bool, bool, bool, bool]:
        path = RECIPES / f"{name}.yaml"
        mtp = load_config(kind(path), path).mtp
        return mtp.enable, mtp.enable_train, mtp.detach_encoder, mtp.enable_rollout

    assert switches("sft_keep") == (True, False, False, False)
    assert switches("sft_joint") == (True, True, False, False)
    assert switches("sft_heads") == (True, True, True, False)
    assert switches("rl_speculative") == (True, True, True, True)


def test_the_data_is_what_its_script_makes(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    script = runpy.run_path(str(RECIPES / "data" / "make.py"))
    script["main"](tmp_path)
    for name in ("sft.jsonl", "rl.jsonl"):
        assert (tmp_path / name).read_bytes() == (RECIPES / "data" / name).read_bytes()
