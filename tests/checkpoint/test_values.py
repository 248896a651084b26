"""What the values of a head give away: zeros, NaN, first values, copies that are none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun import MTPConfig, attach
from forerun.checkpoint.values import statistics
from tests.checkpoint.checkpoints import PROJ, edit, edit_config, look, make, only_problem
from tests.models.tiny import tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("whole") / "one", kind="qwen2")


@pytest.fixture
def path(tmp_path: Path, whole: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "one")


@pytest.mark.parametrize("shape", [(3, 5), (7,), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    monkeypatch.setattr("forerun.checkpoint.values._ELEMENTS_AT_ONCE", 4)
    tensor = (torch.randn(shape) + 0.5).to(dtype)
    found, exact = statistics(tensor), tensor.double()
    assert found.elements == tensor.numel() and found.dimensions == tensor.dim() and found.finite
    assert found.mean == pytest.approx(float(exact.mean())) and found.std == pytest.approx(
        float(exact.std(correction=0)), abs=1e-9
    )
    assert (found.smallest, found.largest) == (float(exact.min()), float(exact.max()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite(path: Path, bad: float) -> None:
    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[PROJ][3, 4] = bad
        return tensors

    edit(path, spoil)
    problem = only_problem(path)
    assert (problem.kind, problem.tensors) == ("non_finite", (PROJ,))
    assert look(path).tensors[PROJ].states == ["non_finite"]
    assert look(path, values=False).healthy


def test_all_zero(path: Path) -> None:
    """Fault 15's face in a file: memory that was never written."""
    norm = "model.mtp_layers.0.hidden_layernorm.weight"
    edit(path, lambda tensors: tensors | {n: torch.zeros_like(tensors[n]) for n in (PROJ, norm)})
    problem = only_problem(path)
    assert problem.kind == "all_zero" and set(problem.tensors) == {PROJ, norm}


def test_zero_biases_are_no_fault(path: Path) -> None:
    """A head on a trunk without biases is exported to MiMo's layout with biases of zero."""
    edit(path, lambda tensors: {n: torch.zeros_like(t) if n.endswith("bias") else t for n, t in tensors.items()})
    assert look(path).healthy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_untouched_random(tmp_path: Path, dtype: torch.dtype) -> None:
    model = attach(tiny_model(dtype=dtype), MTPConfig(enable=True, num_layers=2), init="plain")
    model.save_pretrained(tmp_path / "out")
    found = look(tmp_path / "out")
    assert [p.kind for p in found.problems] == ["untouched", "untouched"]
    assert "MTP layer 0 looks never trained" in found.problems[0].message
    with torch.no_grad():  # one step of one matrix of the second layer, as after training
        model.mtp.layers[1].proj.weight.add_(torch.randn(16, 32, dtype=dtype) * 0.2)
    model.save_pretrained(tmp_path / "out")
    assert [p.message for p in look(tmp_path / "out").problems] == [found.problems[0].message]


def test_untouched_start_of_attach(tmp_path: Path) -> None:
    attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True)).save_pretrained(tmp_path / "out")
    problems = look(tmp_path / "out").problems
    assert [p.kind for p in problems] == ["all_zero", "untouched"]  # its decoder layer starts silent
    assert problems[1].tensors == (PROJ,) and "as forerun.attach starts it" in problems[1].message


@pytest.mark.parametrize("difference", [0.0, 1.0])
def test_a_tied_model_with_another_head_in_its_files(path: Path, difference: float) -> None:
    embedding = "model.embed_tokens.weight"
    edit(path, lambda tensors: tensors | {"lm_head.weight": tensors[embedding] + difference})
    if difference:
        problem = only_problem(path)
        assert (problem.kind, problem.tensors) == ("tied_head_differs", ("lm_head.weight",))
    edit_config(path, tie_word_embeddings=not difference)
    assert look(path).healthy
