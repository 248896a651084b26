"""The engine's counts and masks against counting by hand: which positions a step trains, and what it divides by."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from forerun.data.batch import Batch
from forerun.data.packing import Document
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig, default_mtp_loss
from forerun.models.attach import attach
from forerun.models.trunk import base_model
from forerun.mtp.config import MTPConfig
from forerun.trainers.batching import Rows, micro_batches
from tests.families.tiny import tiny_trunk

MASKS = ["0011101", "01", "1111", "000110111011", "011"]


def batches(micro_batch_size: int) -> list[Batch]:
    documents = [Document([1 + j for j in range(len(m))], [c == "1" for c in m]) for m in MASKS]
    return micro_batches(Rows(documents, max_length=14, packing=True), micro_batch_size)


def counted_by_hand(depth: int, rule: str) -> int:
    total = 0
    for mask in MASKS:
        for i in range(len(mask) - depth - 1):
            read = mask[i + depth + 1] if rule == "target" else mask[i + 1 : i + depth + 2]
            total += set(read) == {"1"}
    return total


def engine_with(rule: str = "target", **settings: bool) -> TorchEngine:
    mtp = MTPConfig(
        enable=True, enable_train=True, num_layers=2, detach_encoder=True, mask_rule=rule, mtp_loss_scaling_factor=0.3
    )  # type: ignore[arg-type]
    trunk = tiny_trunk("attached", dtype=torch.float64)
    return TorchEngine(attach(trunk, mtp, init="plain"), TorchEngineConfig(**settings))  # type: ignore[arg-type]


def next_token_loss(log_probs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    return -log_probs.sum(), {}


@pytest.mark.parametrize("rule", ["target", "span"])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_each_depth_is_the_mean_over_the_positions_counted_by_hand(rule: str, micro_batch_size: int) -> None:
    """Prompt tokens are no targets, spans are whole, and the loss is the one that the depths' figures add up to."""
    engine, split = engine_with(rule), batches(micro_batch_size)
    assert len(batches(1)) >= 2
    expected = [counted_by_hand(depth, rule) for depth in (1, 2)]
    assert counted_by_hand(1, "span") < counted_by_hand(1, "target")
    seen = torch.zeros(2)
    for batch in split:
        hidden_states = engine.trunk_hidden_states(batch)
        stats = default_mtp_loss(engine.model, hidden_states, batch, None).stats  # type: ignore[arg-type]
        seen += stats.sums[:, 0].float()  # the field "count" comes first
    assert seen.tolist() == expected
    figures = engine.forward_backward(split, next_token_loss)
    by_depth = [figures[f"mtp/depth_{depth}/loss"] for depth in (1, 2)]
    assert figures["mtp_loss"] == pytest.approx(0.3 / 2 * sum(by_depth), rel=1e-6)


@pytest.mark.parametrize("recompute", [True, False])
def test_recompute_runs_the_trunk_s_layers_again(recompute: bool) -> None:
    engine, split = engine_with(activation_recompute=recompute), batches(1)
    runs = 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1

    base_model(engine.model).layers[0].self_attn.register_forward_pre_hook(count)  # type: ignore[union-attr, index]
    engine.forward_backward(split, next_token_loss)
    assert runs == len(split) * (2 if recompute else 1)
