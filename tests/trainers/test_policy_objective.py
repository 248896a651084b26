"""The RL objective over the micro-batches of a step against a loop over its responses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from forerun.algorithms.aggregation import LossAggMode
from forerun.config_algorithm import AlgorithmConfig, RolloutCorrectionConfig
from forerun.data.batch import Batch
from forerun.data.chat import response_document
from forerun.data.packing import pack
from forerun.engines.accumulation import main_loss, merge_metrics, predicted_mask
from forerun.trainers.policy_objective import PolicyObjective

RESPONSES = [(3, 5, 0.7), (2, 1, -1.1), (4, 8, 0.2), (1, 3, -0.4)]  # prompt tokens, answer tokens, advantage
LONGEST = 9


def micro_batches(size: int) -> list[Batch]:
    documents = [
        response_document([1] * prompt, [2] * answer, {"advantages": advantage, "rollout_log_probs": -1.0})
        for prompt, answer, advantage in RESPONSES
    ]
    return [batch for at in range(0, 4, size) for batch in pack(documents[at : at + size], 20, size)]


def by_hand(mode: str) -> float:
    """On policy, a token's loss is minus its advantage."""
    sums = [-advantage * answer for _, answer, advantage in RESPONSES]
    if mode == "token-mean":
        return sum(sums) / sum(answer for _, answer, _ in RESPONSES)
    if mode == "token-sum":
        return sum(sums)
    if mode == "seq-mean-token-mean":
        return sum(-advantage for *_, advantage in RESPONSES) / len(RESPONSES)
    return sum(sums) / len(RESPONSES) / (LONGEST if mode == "seq-mean-token-sum-norm" else 1)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_the_step_s_loss_is_the_mean_that_was_asked_for(mode: LossAggMode, size: int) -> None:
    batches = micro_batches(size)
    objective = PolicyObjective(batches, AlgorithmConfig(loss_agg_mode=mode), LONGEST)
    sums: dict[str, float] = {}
    for batch in batches:
        log_probs: Tensor = torch.where(predicted_mask(batch), -1.0, 0.0).double()
        loss, metrics = objective(log_probs, batch)
        merge_metrics(sums, {"loss": loss, **metrics})
    assert sums["loss"] == pytest.approx(by_hand(mode), rel=1e-6)
    assert objective.figures(sums)["log_prob_gap_max"] == 0 and sums.keys() == {"loss"}


@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_truncated_responses_leave_loss_and_counts(mode: LossAggMode) -> None:
    """As if they had not been sampled, whatever shares their micro-batches."""
    whole = micro_batches(2)
    cut = [(answer in (1, 8)) for _, answer, _ in RESPONSES]  # the second and the third
    for number, batch in enumerate(whole):
        flags = torch.zeros_like(batch.input_ids)
        for document in range(2):
            flags[(batch.document_ids == document) & batch.loss_mask] = int(cut[2 * number + document])
        batch.extras["truncated"] = flags
    kept = [r for r, gone in zip(RESPONSES, cut, strict=True) if not gone]
    alone = [
        batch
        for prompt, answer, advantage in kept
        for batch in pack(
            [response_document([1] * prompt, [2] * answer, {"advantages": advantage, "rollout_log_probs": -1.0})], 20, 1
        )
    ]
    losses = []
    for batches, masked in ((whole, True), (alone, False)):
        algorithm = AlgorithmConfig(loss_agg_mode=mode, mask_truncated_completions=masked)
        objective = PolicyObjective(batches, algorithm, LONGEST)
        losses.append(sum(float(objective(torch.full(b.input_ids.shape, -1.0).double(), b)[0]) for b in batches))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9) and losses[0] != 0


