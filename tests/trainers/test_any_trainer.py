"""The unmodified Hugging Face Trainer and TRL's SFTTrainer train an attached model, and their own save is complete."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

from forerun import MTPConfig, attach, load
from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier
from forerun.trainers.hf_callback import MTPCallback
from tests.models.tiny import VOCAB, tiny_model

STEPS = 16


def rows() -> list[dict[str, list[int]]]:
    """Sequences that count upwards: easily learned, at uneven lengths, with a prompt that is not a target."""
    made = []
    for start in range(24):
        ids = [1 + (start + j) % (VOCAB - 1) for j in range(6 + start % 5)]
        made.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return made


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in batch)

    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([v + [fill] * (width - len(v)) for v in values])

    return {
        "input_ids": padded([r["input_ids"] for r in batch], 0),
        "labels": padded([r["labels"] for r in batch], -100),
        "attention_mask": padded([[1] * len(r["input_ids"]) for r in batch], 0),
    }


ARGUMENTS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.05,  # always clips: the trunk's clip must not see the block's gradient
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "seed": 0,
    "disable_tqdm": True,
}


def hf_trainer(model: PreTrainedModel, out: Path, callbacks: list) -> Trainer:
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(out), **ARGUMENTS),
        train_dataset=rows(),
        data_collator=collate,
        callbacks=callbacks,
    )


def trl_trainer(model: PreTrainedModel, out: Path, callbacks: list) -> Trainer:
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    vocabulary = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), pad_token="t0", eos_token="t1"
    )
    return SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=str(out), max_length=32, bf16=False, packing=False, **ARGUMENTS),
        train_dataset=Dataset.from_list(rows()),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


TRAINERS = [hf_trainer, trl_trainer]
Make = Callable[[PreTrainedModel, Path, list], Trainer]


def attached(detach: bool = True) -> MTPCarrier:
    mtp = MTPConfig(enable=True, enable_train=True, detach_encoder=detach)
    return attach(tiny_model(tied=False, dtype=torch.float32), mtp, init="plain")


@pytest.mark.parametrize("make", TRAINERS)
def test_the_loss_falls_the_head_moves_and_the_trunk_learns_as_without_mtp(make: Make, tmp_path: Path) -> None:
    plain = tiny_model(tied=False, dtype=torch.float32)
    make(plain, tmp_path / "plain", []).train()

    model = attached()
    head_before = copy.deepcopy(model.mtp.state_dict())
    trainer = make(model, tmp_path / "out", [MTPCallback(max_grad_norm=1.0)])
    trainer.train()

    losses = [e["mtp/depth_1/loss"] for e in trainer.state.log_history if "mtp/depth_1/loss" in e]
    assert len(losses) == STEPS
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert all(not torch.equal(head_before[n], t) for n, t in model.mtp.state_dict().items())
    trained = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(trained[name], parameter), name

    trainer.save_model(str(tmp_path / "saved"))
    again = load(tmp_path / "saved")
    assert isinstance(again, MTPCarrier)
    for (name, ours), (other, theirs) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == other and torch.equal(ours, theirs), name


@pytest.mark.parametrize("make", TRAINERS)
def test_joint_training_changes_the_trunk(make: Make, tmp_path: Path) -> None:
    results = []
    for detach in (True, False):
        model = attached(detach)
        make(model, tmp_path / str(detach), [MTPCallback()]).train()
        results.append(model.get_input_embeddings().weight.detach().clone())
    assert not torch.equal(*results)


@pytest.mark.parametrize("make", TRAINERS)
def test_it_trains_without_the_callback_too(make: Make, tmp_path: Path) -> None:
    model = attached()
    before = model.mtp.layers[0].proj.weight.detach().clone()
    make(model, tmp_path, []).train()
    assert not torch.equal(before, model.mtp.layers[0].proj.weight)


@pytest.mark.parametrize("make", TRAINERS)
def test_checkpoints_of_the_trainer_resume(make: Make, tmp_path: Path) -> None:
    """A run that is cut and resumed from Trainer's own checkpoint ends where an uncut one does."""
    whole = attached()
    make(whole, tmp_path / "whole", [MTPCallback()]).train()

    cut = make(attached(), tmp_path / "cut", [MTPCallback()])
    cut.args.save_strategy, cut.args.save_steps = "steps", STEPS // 2
    cut.train()
    resumed_model = attached()
    resumed = make(resumed_model, tmp_path / "cut", [MTPCallback()])
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{STEPS // 2}"))
    for (name, expected), parameter in zip(whole.named_parameters(), resumed_model.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0, msg=name)


def test_the_callback_refuses_a_plain_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="attach"):
        hf_trainer(tiny_model(dtype=torch.float32), tmp_path, [MTPCallback()]).train()


def test_the_callback_refuses_ranks_that_hold_parts_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, callback = attached(), MTPCallback()
    trainer = hf_trainer(model, tmp_path, [callback])
    monkeypatch.setattr(trainer.args, "_n_gpu", 2)
    with pytest.raises(UsageError, match="not train on 2 GPUs in one process: start it with torchrun"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=model)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as accelerate launch does
    with pytest.raises(UsageError, match="not under fsdp: forerun sft trains with FSDP2"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=model)
    monkeypatch.undo()
    monkeypatch.setattr(trainer.args, "deepspeed", {"zero_optimization": {"stage": 2}})
    with pytest.raises(UsageError, match="not under deepspeed"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=model)
