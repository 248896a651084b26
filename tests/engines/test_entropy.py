"""The entropy term of the policy loss, against every document's own logits in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.algorithms.aggregation import LossAggMode
from forerun.config_algorithm import AlgorithmConfig
from forerun.data.batch import Batch
from forerun.data.packing import Document
from forerun.engines.accumulation import predicted_mask
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.models.attach import attach
from forerun.mtp.config import MTPConfig
from forerun.trainers.batching import Rows, micro_batches
from forerun.trainers.policy_objective import PolicyObjective
from tests.families.tiny import VOCAB, tiny_trunk

TEMPERATURE, COEFFICIENT, LONGEST = 0.7, 0.3, 13.0


def documents() -> list[Document]:
    """Of uneven lengths and masks, so that every kind of mean differs from the others."""
    draw = torch.Generator().manual_seed(1)
    return [
        Document(torch.randint(0, VOCAB, (length,), generator=draw).tolist(), [j >= prompt for j in range(length)])
        for length, prompt in ((19, 3), (5, 1), (11, 8), (14, 2), (4, 1))
    ]


def rows(packing: bool, size: int) -> list[Batch]:
    """With no advantage and nothing else to learn from, so that the loss is the entropy's term alone."""
    return [
        replace(
            b, extras={"advantages": torch.zeros(b.input_ids.shape), "rollout_log_probs": -predicted_mask(b).float()}
        )
        for b in micro_batches(Rows(documents(), 24, packing), size)
    ]


def trunk(tied: bool) -> PreTrainedModel:
    return tiny_trunk("attached", dtype=torch.float64, seed=0, tie_word_embeddings=tied).train()


def expected(model: PreTrainedModel, mode: str) -> tuple[float, dict[str, Tensor]]:
    """The aggregated entropy, and the gradient of -COEFFICIENT times it, a document at a time."""
    spreads = []
    for document in documents():
        logits = model(input_ids=torch.tensor([list(document.token_ids)])).logits[0] / TEMPERATURE
        p = logits.exp() / logits.exp().sum(-1, keepdim=True)
        entropies = -(p * p.log()).sum(-1)
        spreads.append(torch.stack([entropies[j - 1] for j in range(1, len(document)) if document.loss_mask[j]]))
    total = torch.cat(spreads).sum()
    entropy = {
        "token-mean": total / sum(map(len, spreads)),
        "token-sum": total,
        "seq-mean-token-mean": torch.stack([spread.mean() for spread in spreads]).mean(),
        "seq-mean-token-sum": total / len(spreads),
        "seq-mean-token-sum-norm": total / len(spreads) / LONGEST,
    }[mode]
    (-COEFFICIENT * entropy).backward()
    return float(entropy.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def found(
    model: PreTrainedModel, batches: list[Batch], mode: LossAggMode, coefficient: float = COEFFICIENT
) -> tuple[dict[str, float], dict[str, Tensor]]:
    engine = TorchEngine(model, TorchEngineConfig(chunk_size=5))
    algorithm = AlgorithmConfig(loss_agg_mode=mode, entropy_coeff=coefficient, loss_scale_factor=LONGEST)
    objective = PolicyObjective(batches, algorithm, 20)
    metrics = engine.forward_backward(batches, objective, TEMPERATURE, objective.entropy_loss_fn)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return metrics, gradients


@pytest.mark.parametrize(("mode", "tied"), [*((mode, True) for mode in get_args(LossAggMode)), ("token-mean", False)])
def test_value_and_gradient(mode: LossAggMode, tied: bool) -> None:
    entropy, gradient = expected(trunk(tied), mode)
    for batches in (rows(True, 8), rows(True, 1), rows(False, 2)):
        metrics, ours = found(trunk(tied), batches, mode)
        assert metrics["entropy_loss"] == pytest.approx(entropy, rel=1e-6)
        assert metrics["loss"] == pytest.approx(-COEFFICIENT * entropy, rel=1e-6) and metrics["pg_loss"] == 0
        assert ours.keys() == gradient.keys()
        for name in gradient:
            torch.testing.assert_close(ours[name], gradient[name], rtol=1e-5, atol=1e-8, msg=name)


def test_an_isolated_mtp_loss_and_the_entropy_leave_each_other_alone() -> None:
    def carrier() -> PreTrainedModel:
        mtp = MTPConfig(enable=True, enable_train=True, detach_encoder=True, mtp_loss_scaling_factor=0.5)
        return attach(trunk(tied=True), mtp, init="plain").double()

    batches = rows(True, 2)
    _, both = found(carrier(), batches, "token-mean")
    _, entropy = found(trunk(tied=True), batches, "token-mean")
    metrics, mtp = found(carrier(), batches, "token-mean", coefficient=0.0)
    assert "entropy_loss" not in metrics and metrics["entropy_sum"] > 0
    for name, gradient in both.items():
        assert torch.equal(gradient, mtp[name] if name.startswith("mtp.") else entropy[name]), name
        assert name.startswith("mtp.") or not mtp[name].any()
