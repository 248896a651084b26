"""Ways into a model's weights that do not complain by themselves: a lenient load_state_dict, a trunk filled up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import MTPConfig, attach, load
from forerun.errors import ForerunError
from tests.models.tiny import tiny_model


def test_a_lenient_load_state_dict_fills_the_block(tmp_path: Path) -> None:
    """Trainers resume with strict=False, which says nothing of names that match no parameter."""
    model, other = (
        attach(tiny_model(tied=False, dtype=torch.float32, seed=s), MTPConfig(enable=True), init="plain", seed=s)
        for s in (0, 1)
    )
    model.save_pretrained(tmp_path / "out")
    other.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=False)
    for name, parameter in model.mtp.named_parameters():
        assert torch.equal(other.mtp.get_parameter(name), parameter), name


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_missing_embedding_or_head_is_named(tmp_path: Path, name: str) -> None:
    """The block shares both with the trunk: random numbers there make every draft wrong."""
    attach(tiny_model(tied=False, dtype=torch.float32), MTPConfig(enable=True)).save_pretrained(tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    save_file({n: t for n, t in load_file(weights).items() if n != name}, weights, {"format": "pt"})
    with pytest.raises(ForerunError, match=f"lacks 1 of the trunk's weights, first {name}"):
        load(tmp_path / "out")
