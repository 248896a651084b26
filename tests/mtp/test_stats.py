"""Statistics add up exactly and say None, not NaN, where nothing was seen."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forerun import MTPConfig, attach
from forerun.models.carrier import MTPCarrier
from forerun.models.training import mtp_forward
from forerun.models.trunk import base_model, decoder_inputs
from forerun.mtp.stats import FIELDS, MTPStats, reduce_counts
from tests.models.tiny import tiny_model, token_rows
from tests.mtp.ranks import Ranks


def some(scale: float) -> MTPStats:
    stats = MTPStats.zeros(2)
    stats.add(1, count=10 * scale, loss=torch.tensor(25.0 * scale), label_hits=4 * scale)
    stats.add(1, teacher_count=10 * scale, trunk_hits=6 * scale, overlap=5.5 * scale)
    stats.add(1, chain_count=10 * scale, chain_hits=6 * scale)
    stats.add(2, count=8 * scale, loss=32.0 * scale, label_hits=2 * scale)
    stats.add(2, teacher_count=8 * scale, trunk_hits=4 * scale, overlap=3 * scale)
    stats.add(2, chain_count=8 * scale, chain_hits=2 * scale)
    return stats


EXPECTED = {
    "mtp/depth_1/loss": 2.5,
    "mtp/depth_1/label_top1": 0.4,
    "mtp/depth_1/trunk_top1": 0.6,
    "mtp/depth_1/expected_acceptance": 0.55,
    "mtp/depth_2/loss": 4.0,
    "mtp/depth_2/label_top1": 0.25,
    "mtp/depth_2/trunk_top1": 0.5,
    "mtp/depth_2/expected_acceptance": 0.375,
    "mtp/acceptance_length": 1 + 0.6 + 0.25,
}


def test_figures() -> None:
    assert some(1).compute() == pytest.approx(EXPECTED)


def test_merging_weighs_by_counts() -> None:
    figures = some(1).merge(some(3)).merge(MTPStats.zeros(2)).compute()
    assert figures == pytest.approx(EXPECTED)


def test_an_empty_depth_is_none() -> None:
    stats = MTPStats.zeros(2)
    stats.add(1, count=2, loss=math.log(2), label_hits=0)
    figures = stats.compute()
    assert figures["mtp/depth_1/loss"] == pytest.approx(math.log(2) / 2)
    assert figures["mtp/depth_1/trunk_top1"] is None
    assert figures["mtp/depth_2/loss"] is None
    assert figures["mtp/acceptance_length"] is None


def reduce_on(group: dist.ProcessGroup, rank: int) -> list[MTPStats | list[int]]:
    """Reduced: figures of both, of one rank only, of a depth that one rank alone has; then counts."""
    one_sided = some(1.0) if rank == 0 else MTPStats.zeros(2)
    empty = MTPStats.zeros(2)
    if rank == 0:
        empty.add(1, count=1, loss=2.0, label_hits=1)
    made = [stats.reduce(group) for stats in (some(float(rank + 1)), one_sided, empty)]
    return [*made, reduce_counts([rank + 1, 0, 2**40], group)]


def test_reducing_over_ranks(tmp_path: Path) -> None:
    with Ranks(2, [2], tmp_path / "store") as ranks:
        answers = ranks.run(reduce_on, [0, 1])
    for both, one_sided, empty, counts in answers:
        assert both.compute() == pytest.approx(EXPECTED)
        assert both.sums[0, FIELDS.index("count")] == 30
        assert one_sided.compute() == pytest.approx(EXPECTED)
        figures = empty.compute()
        assert figures["mtp/depth_1/loss"] == 2.0 and figures["mtp/depth_2/loss"] is None
        assert counts == [3, 0, 2**41]


LENGTHS = (12, 3, 19, 2, 9)  # documents of one packed row


def carrier(depths: int) -> MTPCarrier:
    """Two tokens are likely, so that depths agree with the trunk now and then, each for itself."""
    mtp = MTPConfig(enable=True, num_layers=depths, chunk_size=4)
    model = attach(tiny_model(), mtp, init="plain", seed=1).double()
    with torch.no_grad():
        model.get_input_embeddings().weight[:2] *= 8
    return model


def packed_row() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, positions, documents, loss mask, each [1, S]."""
    ids = token_rows(1, sum(LENGTHS), seed=5)
    ids[:, ::3] = 1  # one of the likely ones
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    documents = torch.cat([torch.full((n,), d) for d, n in enumerate(LENGTHS)])[None]
    mask = torch.rand(1, sum(LENGTHS), generator=torch.Generator().manual_seed(2)) < 0.8
    return ids, positions, documents, mask


