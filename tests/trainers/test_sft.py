"""The SFT loop on a tiny checkpoint: what it learns, what isolation keeps, resume, refusals before loading."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import forerun
from forerun.cli import main
from forerun.config import SFTConfig
from forerun.config_file import load_config
from forerun.data.batch import Batch
from forerun.engines.checkpoint_directory import checkpoints
from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.trainers.alarms import AlarmError
from forerun.trainers.sft import SFTTrainer


def write_examples(path: Path, count: int, seed: int) -> Path:
    """`say x y z` is answered `x y z`: what follows can be known two tokens ahead."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        words = " ".join(draw.choices("abcdefgh", k=draw.randint(3, 6)))
        lines.append(json.dumps({"prompt": f"say {words}", "response": f" {words} "}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def settings(tmp_path: Path, checkpoint: Path) -> list[str]:
    return [
        f"model.path={checkpoint}",
        f"data.train_files=[{write_examples(tmp_path / 'train.jsonl', 60, seed=1)}]",
        f"data.val_files=[{write_examples(tmp_path / 'val.jsonl', 12, seed=2)}]",
        "data.max_length=48",
        f"trainer.output_dir={tmp_path / 'run'}",
        "trainer.logger=[jsonl]",
        "mtp.enable=true",
        "mtp.enable_train=true",
        "mtp.detach_encoder=true",
        "mtp.num_layers=2",
        "train_batch_size=4",
        "micro_batch_size=2",
        "optim.lr=1e-2",
    ]


def trainer(settings: list[str], *more: str, **objects: Any) -> SFTTrainer:
    return SFTTrainer(load_config(SFTConfig, None, [*settings, *more]), **objects)


def weights(made: SFTTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(made.engine.model)}


def lines(settings: list[str]) -> list[dict[str, Any]]:
    output = next(s.split("=", 1)[1] for s in settings if s.startswith("trainer.output_dir"))
    return [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_and_exports_what_it_learned(settings: list[str], tmp_path: Path) -> None:
    made = trainer(settings, "trainer.total_steps=30", "trainer.test_freq=10", "trainer.save_freq=10")
    made.train()
    logged = lines(settings)
    assert [line["step"] for line in logged] == list(range(31))
    first, last = logged[0], logged[-1]
    assert last["val/loss"] < first["val/loss"] - 0.3
    assert last["val/mtp/depth_1/loss"] < first["val/mtp/depth_1/loss"] - 0.3
    assert {"grad_norm", "mtp_grad_norm", "lr", "mtp/depth_2/loss", "tokens_per_second", "entropy"} <= last.keys()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-20", "checkpoint-30"]
    exported = forerun.load(tmp_path / "run" / "model")
    assert isinstance(exported, MTPCarrier)
    for name, tensor in named_weights(exported):
        assert torch.equal(tensor, weights(made)[name]), name
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_the_model_of_a_checkpoint_comes_out_and_what_is_missing_is_said(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(settings, "trainer.total_steps=1").train()
    run = tmp_path / "run"
    command = ["convert", str(run / "checkpoint-1"), str(tmp_path / "out"), "--to", "hf"]
    (run / "config.yaml").rename(tmp_path / "config.yaml")
    assert main(command) == 2 and "config.yaml is missing, which says what model" in capsys.readouterr().err
    # What the model does not depend on may be of the machine that trained.
    text = (tmp_path / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("output_dir: ", "output_dir: '' #"))
    assert main(command) == 0
    exported, found = (load_file(place / "model.safetensors") for place in (run / "model", tmp_path / "out"))
    assert exported.keys() == found.keys() and all(torch.equal(found[name], exported[name]) for name in found)
    state = json.loads((run / "checkpoint-1" / "trainer_state.json").read_text()) | {"layout": {}}
    (run / "checkpoint-1" / "trainer_state.json").write_text(json.dumps(state))
    assert main([*command[:2], str(tmp_path / "other"), *command[3:]]) == 2
    assert "holds Megatron's parts of a model: resume the run with trainer.total_steps" in capsys.readouterr().err


def test_held_out_figures_are_left_out_before_the_first_step(settings: list[str]) -> None:
    trainer(settings, "trainer.total_steps=1", "trainer.val_before_train=false").train()
    assert [line["step"] for line in lines(settings) if "val/loss" in line] == [1]


def test_text_is_trained_on(settings: list[str], tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "the sum of two and three is five"}\n' * 4)
    one_row = ["train_batch_size=1", "micro_batch_size=1", "trainer.total_steps=1"]
    made = trainer(settings, *one_row, f"data.train_files=[{path}]")
    made.train()
    # All but the first token, which nothing predicts.
    tokens = len(made.tokenizer("the sum of two and three is five")["input_ids"]) + 1
    assert lines(settings)[-1]["target_count"] == 4 * (tokens - 1)


def test_isolated_head_leaves_the_trunk_of_training_without_mtp(settings: list[str], tmp_path: Path) -> None:
    plain = trainer(
        settings,
        "mtp.enable=false",
        "mtp.enable_train=false",
        "trainer.total_steps=6",
        f"trainer.output_dir={tmp_path / 'plain'}",
    )
    isolated = trainer(settings, "trainer.total_steps=6")
    plain.train()
    isolated.train()
    with_head = weights(isolated)
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, with_head[name]), name


@pytest.mark.parametrize(("async_save", "last_step"), [("false", 6), ("true", 4)])
def test_an_interrupted_run_resumes_bit_identically(
    settings: list[str], tmp_path: Path, async_save: str, last_step: int
) -> None:
    """Also when that happens while the checkpoint is still being written: the run ends when it is there."""
    schedule = ["trainer.total_steps=9", "trainer.save_freq=4", f"trainer.async_save={async_save}"]
    schedule += ["optim.lr_scheduler_type=cosine", "optim.warmup_steps=2"]
    straight = trainer(settings, *schedule, f"trainer.output_dir={tmp_path / 'straight'}")
    straight.train()

    stopped = trainer(settings, *schedule)
    take = stopped.order.take

    def interrupted(count: int) -> list[int]:
        if stopped.engine.global_step == last_step:
            raise KeyboardInterrupt
        return take(count)

    stopped.order.take = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-4"]
    torch.manual_seed(99)
    resumed = trainer(settings, *schedule)
    resumed.train()
    assert [line["step"] for line in lines(settings)] == list(range(10))
    expected = weights(straight)
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(("total", "reached"), [(4, 3), (2, 2)], ids=["next save", "end"])
def test_a_save_beside_the_training_that_fails_stops_the_run(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, reached: int
) -> None:
    """At the next save, or at the end where there is none; what was saved before stays, and the run goes on from it."""
    schedule = [f"trainer.total_steps={total}", "trainer.save_freq=1", "trainer.async_save=true"]
    made, fsync = trainer(settings, *schedule), os.fsync

    def full_disk(handle: int) -> None:
        if "/.checkpoint-2.unfinished" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with (
        monkeypatch.context() as patched,
        pytest.raises(ForerunError, match=r"cannot write .*checkpoint-2.*: no space left"),
    ):
        patched.setattr(os, "fsync", full_disk)
        made.train()
    assert made.engine.global_step == reached
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-1"]
    trainer(settings, *schedule).train()
    assert [path.name for path in checkpoints(tmp_path / "run")] == [f"checkpoint-{n}" for n in (total - 1, total)]


def test_an_exported_model_starts_another_run(settings: list[str], tmp_path: Path) -> None:
    """With its weights and figures, whatever it was trained with before."""
    first = trainer(settings, "trainer.total_steps=2")
    figures = first.train()
    exported, output = f"model.path={tmp_path / 'run' / 'model'}", f"trainer.output_dir={tmp_path / 'next'}"
    second = trainer(settings, exported, output, "trainer.total_steps=1", "mtp_init=plain")
    expected = weights(first)
    assert weights(second).keys() == expected.keys()
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, expected[name]), name
    held_out = {name: value for name, value in figures.items() if name.startswith("val/")}
    assert held_out and second.evaluate() == held_out


def test_a_finished_run_started_again_gives_its_held_out_figures(settings: list[str]) -> None:
    first = trainer(settings, "trainer.total_steps=2").train()
    again = trainer(settings, "trainer.total_steps=2").train()
    held_out = {name: value for name, value in first.items() if name.startswith("val/")}
    assert held_out and again == held_out


def test_a_new_run_does_not_share_a_directory_with_an_earlier_ones_checkpoints(
    settings: list[str], tmp_path: Path
) -> None:
    trainer(settings, "trainer.total_steps=2").train()
    config = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(UsageError, match="earlier run's checkpoints"):
        trainer(settings, "trainer.total_steps=1", "trainer.resume=false").train()
    assert (tmp_path / "run" / "config.yaml").read_text() == config


@pytest.mark.parametrize("cached", [False, True])
def test_head_only_training_on_a_frozen_trunk(settings: list[str], cached: bool) -> None:
    made = trainer(
        settings,
        "freeze_trunk=true",
        f"cache_hiddens={str(cached).lower()}",
        "mtp.loss=soft_ce",
        "mtp_init=plain",  # the fit alone reaches what this trunk lets a head foresee
        "total_epochs=4",
    )
    before = weights(made)
    made.train()
    head = {name for name, _ in made.engine.drafter_weights()}
    after = weights(made)
    for name in before:
        assert torch.equal(before[name], after[name]) == (name not in head), name
    assert lines(settings)[-1]["val/mtp/depth_1/loss"] < lines(settings)[0]["val/mtp/depth_1/loss"]
    if cached:
        cache = made.engine.forward.hidden_cache
        assert cache is not None
        # Every row, held-out ones included, went through the trunk once.
        assert cache.misses == len(made.rows) + len(made.eval_rows["val"])
        assert cache.hits >= 3 * len(made.rows)


def test_initialisation_runs_once_and_not_on_resume(settings: list[str]) -> None:
    calls: list[int] = []

    def initialise(model: MTPCarrier, rows: Sequence[Batch]) -> None:
        calls.append(len(rows))
        torch.nn.init.zeros_(model.mtp.layers[0].proj.weight)

    trainer(settings, "trainer.total_steps=1", initialise=initialise).train()
    trainer(settings, "trainer.total_steps=2", initialise=initialise).train()
    assert len(calls) == 1


def test_a_new_head_starts_from_a_fit_of_every_depth(settings: list[str], tmp_path: Path) -> None:
    def start(init: str) -> dict[str, Any]:
        made = trainer(settings, "trainer.total_steps=1", f"mtp_init={init}", f"trainer.output_dir={tmp_path / init}")
        made.train()
        return json.loads((tmp_path / init / "metrics.jsonl").read_text().splitlines()[0])

    fitted, carried, random_ = start("fit"), start("carry"), start("plain")
    for depth in (1, 2):
        name = f"val/mtp/depth_{depth}/expected_acceptance"
        assert fitted[name] > max(carried[name], random_[name]), depth


def test_a_loss_above_a_uniform_guess_raises_the_alarm(settings: list[str]) -> None:
    untrained = ["mtp_init=plain", "mtp.mtp_loss_scaling_factor=0"]
    made = trainer(settings, "trainer.total_steps=40", "trainer.on_alarm=stop", *untrained)
    # A head whose output is a large constant: sure of one word, and wrong.
    with torch.no_grad():
        made.engine.model.mtp.layers[0].final_norm.weight.fill_(200.0)
    with pytest.raises(AlarmError, match="mtp_loss_above_uniform at step 21"):
        made.train()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.path=/nowhere", "not a directory"),
        ("data.train_files=[/nowhere.jsonl]", "no such file"),
        ("freeze_trunk=true mtp.enable_train=false", "nothing to train"),
        ("cache_hiddens=true", "freeze_trunk"),
        ("engine.device=abacus", "no device"),
        ("data.max_length=4", "more tokens than data.max_length=4"),
    ],
)
def test_bad_settings_are_refused_before_the_model_is_loaded(
    settings: list[str], change: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("forerun.trainers.sft.load_model", loaded)
    with pytest.raises(UsageError, match=message):
        trainer(settings, *change.split())


def test_data_without_targets_is_refused(settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UsageError, match="empty"):
        trainer(settings, f"data.train_files=[{tmp_path / 'empty.jsonl'}]")


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_document_past_the_context_is_refused(settings: list[str], tmp_path: Path, split: str) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "say " + "a " * 70, "response": " b "}))
    with pytest.raises(UsageError, match=r"73 tokens, more than the model's context of 64: set data\.max_length=64"):
        trainer(settings, "data.max_length=100", f"data.{split}_files=[{tmp_path / 'long.jsonl'}]")


def test_a_tokenizer_of_another_model_is_refused(settings: list[str], checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens([f"word{i}" for i in range(20)])
    tokenizer.save_pretrained(checkpoint)
    path = Path(settings[1].partition("=")[2].strip("[]"))
    path.write_text(path.read_text().replace(" a ", " word19 "))
    with pytest.raises(UsageError, match=r"token 31, and the model has only 12: .*tokenizer"):
        trainer(settings)


def test_resuming_with_other_data_is_refused(settings: list[str], tmp_path: Path) -> None:
    trainer(settings, "trainer.total_steps=1").train()
    write_examples(tmp_path / "train.jsonl", 20, seed=3)
    with pytest.raises(ForerunError, match="resume with the same data"):
        trainer(settings, "trainer.total_steps=2").train()
