"""verl's advantages, policy loss and loss aggregation. Runs in verl's environment: see tests/oracles/exchange.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage, compute_policy_loss_vanilla
from verl.workers.config import ActorConfig


def main(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    given = load_file(folder / "given.safetensors")
    answer: dict[str, torch.Tensor] = {}
    for normalize in (True, False):
        advantages, _ = compute_grpo_outcome_advantage(
            given["rewards"], given["mask"], given["group_ids"].numpy(), norm_adv_by_std_in_grpo=normalize
        )
        answer[f"advantages {normalize}"] = advantages
    for name, case in settings["losses"].items():
        log_probs = given["log_probs"].requires_grad_()
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=case["clip_ratio_low"],
            clip_ratio_high=case["clip_ratio_high"],
            clip_ratio_c=case["clip_ratio_c"],
        )
        config.global_batch_info.update(case["global_batch_info"])
        loss, metrics = compute_policy_loss_vanilla(
            given["old_log_probs"],
            log_probs,
            given["advantages"],
            given["mask"],
            loss_agg_mode=case["loss_agg_mode"],
            config=config,
            rollout_is_weights=given["weights"] if case["weighted"] else None,
        )
        (answer[f"{name} gradient"],) = torch.autograd.grad(loss, log_probs)
        answer[f"{name} loss"] = loss.detach()
        answer[f"{name} metrics"] = torch.tensor(
            [metrics[f"actor/{key}"] for key in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")], dtype=torch.float64
        )
    for mode in settings["modes"]:
        # Half of the rows, as a micro-batch of the whole.
        rows = slice(0, len(given["mask"]) // 2)
        answer[f"part {mode}"] = agg_loss(
            given["advantages"][rows], given["mask"][rows], mode, **settings["global_batch_info"]
        )
    save_file({name: tensor.contiguous() for name, tensor in answer.items()}, folder / "answer.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
