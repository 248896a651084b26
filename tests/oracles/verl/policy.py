"""verl's advantages, policy losses, KL, entropy, rollout correction, overlong reward and loss aggregation.

Runs in verl's environment: see tests/oracles/exchange.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from verl import DataProto
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_grpo_outcome_advantage,
    compute_policy_loss_gspo,
    compute_policy_loss_vanilla,
    compute_rewards,
    compute_rloo_outcome_advantage,
    kl_penalty,
)
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.config import ActorConfig
from verl.workers.reward_manager.dapo import DAPORewardManager

POLICY_LOSSES = {"vanilla": compute_policy_loss_vanilla, "gspo": compute_policy_loss_gspo}


def overlong(max_response_length: int, buffer: dict[str, object]) -> torch.Tensor:
    """The DAPO reward manager's reward of each row: a score of 0.25, and the penalty on a response of that length."""
    lengths = torch.arange(1, max_response_length + 1)
    responses = torch.zeros(len(lengths), max_response_length, dtype=torch.long)
    attention = torch.arange(max_response_length)[None] < lengths[:, None]
    batch = {
        "prompts": torch.zeros(len(lengths), 1, dtype=torch.long),
        "responses": responses,
        "attention_mask": torch.cat([torch.ones(len(lengths), 1, dtype=torch.bool), attention], dim=1).long(),
    }
    data = DataProto.from_dict(
        tensors=batch,
        non_tensors={
            "reward_model": [{"ground_truth": "x"} for _ in lengths],
            "data_source": ["here" for _ in lengths],
            "extra_info": [{} for _ in lengths],
        },
    )
    manager = DAPORewardManager(
        tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: "text", eos_token="</s>"),
        num_examine=0,
        compute_score=lambda data_source, solution_str, ground_truth, extra_info: {"score": 0.25},
        max_resp_len=max_response_length,
        overlong_buffer_cfg=SimpleNamespace(**buffer),
    )
    return manager(data).sum(dim=-1)


def main(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    given = load_file(folder / "given.safetensors")
    answer: dict[str, torch.Tensor] = {}
    for normalize in (True, False):
        advantages, _ = compute_grpo_outcome_advantage(
            given["rewards"].clone(), given["mask"], given["group_ids"].numpy(), norm_adv_by_std_in_grpo=normalize
        )
        answer[f"advantages {normalize}"] = advantages
    answer["advantages rloo"], _ = compute_rloo_outcome_advantage(
        given["rewards"].clone(), given["mask"], given["group_ids"].numpy()
    )
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
        loss, metrics = POLICY_LOSSES[case["loss_mode"]](
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
        # As verl/workers/utils/losses.py, ppo_loss, has it of the logits that an engine divided by the temperature.
        logits = given["logits"].detach().requires_grad_()
        entropies = entropy_from_logits(logits / settings["temperature"])
        entropy = agg_loss(entropies, given["mask"], mode, **settings["global_batch_info"])
        (answer[f"entropy {mode} gradient"],) = torch.autograd.grad(entropy, logits)
        answer[f"entropy {mode}"] = entropy.detach()
    for kind in settings["kl"]:
        log_probs = given["log_probs"].detach().requires_grad_()
        kl = kl_penalty(log_probs, given["old_log_probs"], kind)
        (answer[f"kl {kind} gradient"],) = torch.autograd.grad(kl.sum(), log_probs)
        answer[f"kl {kind}"] = kl.detach()
    answer["rewards less kl"] = compute_rewards(
        given["rewards"], given["log_probs"].detach(), given["old_log_probs"], kl_ratio=0.5
    )
    for name, case in settings["corrections"].items():
        weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
            given["old_log_probs"], given["rollout_log_probs"], given["mask"], **case
        )
        answer[f"{name} mask"] = mask
        if weights is not None:
            answer[f"{name} weights"] = weights.batch["rollout_is_weights"]
        if case["rollout_rs"] is not None:
            answer[f"{name} rejected"] = torch.tensor(metrics["rollout_corr/rollout_rs_masked_fraction"])
    for name, case in settings["overlong"].items():
        answer[f"overlong {name}"] = overlong(**case)
    save_file({name: tensor.contiguous() for name, tensor in answer.items()}, folder / "answer.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
