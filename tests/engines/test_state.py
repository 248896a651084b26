"""Resume state on disk: replaced whole or not at all, and for the parameters that were trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from forerun.engines.checkpoint_directory import whole_directory
from forerun.engines.random_state import random_state, write_random_state
from forerun.engines.ranks import RankGroup
from forerun.engines.state import (
    SavedState,
    optimizer_targets,
    optimizer_tensors,
    restore_optimizer,
    state_document,
    write_state,
)
from forerun.errors import ForerunError


def test_a_checkpoint_being_replaced_is_never_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between the two renames: the old one is put back, at once or, after a kill, by the next save."""
    target = tmp_path / "checkpoint-1"

    def write(text: str) -> None:
        with whole_directory(target) as unfinished:
            (unfinished / "file").write_text(text)

    write("old")
    rename = Path.rename

    def interrupted(self: Path, to: Path) -> Path:
        if self.name.endswith(".unfinished"):
            raise KeyboardInterrupt
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write("new")
    assert (target / "file").read_text() == "old"

    target.rename(tmp_path / ".checkpoint-1.replaced")
    with pytest.raises(ForerunError, match="free some space"), whole_directory(target) as unfinished:
        (unfinished / "file").write_text("half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    assert (target / "file").read_text() == "old"
    write("new")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert (target / "file").read_text() == "new"


@pytest.mark.parametrize("there", ["link", "dangling link", "file"])
def test_what_has_a_checkpoint_s_name_is_replaced_and_gone(there: str, tmp_path: Path) -> None:
    """A checkpoint that was moved to another disk, for instance. Left under another name it would come back."""
    target, elsewhere = tmp_path / "run" / "checkpoint-1", tmp_path / "elsewhere"
    target.parent.mkdir()
    if there == "file":
        target.write_text("old")
    else:
        target.symlink_to(elsewhere)
    if there == "link":
        elsewhere.mkdir()
        (elsewhere / "file").write_text("old")
    with whole_directory(target) as unfinished:
        (unfinished / "file").write_text("new")
    assert [path.name for path in target.parent.iterdir()] == ["checkpoint-1"] and not target.is_symlink()
    assert (target / "file").read_text() == "new"
    assert there != "link" or (elsewhere / "file").read_text() == "old"


def adam(model: nn.Module) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def test_a_parameter_that_never_had_a_gradient_does_not_stop_a_resume(tmp_path: Path) -> None:
    """An expert of a mixture that no token has reached yet, for instance; nor does a save before the first step."""
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    optimizer, schedule = adam(model)
    named, alone = dict(model.named_parameters()), RankGroup()

    def saved() -> SavedState:
        document = state_document(optimizer, schedule, named, 1, {"place": 7})
        weights = {name: parameter.detach() for name, parameter in named.items()}
        with whole_directory(tmp_path / "checkpoint-1") as unfinished:
            write_state(unfinished, weights, optimizer_tensors(optimizer, named), random_state(), document, alone)
        return SavedState(tmp_path / "checkpoint-1", alone)

    assert saved().moments == {}
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = saved()
    assert (state.document["global_step"], state.document["extra"]) == (1, {"place": 7})
    targets = optimizer_targets(named, state.moments)
    state.read({}, targets)
    again, _ = adam(model)
    restore_optimizer(again, named, targets)
    assert {id(p) for p in again.state} == {id(p) for p in model["used"].parameters()}
    expected = optimizer_tensors(optimizer, named)
    assert len(expected) == 6 and all(torch.equal(expected[name], found) for name, found in targets.items())
    with pytest.raises(ForerunError, match=r"without training new\.weight"):
        state.check_trained(named | {"new.weight": nn.Parameter(torch.ones(2))})


def test_a_rank_s_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The others hear this line, and see another disk."""
    (tmp_path / "random" / "00001.safetensors").mkdir(parents=True)
    with pytest.raises(ForerunError, match=r"cannot write .*random/00001.safetensors: "):
        write_random_state(tmp_path, 1, random_state())
