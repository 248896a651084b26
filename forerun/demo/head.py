"""Phases 1 and 2: attach a head, then teach it to foresee what the trunk would write."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forerun.config import DataConfig, EngineConfig, ModelConfig, OptimConfig, SFTConfig, TrainerConfig
from forerun.data.batch import Batch
from forerun.demo import self_text
from forerun.demo.precision import fastest_autocast
from forerun.demo.workspace import Workspace, mtp_config
from forerun.engines.hidden_cache import HiddenCache
from forerun.engines.torch_engine import TorchEngine, default_mtp_loss
from forerun.models.carrier import MTPCarrier
from forerun.models.training import MTPOutput
from forerun.mtp.shift import depth_counts
from forerun.trainers.batching import Rows
from forerun.trainers.head_init import fit_new_head
from forerun.trainers.setup import engine_config
from forerun.trainers.sft import SFTTrainer

ROW_LENGTH = 448
ROWS_PER_STEP = 1
AGREEMENT = "mtp/depth_1/trunk_top1"
EXPECTED = "mtp/depth_1/expected_acceptance"


def load_and_attach(workspace: Workspace) -> dict[str, Any]:
    """Load the trunk and attach a head; what they weigh."""
    model = workspace.attached_model()
    head = sum(p.numel() for p in model.mtp.parameters())
    trunk = sum(p.numel() for p in model.parameters()) - head
    print(f"trunk {trunk / 1e6:.1f} M parameters, MTP head {head / 1e6:.1f} M, layout {model.mtp_family.name}")
    return {
        "model": str(workspace.model_dir),
        "architecture": type(model).__name__,
        "trunk_parameters": trunk,
        "mtp_parameters": head,
        "mtp_layers": len(model.mtp.layers),
        "family": model.mtp_family.name,
    }


def train_head(workspace: Workspace) -> dict[str, Any]:
    """Fit the projection in closed form, then train the head; held-out agreement before, between and after."""
    vocabulary = workspace.draft_vocabulary
    held_out = self_text.by_source(workspace.held_out_text)
    model = workspace.attached_model()
    autocast = fastest_autocast(model)
    config = SFTConfig(
        model=ModelConfig(path=str(workspace.model_dir)),
        data=DataConfig(max_length=ROW_LENGTH),
        # Without enough warm-up, Adam's first steps throw the fitted start away.
        optim=OptimConfig(lr=workspace.sizes.lr, betas=(0.9, 0.95), lr_scheduler_type="linear", warmup_ratio=0.05),
        mtp=mtp_config(),
        trainer=TrainerConfig(
            output_dir=str(workspace.out / "sft"), seed=workspace.options.seed, save_freq=250, save_total_limit=1
        ),
        engine=EngineConfig(autocast=autocast),
        total_epochs=workspace.sizes.epochs,
        train_batch_size=ROWS_PER_STEP,
        micro_batch_size=ROWS_PER_STEP,
        freeze_trunk=True,
        cache_hiddens=True,
    )
    # Built by hand rather than by the trainer, for an objective of its own.
    documents = [response.document(prompt_too=True) for response in workspace.train_text]
    rows = Rows(documents, ROW_LENGTH, packing=True)
    total_steps = math.ceil(workspace.sizes.epochs * len(rows) / ROWS_PER_STEP)
    engine = TorchEngine(
        model,
        engine_config(config.engine, config.optim, config.mtp, total_steps, train_trunk=False),
        partial(_restricted_loss, vocabulary),
        HiddenCache(),
    )
    before: dict[str, float] = {}
    after_fit: dict[str, float] = {}

    def initialise(model: MTPCarrier, rows: Sequence[Batch]) -> None:
        before.update(trainer.evaluate())
        fit_new_head(engine, rows, workspace.sizes.fit_tokens)
        after_fit.update(trainer.evaluate())

    trainer = SFTTrainer(
        config,
        documents=documents,
        eval_documents=held_out,
        engine=engine,
        tokenizer=workspace.tokenizer,
        initialise=initialise,
    )
    after = trainer.train()
    weights = {name: _targets(rows) for name, rows in trainer.eval_rows.items()}
    return {
        "train_tokens": sum(map(len, workspace.train_text)),
        "held_out_tokens": sum(map(len, workspace.held_out_text)),
        "steps": trainer.total_steps,
        "autocast": autocast,
        "draft_vocabulary": len(vocabulary),
        "draft_vocabulary_coverage": self_text.coverage(workspace.held_out_text, vocabulary),
        "held_out_acceptance": {
            stage: _by_source(figures, weights)
            for stage, figures in (("attached", before), ("fitted", after_fit), ("trained", after))
            if figures
        },
    }


def _restricted_loss(
    vocabulary: Tensor,
    model: MTPCarrier,
    hidden_states: Tensor,
    batch: Batch,
    counts: Sequence[int] | None,
    *,
    temperature: float = 1.0,
    compare_with_trunk: bool = False,
) -> MTPOutput:
    """Train on the words that will be drafted; judge against the whole vocabulary."""
    return default_mtp_loss(
        model,
        hidden_states,
        batch,
        counts,
        temperature=temperature,
        compare_with_trunk=compare_with_trunk,
        vocabulary=vocabulary if torch.is_grad_enabled() else None,
    )


def _targets(rows: Sequence[Batch]) -> int:
    return sum(depth_counts(row.document_ids, row.loss_mask, 1)[0] for row in rows)


def _by_source(figures: Mapping[str, float], weights: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Agreement and expected acceptance of each source, and of all weighted by their tokens."""
    found: dict[str, dict[str, float]] = {}
    for label, key in (("top1_agreement", AGREEMENT), ("expected_acceptance", EXPECTED)):
        for source, weight in weights.items():
            if not weight:  # too short for a draft
                continue
            value = figures[f"{source}/{key}"]
            found.setdefault(source, {})[label] = value
            found.setdefault("all", {}).setdefault(label, 0.0)
            found["all"][label] += value * weight / sum(weights.values())
    return found