def figures_by_loop(model: MTPCarrier, temperature: float) -> dict[str, float | None]:
    """Position by position, from whole-document logits; the drafts are fed the text's own tokens."""
    ids, _, _, mask = packed_row()
    depths = model.mtp.num_depths
    seen: dict[str, list[float]] = {}
    chains: list[list[list[bool]]] = [[] for _ in range(depths)]
    start = 0
    for length in LENGTHS:
        tokens, wanted = ids[0, start : start + length], mask[0, start : start + length]
        start += length
        trunk = base_model(model)
        hidden = trunk(input_ids=tokens[None], use_cache=False).last_hidden_state
        target = model.get_output_embeddings()(hidden)[0]
        inputs = decoder_inputs(model, hidden, torch.arange(length)[None])
        drafts = []
        for depth in range(1, depths + 1):
            read = torch.cat([tokens[depth:], tokens.new_zeros(min(depth, length))])
            for_head, hidden = model.mtp.step(depth, hidden, model.get_input_embeddings()(read)[None], **inputs)
            drafts.append(model.get_output_embeddings()(for_head)[0])
        for i in range(length):
            agreed: list[bool] = []
            for depth in range(1, depths + 1):
                j = i + depth + 1
                if j >= length or not wanted[j]:
                    break  # a chain ends where a depth is not valid
                agreed.append(bool(drafts[depth - 1][i].argmax() == target[i + depth].argmax()))
                chains[depth - 1].append(list(agreed))
            for depth in range(1, depths + 1):
                j = i + depth + 1
                if j >= length or not wanted[j]:
                    continue
                draft, sure = drafts[depth - 1][i], target[i + depth]
                p, q = (sure / temperature).softmax(-1), (draft / temperature).softmax(-1)
                values = {
                    "loss": -draft.log_softmax(-1)[tokens[j]],
                    "label_top1": draft.argmax() == tokens[j],
                    "trunk_top1": draft.argmax() == sure.argmax(),
                    "expected_acceptance": sum(min(a, b) for a, b in zip(p.tolist(), q.tolist(), strict=True)),
                }
                for name, value in values.items():
                    seen.setdefault(f"mtp/depth_{depth}/{name}", []).append(float(value))
    figures: dict[str, float | None] = {name: sum(values) / len(values) for name, values in seen.items()}
    figures["mtp/acceptance_length"] = 1 + sum(sum(map(all, chain)) / len(chain) for chain in chains)
    return figures


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("depths", [1, 3])
@torch.no_grad()
def test_figures_equal_a_loop_over_positions(depths: int, temperature: float) -> None:
    model = carrier(depths)
    ids, positions, documents, mask = packed_row()
    hidden = base_model(model)(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    stats = mtp_forward(
        model,
        hidden,
        input_ids=ids,
        position_ids=positions,
        document_ids=documents,
        loss_mask=mask,
        temperature=temperature,
        compare_with_trunk=True,
    ).stats
    expected = figures_by_loop(model, temperature)
    assert stats.compute() == pytest.approx(expected, rel=1e-6)
    # The case tells chains from depths by themselves, and their counts too.
    sums = {name: stats.sums[:, FIELDS.index(name)] for name in FIELDS}
    assert (sums["label_hits"] > 0).all() and (sums["chain_hits"] > 0).all()
    assert (sums["chain_hits"] < sums["trunk_hits"])[1:].all() and (sums["chain_count"] < sums["count"])[1:].all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "mse"}, "mtp.loss='mse' is not one of ce, soft_ce, tv"),
        ({"mask_rule": "all"}, "mtp.mask_rule='all'"),
        ({"num_layers": 0}, "mtp.num_layers=0 must be at least 1"),
        ({"mtp_loss_scaling_factor": -1.0}, "must not be negative"),
        ({"loss_top_k": 0}, "mtp.loss_top_k=0"),
        ({"enable_train": True}, "mtp.enable_train=true needs mtp.enable=true"),
        ({"enable_rollout": True}, "mtp.enable_rollout=true needs mtp.enable=true"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MTPConfig(**settings)
