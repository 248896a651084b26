"""What becomes of an output directory that an earlier run has used, or that cannot be one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.config import SFTConfig
from forerun.config_file import load_config
from forerun.engines.checkpoint_directory import STATE_FILE, checkpoints, prune_checkpoints, whole_directory
from forerun.errors import ForerunError, UsageError
from forerun.trainers.setup import RunDirectory
from forerun.trainers.sft import SFTTrainer


@pytest.fixture
def settings(tmp_path: Path, checkpoint: Path) -> list[str]:
    rows = [{"prompt": f"say {w} b", "response": f" {w} b "} for w in "abcdefgh"]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        f"model.path={checkpoint}",
        f"data.train_files=[{tmp_path / 'train.jsonl'}]",
        "data.max_length=16",
        f"trainer.output_dir={tmp_path / 'run'}",
        "trainer.logger=[jsonl]",
        "trainer.total_steps=2",
        "train_batch_size=2",
        "mtp.enable=true",
        "mtp.enable_train=true",
    ]


def train(settings: list[str], *more: str) -> None:
    SFTTrainer(load_config(SFTConfig, None, [*settings, *more])).train()


@pytest.mark.parametrize(
    "other",
    [["mtp.num_layers=2"], ["mtp.enable=false", "mtp.enable_train=false"], ["freeze_trunk=true"]],
    ids=["deeper", "no block", "frozen"],
)
def test_a_run_with_other_settings_is_refused_and_leaves_everything(settings: list[str], other: list[str]) -> None:
    train(settings)
    run = Path(settings[3].partition("=")[2])
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ForerunError, match=r"cannot resume from .*checkpoint-2: .*another trainer\.output_dir"):
        train(settings, *other, "trainer.total_steps=4")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == kept


@pytest.mark.parametrize("content", ["{}", '{"global_step": 2}', "{", "[]"])
def test_a_damaged_state_file_is_named(settings: list[str], content: str) -> None:
    train(settings)
    (newest,) = checkpoints(Path(settings[3].partition("=")[2]))
    (newest / "trainer_state.json").write_text(content)
    with pytest.raises(ForerunError, match="checkpoint-2 cannot be read"):
        train(settings, "trainer.total_steps=4")


@pytest.mark.parametrize("below", ["", "/deeper/run"])
def test_a_file_in_place_of_the_directory_is_found_at_once(settings: list[str], tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match="is a file, name a directory"):
        SFTTrainer(load_config(SFTConfig, None, [*settings, f"trainer.output_dir={tmp_path / 'file'}{below}"]))
    assert (tmp_path / "file").read_text() == "kept"


def test_what_a_killed_save_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    for name in (".checkpoint-4.unfinished", "..checkpoint-4.unfinished.x1y2.partial", ".checkpoint-4.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    with whole_directory(tmp_path / "checkpoint-4") as unfinished:
        (unfinished / "done").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert [path.name for path in (tmp_path / "checkpoint-4").iterdir()] == ["done"]


def test_what_a_killed_deletion_left_goes_with_the_next(tmp_path: Path) -> None:
    for name in (".checkpoint-1.deleted", "checkpoint-2", "checkpoint-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / STATE_FILE).write_text("{}")
    prune_checkpoints(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_what_a_killed_export_left_goes_with_the_next(settings: list[str]) -> None:
    run = Path(settings[3].partition("=")[2])
    (run / ".model.x1y2.partial").mkdir(parents=True)
    (run / ".model.x1y2.partial" / "model.safetensors").write_bytes(b"half")
    train(settings)
    assert not list(run.glob(".*"))


def test_a_second_run_at_the_same_time_is_refused_and_one_that_follows_is_not(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save, refused = RunDirectory.save, []

    def meanwhile(run: RunDirectory, *arguments: Any) -> Path:
        found = save(run, *arguments)
        with pytest.raises(UsageError, match="another run is at work there: wait for its end"):
            train(settings, "trainer.total_steps=3")
        refused.append(found)
        return found

    run = Path(settings[3].partition("=")[2])
    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "save", meanwhile)
        patched.setattr("forerun.trainers.setup.LOCK_PATIENCE_S", 0.3)
        train(settings)
    assert refused == checkpoints(run) == [run / "checkpoint-2"]
    train(settings, "trainer.total_steps=3")
    assert [path.name for path in checkpoints(run)] == ["checkpoint-2", "checkpoint-3"]
