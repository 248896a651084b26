"""The RL objective over the micro-batches of a step against a loop over its responses."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from forerun.algorithms.aggregation import LossAggMode
from forerun.config import AlgorithmConfig
from forerun.data.batch import Batch
from forerun.data.chat import response_document
from forerun.data.packing import pack
from forerun.engines.protocol import predicted_mask
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
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        log_probs: Tensor = torch.where(predicted_mask(batch), -1.0, 0.0).double()
        total += objective(log_probs, batch)[0]
    assert float(total) == pytest.approx(by_hand(mode), rel=1e-6)
    assert objective.figures()["log_prob_gap_max"] == 0
