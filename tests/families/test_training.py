"""Blocks of every family in a training step, and back from a checkpoint of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import forerun
from forerun import MTPConfig, attach
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.errors import ForerunError
from forerun.families import MIMO
from forerun.models.carrier import MTPCarrier
from forerun.mtp.stats import FIELDS
from tests.families.tiny import TRUNKS, tiny_trunk
from tests.models.tiny import token_rows


def trainable(name: str, seed: int = 0, **changes: Any) -> MTPCarrier:
    config = MTPConfig(enable=True, enable_train=True)
    family = MIMO if name == "mimo" else None
    return attach(tiny_trunk(name, seed=seed, **changes), config, init="plain", family=family, seed=seed).train()


@pytest.mark.parametrize("name", TRUNKS)
def test_one_forward_trains_the_whole_block(name: str) -> None:
    """All but an indexer, which picks positions and has no gradient in transformers either."""
    model = trainable(name)
    ids = token_rows(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    without = {n for n, p in model.named_parameters() if n.startswith("mtp.") and (p.grad is None or not p.grad.any())}
    assert {n for n in without if ".indexer." not in n} == set()
    stats = model.pop_mtp_stats()
    assert stats is not None and float(stats.sums[0, FIELDS.index("count")]) == 2 * 10


@pytest.mark.parametrize("name", TRUNKS)
def test_padding_does_not_reach_the_block(name: str) -> None:
    """Left padding and none: one loss. The mask is made as transformers makes it for the trunk."""
    # A sparse trunk breaks ties between keys by their places, which padding moves; here it keeps every key.
    model = trainable(name, **({"index_topk": 16} if "index_topk" in TRUNKS[name][1] else {}))
    ids = token_rows(1, 8)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(11) >= 3).long()[None]
    losses = []
    for row, labels, attention_mask in (
        (ids, ids, torch.ones_like(ids)),
        (padded, padded.masked_fill(mask == 0, -100), mask),
    ):
        positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        model(input_ids=row, labels=labels, attention_mask=attention_mask, position_ids=positions)
        stats = model.pop_mtp_stats()
        assert stats is not None
        losses.append(float(stats.sums[0, FIELDS.index("loss")] / stats.sums[0, FIELDS.index("count")]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_text_positions_of_a_multimodal_model() -> None:
    """Its processor hands down a row of positions for each axis."""
    model, ids = trainable("qwen3_5"), token_rows(2, 9)
    losses = []
    for positions in (None, torch.arange(9).expand(4, 2, -1), torch.arange(9).expand(2, -1)):
        model(input_ids=ids, labels=ids, position_ids=positions)
        stats = model.pop_mtp_stats()
        assert stats is not None
        losses.append(float(stats.sums[0, FIELDS.index("loss")]))
    assert losses[0] == losses[1] == losses[2]


def test_images_are_refused_rather_than_trained_on_as_placeholder_tokens() -> None:
    model, ids = trainable("qwen3_5"), token_rows(1, 9)
    with pytest.raises(ForerunError, match="got pixel_values, and the MTP block sees token embeddings only"):
        model(input_ids=ids, labels=ids, pixel_values=torch.zeros(1))


@pytest.mark.parametrize("name", ["glm4_moe", "glm_moe_dsa", "qwen3_5_moe", "nemotron_h", "mimo"])
def test_a_run_s_checkpoint_resumes(tmp_path: Path, name: str) -> None:
    """Also where the family's files hold experts apart and under other names than the modules."""
    settings = TorchEngineConfig(optimizer=OptimizerConfig(lr=1e-3))
    engine, other = (TorchEngine(trainable(name, seed), settings) for seed in (0, 1))
    engine.save(tmp_path / "checkpoint-1", {})
    other.load(tmp_path / "checkpoint-1")
    ours, theirs = (dict(e.named_weights()) for e in (engine, other))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    again = forerun.load(tmp_path / "checkpoint-1")
    assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), again.parameters(), strict=True))