# Every response with log-probs of its own under the four policies: drawn once, the same in any split.
POLICIES = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs")
DRAWN = [
    {
        **{name: (-2 * torch.rand(answer, generator=draw, dtype=torch.float64)).tolist() for name in POLICIES},
        "entropies": [0.5 + i / answer for i in range(answer)],
    }
    for draw in [torch.Generator().manual_seed(4)]
    for _, answer, _ in RESPONSES
]
FULL = AlgorithmConfig(
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    clip_ratio_c=1.4,
    loss_scale_factor=7.0,
    use_kl_loss=True,
    kl_loss_coef=0.3,
    kl_loss_type="low_var_kl",
    entropy_coeff=0.2,
    rollout_correction=RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_threshold="1.6", rollout_rs="token_k1", rollout_rs_threshold="0.4_2.5"
    ),
)


def full_by_hand(mode: str) -> tuple[float, float, float, int]:
    """(policy loss, KL, entropy, tokens kept): off policy, with dual clip, sequence weights and rejected tokens."""
    losses, kls, entropies = [], [], []
    for (_, answer, advantage), drawn in zip(RESPONSES, DRAWN, strict=True):
        new, old, ref, rollout = (drawn[name] for name in POLICIES)
        weight = min(math.exp(sum(o - r for o, r in zip(old, rollout, strict=True))), 1.6)
        losses.append([])
        kls.append([])
        entropies.append([])
        for i in range(answer):
            if not 0.4 <= math.exp(rollout[i] - old[i]) <= 2.5:
                continue
            ratio = math.exp(new[i] - old[i])
            loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.28))
            if advantage < 0:
                loss = min(loss, -advantage * 1.4)
            losses[-1].append(loss * weight)
            kls[-1].append(math.exp(ref[i] - new[i]) - 1 - (ref[i] - new[i]))
            entropies[-1].append(drawn["entropies"][i])

    def mean(parts: list[list[float]]) -> float:
        parts = [part for part in parts if part]
        total = sum(map(sum, parts))
        return {
            "token-sum": total,
            "token-mean": total / sum(map(len, parts)),
            "seq-mean-token-sum": total / len(parts),
            "seq-mean-token-sum-norm": total / len(parts) / 7.0,
            "seq-mean-token-mean": sum(sum(part) / len(part) for part in parts) / len(parts),
        }[mode]

    return mean(losses), mean(kls), mean(entropies), sum(map(len, losses))


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_with_everything_at_once_it_is_still_the_mean_over_the_step(mode: LossAggMode, size: int) -> None:
    documents = [
        response_document([1] * prompt, [2] * answer, {"advantages": advantage} | drawn)
        for (prompt, answer, advantage), drawn in zip(RESPONSES, DRAWN, strict=True)
    ]
    batches = [batch for at in range(0, 4, size) for batch in pack(documents[at : at + size], 20, size)]
    objective = PolicyObjective(batches, replace(FULL, loss_agg_mode=mode), LONGEST)
    main = main_loss(objective, objective.entropy_loss_fn)
    sums: dict[str, float] = {}
    for batch in batches:
        entropies = torch.where(predicted_mask(batch), batch.extras["entropies"], math.nan)
        loss, metrics = main(batch.extras["log_probs"].double(), entropies, batch)
        merge_metrics(sums, {**metrics, "loss": loss})
    clipped, clipped_lower = (sums[f"policy_stats/{name}"] for name in ("clipped", "clipped_lower"))
    figures = objective.figures(sums)
    policy, kl, entropy, kept = full_by_hand(mode)
    tokens = sum(answer for _, answer, _ in RESPONSES)
    assert sums.pop("target_count") == tokens and math.isnan(sums.pop("entropy_sum"))
    terms = {"pg_loss": policy, "kl_loss": kl, "entropy_loss": entropy}
    assert sums == pytest.approx({"loss": policy + 0.3 * kl - 0.2 * entropy, **terms}, rel=1e-5)
    assert figures["rollout_rs_masked_fraction"] == pytest.approx(1 - kept / tokens)
    assert 0 < kept < tokens and clipped and clipped_lower
    assert figures["pg_clipfrac"] == pytest.approx(clipped / kept)
