"""Phase 4: GRPO on verifiable tasks with speculative rollouts; the head learns along and is synced each time."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from forerun.config import ModelConfig, OptimConfig, RLConfig, RolloutConfig, TrainerConfig
from forerun.data.sources import load_source
from forerun.demo.workspace import Workspace, mtp_config
from forerun.engines.torch_engine import TorchEngine
from forerun.rollout.native.engine import NativeEngine
from forerun.trainers.rl import RLTrainer
from forerun.trainers.setup import engine_config

CONTEXT = 512
PER_STEP = (
    "reward_mean",
    "acceptance_length",
    "spec_num_draft_tokens",
    "spec_num_accepted_tokens",
    "spec_num_verify_steps",
    "log_prob_gap_mean",
    "log_prob_gap_max",
    "drafter_in_sync",
    "mtp/depth_1/trunk_top1",
    "time/rollout",
    "time/train",
    "time/sync",
)


def train_policy(workspace: Workspace) -> dict[str, Any]:
    """Some GRPO steps; the figures of each."""
    sizes, seed = workspace.sizes, workspace.options.seed
    config = RLConfig(
        model=ModelConfig(path=str(workspace.model_dir)),
        optim=OptimConfig(lr=2e-6, mtp_lr=1e-4),
        mtp=mtp_config(),
        rollout=RolloutConfig(n=sizes.rl_samples, temperature=1.0, max_response_length=sizes.rl_tokens),
        trainer=TrainerConfig(
            total_steps=sizes.rl_steps, output_dir=str(workspace.out / "rl"), seed=seed, save_freq=1, save_total_limit=1
        ),
        train_batch_size=sizes.rl_prompts,
        ppo_mini_batch_size=sizes.rl_prompts,
        micro_batch_size=sizes.rl_samples,
    )
    prompts = load_source("arithmetic", "train", sizes.rl_prompts * sizes.rl_steps, seed=seed)
    model = workspace.drafting_model()
    rollout = NativeEngine(
        model, num_speculative_tokens=1, draft_vocabulary=workspace.draft_vocabulary, max_model_len=CONTEXT, seed=seed
    )
    engine = TorchEngine(model, engine_config(config.engine, config.optim, config.mtp, sizes.rl_steps))
    # save_freq: an interrupted phase goes on from its last step.
    trainer = RLTrainer(config, prompts=prompts, engine=engine, rollout=rollout, tokenizer=workspace.tokenizer)
    trainer.train()
    logged = _logged(workspace.out / "rl" / "metrics.jsonl")
    last = sizes.rl_steps
    return {
        "drafter_in_sync_every_step": all(logged[step]["drafter_in_sync"] == 1.0 for step in range(1, last + 1)),
        "alarms": len(trainer.alarms.raised),
        "steps": {f"step_{step}": {name: logged[step].get(name) for name in PER_STEP} for step in range(1, last + 1)},
    }


def _logged(path: Path) -> dict[int, dict[str, Any]]:
    """Metrics by step; a step that a resumed run did again counts as it was done last."""
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a line that a killed run left torn
            row = json.loads(line)
            rows[row["step"]] = row
    return rows
