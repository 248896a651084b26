"""Isolation in every entry path, parameter by parameter: joint, heads, frozen; one depth and two.

An entry path is a way in which this repository lets an MTP loss into a training step. Each is run on a model with a
block and on the same model without one; what it leaves on every parameter at the first optimizer step, before any
clipping, is compared. The last test finds the places in the source that train a block and fails for one that no path
here runs.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import forerun
from forerun import MTPConfig, attach
from forerun.config import SFTConfig
from forerun.config_file import load_config
from forerun.data.batch import Batch
from forerun.data.packing import Document
from forerun.demo.head import _restricted_loss
from forerun.engines.hidden_cache import HiddenCache
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.families import ATTACHED
from forerun.models.carrier import MTPCarrier
from forerun.models.training import mtp_forward
from forerun.models.trunk import base_model
from forerun.mtp.graft import graft
from forerun.mtp.shift import document_ids
from forerun.trainers.batching import Rows, micro_batches
from forerun.trainers.hf_callback import MTPCallback
from forerun.trainers.rl import RLTrainer
from forerun.trainers.sft import SFTTrainer
from tests.trainers import tiny_rl
from tests.trainers.tiny import make_model, make_tokenizer

Gradients = dict[str, Tensor | None]
EntryPath = Callable[[PreTrainedModel, bool, Path], Gradients]
VOCAB = make_model().config.vocab_size
# Rows whose prompts are no targets, of uneven lengths.
ROWS = [[2 + (start + j) % (VOCAB - 2) for j in range(6 + start % 5)] for start in range(8)]


def gradients(model: PreTrainedModel) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def batch() -> tuple[Tensor, Tensor]:
    """Token ids and labels, [8, 6]."""
    ids = torch.tensor([row[:6] for row in ROWS])
    return ids, ids.masked_fill(torch.arange(6) < 2, -100)


def main_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


# ---- the paths: train `model` for one step and say what reached its parameters


def model_forward(model: PreTrainedModel, frozen: bool, folder: Path) -> Gradients:
    ids, labels = batch()
    model.train()
    model(input_ids=ids, labels=labels).loss.backward()
    return gradients(model)


def model_forward_with_a_loss_of_the_callers(model: PreTrainedModel, frozen: bool, folder: Path) -> Gradients:
    ids, labels = batch()
    model.train()
    main_loss(model(input_ids=ids, labels=labels).logits, labels).backward()
    return gradients(model)


def model_forward_with_recompute(model: PreTrainedModel, frozen: bool, folder: Path) -> Gradients:
    model.activation_checkpointing_enable()
    return model_forward(model, frozen, folder)


def mtp_forward_and_graft(model: PreTrainedModel, frozen: bool, folder: Path) -> Gradients:
    """As a training loop of one's own does it."""
    ids, labels = batch()
    model.train()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = base_model(model)(input_ids=ids, use_cache=False).last_hidden_state
    if isinstance(model, MTPCarrier):
        output = mtp_forward(
            model,
            hidden,
            input_ids=ids,
            position_ids=positions,
            document_ids=document_ids(positions),
            loss_mask=labels != -100,
        )
        hidden = graft(hidden, output.loss)
    main_loss(model.get_output_embeddings()(hidden), labels).backward()
    return gradients(model)


class Spy(TorchEngine):
    """Keeps the gradients of the first optimizer step."""

    first: Gradients | None = None

    def step(self) -> dict[str, float]:
        if self.first is None:
            self.first = gradients(self.model)
        return super().step()

    @property
    def seen(self) -> Gradients:
        assert self.first is not None
        return self.first


def spy(model: PreTrainedModel, frozen: bool, **objects: Any) -> Spy:
    return Spy(model, TorchEngineConfig(train_trunk=not frozen), **objects)


def documents() -> list[Document]:
    return [Document(row, [j >= 2 for j in range(len(row))]) for row in ROWS]


class MeanLoss:
    def __init__(self, batches: list[Batch]) -> None:
        self.targets = sum(b.num_targets for b in batches)

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return -log_probs.sum() / self.targets, {}


