"""`model.attn_implementation`: it reaches the model, what cannot be is refused before, and the planner heeds it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import forerun
from forerun.config import SFTConfig
from forerun.config_file import load_config
from forerun.errors import UsageError
from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier
from forerun.planner.from_config import job_of
from forerun.planner.memory import torch_peaks
from forerun.trainers.setup import load_model
from tests.families.tiny import tiny_trunk


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    attach(tiny_trunk("attached")).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def config(directory: Path, *more: str) -> SFTConfig:
    return load_config(SFTConfig, None, [f"model.path={directory}", "data.train_files=[given]", *more])


@pytest.mark.parametrize("meta", [False, True])
def test_it_reaches_trunk_and_block(directory: Path, meta: bool) -> None:
    made = config(directory, "model.attn_implementation=eager", "mtp.enable=true")
    assert forerun.load(directory).config._attn_implementation == "sdpa"
    model = forerun.load(directory, attn_implementation="eager", meta=True) if meta else None
    model = model or load_model(made.model, made.mtp, torch.device("cpu"))
    assert isinstance(model, MTPCarrier)
    attentions = [m for m in model.modules() if hasattr(m, "q_proj")]
    assert len(attentions) == 3 and {m.config._attn_implementation for m in attentions} == {"eager"}


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
@pytest.mark.parametrize("name", ["flash_attention_2", "nonsense"])
def test_what_is_not_here_is_named(directory: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"^attn_implementation={name}: "):
        forerun.load(directory, attn_implementation=name)


def test_a_model_that_is_wrong_otherwise_is_not_put_down_to_it(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 3}))
    with pytest.raises(UsageError, match=r"^transformers cannot load .*attention heads"):
        forerun.load(directory, attn_implementation="eager")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ([], "bfloat16"),
        (["engine.strategy=megatron"], "engine.strategy=megatron"),
        (["engine.context_parallel_size=2", "engine.param_dtype=bfloat16"], "engine.context_parallel_size"),
    ],
)
def test_what_contradicts_is_refused(directory: Path, more: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        config(directory, "model.attn_implementation=flash_attention_2", *more)


def test_it_is_a_setting_of_its_own(directory: Path) -> None:
    config(directory, "model.attn_implementation=flash_attention_2", "engine.autocast=bfloat16")
    with pytest.raises(UsageError, match=r"set model\.attn_implementation"):
        forerun.load(directory, override_config={"attn_implementation": "eager"})


def test_flash_attention_holds_no_mask(directory: Path) -> None:
    peaks = {}
    for name in ("sdpa", "flash_attention_2"):
        made = config(
            directory, f"model.attn_implementation={name}", "engine.autocast=bfloat16", "data.max_length=4096"
        )
        run = job_of(made, None).run
        peaks[name] = max(peak.total for peak in torch_peaks(run))
    assert peaks["sdpa"] - peaks["flash_attention_2"] > 4096**2 * 2
