"""docs/migrating.md names settings that exist: ours and TRL's here, verl's and Megatron-LM's in their environments."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from forerun.config import RLConfig, SFTConfig
from tests.oracles.environments import packages

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|(.*)\|$", re.MULTILINE)


def rows(section: str) -> list[tuple[str, str]]:
    """(theirs, ours) of a section's table, and of the names that a row says go likewise."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = ROW.findall(text)
    assert len(found) == text.count("\n| `") and found
    pairs = []
    for theirs, ours, differs in found:
        pairs.append((theirs, ours))
        for name in re.findall(r"`([a-z_.]+)`", differs.partition("likewise")[2]):
            pairs.append((_beside(theirs, name), _beside(ours, name)))
    return pairs


def _beside(key: str, name: str) -> str:
    """The name in the key's section."""
    section, dot, _ = key.rpartition(".")
    return section + dot + name


def has(config: Any, key: str) -> bool:
    """Whether a nested mapping or dataclass has the dotted key."""
    for name in key.split("."):
        config = config if isinstance(config, dict) else {}
        if name not in config:
            return False
        config = config[name]
    return True


@pytest.mark.parametrize("section", ["verl", "TRL", "Megatron-LM"])
def test_our_names_exist(section: str) -> None:
    ours = [OmegaConf.to_container(OmegaConf.structured(config)) for config in (RLConfig, SFTConfig)]
    missing = [key for _, key in rows(section) if not any(has(config, key) for config in ours)]
    assert not missing


def test_trls_names_exist() -> None:
    from trl import GRPOConfig
    from trl import SFTConfig as TRLConfig

    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert {name for name, _ in rows("TRL")} <= theirs
    assert {"max_length", "packing", "num_train_epochs", "assistant_only_loss"} <= {
        field.name for field in dataclasses.fields(TRLConfig)
    }


@pytest.mark.oracle
def test_verls_names_exist(verl_env: Path) -> None:
    folder = packages(verl_env) / "verl" / "trainer" / "config"
    theirs = [yaml.safe_load((folder / f"_generated_ppo_{kind}trainer.yaml").read_text()) for kind in ("", "megatron_")]
    assert not [key for key, _ in rows("verl") if not any(has(config, key) for config in theirs)]


@pytest.mark.oracle
def test_megatrons_arguments_exist(oracle: Callable[[str], Path]) -> None:
    folder = packages(oracle("megatron_newest")) / "megatron"
    files = [*(folder / "training").rglob("*.py"), *(folder / "core").glob("*.py")]
    files.append(folder / "core" / "transformer" / "transformer_config.py")
    text = "\n".join(file.read_text() for file in files)
    for argument, _ in rows("Megatron-LM"):
        name = argument.removeprefix("--").replace("-", "_")
        assert argument in text or f"    {name}: " in text, argument