def run_engine(engine: Spy) -> Gradients:
    batches = micro_batches(Rows(documents(), max_length=24, packing=True), 2)
    engine.evaluate(batches)  # must leave nothing behind
    engine.forward_backward(batches, MeanLoss(batches))
    engine.step()
    return engine.seen


def torch_engine(model: PreTrainedModel, frozen: bool, folder: Path) -> Gradients:
    return run_engine(spy(model, frozen))


def torch_engine_on_kept_hiddens(model: PreTrainedModel, frozen: bool, folder: Path) -> Gradients:
    return run_engine(spy(model, frozen, hidden_cache=HiddenCache() if frozen else None))


def torch_engine_on_a_draft_vocabulary(model: PreTrainedModel, frozen: bool, folder: Path) -> Gradients:
    """The demo's objective: a soft loss over the words that will be drafted."""
    if isinstance(model, MTPCarrier):
        model.mtp_config.loss = "soft_ce"
    return run_engine(spy(model, frozen, mtp_loss=functools.partial(_restricted_loss, torch.arange(2, VOCAB))))


def forerun_sft(model: PreTrainedModel, frozen: bool, folder: Path) -> Gradients:
    engine = spy(model, frozen)
    mtp = ["mtp.enable=true", "mtp.enable_train=true"] if isinstance(model, MTPCarrier) else []
    settings = [
        "model.path=given",
        "data.train_files=[given]",
        f"trainer.output_dir={folder / 'run'}",
        "trainer.logger=[jsonl]",
        "trainer.total_steps=1",
        "data.max_length=24",
        "train_batch_size=2",
        "micro_batch_size=1",
        f"freeze_trunk={frozen}",
        *mtp,
    ]
    SFTTrainer(load_config(SFTConfig, None, settings), documents=documents(), engine=engine).train()
    return engine.seen


def forerun_rl(model: PreTrainedModel, frozen: bool, folder: Path) -> Gradients:
    engine = spy(model, frozen)
    mtp = ["mtp.enable=true", "mtp.enable_train=true"] if isinstance(model, MTPCarrier) else []
    trainer = RLTrainer(
        tiny_rl.settings(folder, *mtp),
        prompts=tiny_rl.PROMPTS,
        engine=engine,
        rollout=tiny_rl.PlainRollout(model),
        reward=tiny_rl.ShareOfWord(),
        tokenizer=make_tokenizer(),
    )
    trainer.step(tiny_rl.PROMPTS)
    return engine.seen


class SpyCallback(TrainerCallback):
    def __init__(self) -> None:
        self.first: Gradients | None = None

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        if self.first is None:
            self.first = gradients(model)


ARGUMENTS = {
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.0,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "seed": 0,
    "disable_tqdm": True,
}


def labelled() -> list[dict[str, list[int]]]:
    return [{"input_ids": row, "labels": [-100, -100, *row[2:]]} for row in ROWS]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 1, "labels": -100}
    made = {n: torch.tensor([r[n] + [f] * (width - len(r[n])) for r in rows]) for n, f in fill.items()}
    real = [[1] * len(r["input_ids"]) + [0] * (width - len(r["input_ids"])) for r in rows]
    return made | {"attention_mask": torch.tensor(real)}


def train_with(trainer: Trainer) -> Gradients:
    if isinstance(trainer.model, MTPCarrier):
        trainer.add_callback(MTPCallback())
    watch = SpyCallback()
    trainer.add_callback(watch)  # after the one that puts the block's gradients back
    trainer.train()
    assert watch.first is not None
    return watch.first


def hf_trainer(model: PreTrainedModel, frozen: bool, folder: Path) -> Gradients:
    arguments = TrainingArguments(output_dir=str(folder), **ARGUMENTS)
    return train_with(Trainer(model=model, args=arguments, train_dataset=labelled(), data_collator=collate))


def trl_sft_trainer(model: PreTrainedModel, frozen: bool, folder: Path) -> Gradients:
    from trl import SFTConfig as TRLConfig
    from trl import SFTTrainer as TRLTrainer

    arguments = TRLConfig(output_dir=str(folder), max_length=32, bf16=False, packing=False, **ARGUMENTS)
    data = Dataset.from_list(labelled())
    return train_with(TRLTrainer(model=model, args=arguments, train_dataset=data, processing_class=make_tokenizer()))


ENTRY_PATHS: list[EntryPath] = [
    model_forward,
    model_forward_with_a_loss_of_the_callers,
    model_forward_with_recompute,
    mtp_forward_and_graft,
    torch_engine,
    torch_engine_on_kept_hiddens,
    torch_engine_on_a_draft_vocabulary,
    forerun_sft,
    forerun_rl,
    hf_trainer,
    trl_sft_trainer,
]


# ---- isolation


def trunk(tied: bool) -> PreTrainedModel:
    return make_model(seed=1, tie_word_embeddings=tied).double()


@functools.cache
def without_mtp(path: EntryPath, tied: bool) -> Gradients:
    with TemporaryDirectory() as folder:
        return path(trunk(tied), False, Path(folder))


def with_mtp(path: EntryPath, depths: int, isolation: str, folder: Path) -> Gradients:
    """Tied at one depth; untied at two, and the block takes the hidden from before the trunk's final norm."""
    mtp = MTPConfig(enable=True, enable_train=True, num_layers=depths, detach_encoder=isolation != "joint")
    family = replace(ATTACHED, trunk_hidden="post_norm" if depths == 1 else "pre_norm")
    model = attach(trunk(tied=depths == 1), mtp, init="plain", family=family).double()
    if isolation == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("mtp."))
    return path(model, isolation == "frozen", folder)


def assert_block_learns(found: Gradients) -> None:
    block = {name: grad for name, grad in found.items() if name.startswith("mtp.")}
    assert block
    for name, grad in block.items():
        assert grad is not None and grad.abs().sum() > 0, f"{name} learns nothing"


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("path", ENTRY_PATHS)
def test_joint_reaches_every_parameter(path: EntryPath, depths: int, tmp_path: Path) -> None:
    found = with_mtp(path, depths, "joint", tmp_path)
    assert_block_learns(found)
    for name, alone in without_mtp(path, tied=depths == 1).items():
        assert alone is not None and not torch.equal(found[name], alone), f"the MTP loss does not reach {name}"


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("path", ENTRY_PATHS)
def test_heads_leaves_every_gradient_of_the_trunk_bit_identical(path: EntryPath, depths: int, tmp_path: Path) -> None:
    found = with_mtp(path, depths, "heads", tmp_path)
    assert_block_learns(found)
    for name, alone in without_mtp(path, tied=depths == 1).items():
        assert alone is not None and torch.equal(found[name], alone), f"the MTP loss reaches {name}"


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("path", ENTRY_PATHS)
def test_frozen_trains_the_block_alone_as_heads_does(path: EntryPath, depths: int, tmp_path: Path) -> None:
    found = with_mtp(path, depths, "frozen", tmp_path / "frozen")
    assert_block_learns(found)
    heads = with_mtp(path, depths, "heads", tmp_path / "heads")
    for name, grad in found.items():
        if name.startswith("mtp."):
            torch.testing.assert_close(grad, heads[name], rtol=1e-6, atol=1e-12, msg=name)
        else:
            assert grad is None, f"{name} has a gradient"


def closed_form_start(folder: Path, depths: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before and after `forerun sft` fits a new block to its rows; a step of 1e-30 moves nothing."""
    (folder / "model").mkdir(parents=True)
    trunk(tied=False).float().save_pretrained(folder / "model")
    settings = [
        f"model.path={folder / 'model'}",
        "data.train_files=[given]",
        f"trainer.output_dir={folder / 'run'}",
        "trainer.logger=[jsonl]",
        "trainer.total_steps=1",
        "data.max_length=24",
        "optim.lr=1e-30",
        "mtp.enable=true",
        "mtp.enable_train=true",
        f"mtp.num_layers={depths}",
        "mtp_init=fit",
    ]
    made = SFTTrainer(load_config(SFTConfig, None, settings), documents=documents(), tokenizer=make_tokenizer())
    before = {name: p.detach().clone() for name, p in made.engine.model.named_parameters()}
    made.train()
    return before, {name: p.detach() for name, p in made.engine.model.named_parameters()}


@pytest.mark.parametrize("depths", [1, 2])
def test_the_closed_form_start_changes_the_block_alone(depths: int, tmp_path: Path) -> None:
    before, after = closed_form_start(tmp_path, depths)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {f"mtp.layers.{k}.proj.weight" for k in range(depths)} <= changed
    assert all(name.startswith("mtp.") for name in changed)


def attach_fitted() -> MTPCarrier:
    return attach(trunk(tied=False), MTPConfig(enable=True), fit_to=[torch.tensor([row[:6] for row in ROWS])])


def test_so_does_the_one_that_attach_makes() -> None:
    fitted, before = attach_fitted(), dict(trunk(tied=False).named_parameters())
    unfitted = attach(trunk(tied=False), MTPConfig(enable=True))
    assert not torch.equal(fitted.mtp.layer(1).proj.weight, unfitted.mtp.layer(1).proj.weight)
    for name, parameter in fitted.named_parameters():
        assert parameter.grad is None
        assert name.startswith("mtp.") or torch.equal(parameter, before[name]), name


# ---- the list of paths is whole

# What lets a loss into a training step, or sets a block's weights.
WATCHED = {"mtp_forward", "graft", "mtp_loss", "mtp_loss_scale", "fused_loss", "backward", "fit_projection"}
WATCHED |= {"fit_new_head", "default_mtp_loss"}
SOURCE = Path(forerun.__file__).parent
# These hold no gradient, hand on what a path above runs but need the demo's model, or run in ranks elsewhere.
NOT_RUN = {
    (
        "engines/megatron/engine.py",
        "MegatronEngine._schedule",
    ): "tests/engines/test_megatron_engine.py, its heads cases",
    ("planner/megatron_memory.py", "megatron_peaks"): "adds bytes up",
    ("planner/memory.py", "torch_peaks"): "adds bytes up",
    ("planner/traffic.py", "_fsdp"): "adds bytes up",
    ("demo/head.py", "train_head.<locals>.initialise"): "closed_form_start runs fit_new_head",
    ("planner/acceptance.py", "measure_acceptance"): "measures, under no_grad",
}


def watched(name: str) -> bool:
    return name in WATCHED or "forward_backward" in name


class Sites(ast.NodeVisitor):
    """(qualified name of the function, watched name) for every use of a watched name in a module."""

    def __init__(self) -> None:
        self.scope: list[str] = []
        self.found: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scope += [node.name, "<locals>"]
        self.generic_visit(node)
        del self.scope[-2:]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        self.generic_visit(node)
        del self.scope[-1:]

    def use(self, name: str) -> None:
        if watched(name) and "<locals>" in self.scope:
            self.found.add(".".join(self.scope[:-1]))

    def visit_Name(self, node: ast.Name) -> None:
        self.use(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.use(node.attr)
        self.generic_visit(node)


def sites() -> set[tuple[str, str]]:
    found = set()
    for file in sorted(SOURCE.rglob("*.py")):
        visitor = Sites()
        visitor.visit(ast.parse(file.read_text()))
        found |= {(str(file.relative_to(SOURCE)), name) for name in visitor.found}
    return found


def test_every_place_that_trains_a_block_is_run_by_a_path(tmp_path: Path) -> None:
    ran: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            ran.add((str(Path(code.co_filename).relative_to(SOURCE)), code.co_qualname))

    sys.setprofile(note)
    try:
        for path in ENTRY_PATHS:
            with_mtp(path, 1, "heads", tmp_path / path.__name__)
        closed_form_start(tmp_path / "closed_form", 1)
        attach_fitted()
    finally:
        sys.setprofile(None)
    expected = sites()
    assert ("models/carrier.py", "_grafted") in expected and ("engines/forward.py", "default_mtp_loss") in expected
    missing = expected - ran - NOT_RUN.keys()
    assert not missing, f"no entry path of this file runs {sorted(missing)}: add one to ENTRY_PATHS"
    assert NOT_RUN.keys() <= expected, "NOT_RUN names a place that is gone"
