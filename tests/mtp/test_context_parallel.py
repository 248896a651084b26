"""Zig-zag shards over 2 and 4 gloo ranks: every depth's targets equal the same places of the whole row's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from forerun.mtp.context_parallel import ZigZagShard
from forerun.mtp.shift import PADDING, depth_counts, depth_targets

FIELDS = ("valid", "input_ids", "labels", "position_ids")


def zig_zag(length: int, rank: int, size: int) -> list[int]:
    """The places of a document that a rank holds, as the layout is usually drawn."""
    chunks = torch.arange(length).chunk(2 * size)
    return [*chunks[rank].tolist(), *chunks[2 * size - 1 - rank].tolist()]


def random_rows(seed: int, lengths: list[int], packed_inside: bool) -> dict[str, Tensor]:
    """Rows with random ids and masks; documents as cut (the tail of each is padding), or any inside one long row."""
    rng = random.Random(seed)
    rows = 1 if len(lengths) > 1 else 2
    total = sum(lengths)
    ids = torch.tensor([[rng.randrange(1, 50) for _ in range(total)] for _ in range(rows)])
    mask = torch.tensor([[rng.random() < 0.7 for _ in range(total)] for _ in range(rows)])
    documents = torch.zeros_like(ids)
    positions = torch.zeros_like(ids)
    for row in range(rows):
        cuts = [rng.randrange(1, 6) for _ in range(total)] if packed_inside else lengths
        start = number = 0
        while start < total:
            length = min(cuts[number], total - start)
            real = length if packed_inside else rng.randrange(1, length + 1)
            documents[row, start : start + length] = torch.where(torch.arange(length) < real, number, PADDING)
            positions[row, start : start + length] = torch.arange(length)
            start, number = start + length, number + 1
    return {"input_ids": ids, "documents": documents, "loss_mask": mask, "labels": ids + 100, "position_ids": positions}


def check(group: dist.ProcessGroup, size: int, rank: int) -> int:
    checked = 0
    for seed in range(40):
        rng = random.Random(seed)
        packed_inside = seed % 2 == 0
        documents = 1 if packed_inside else rng.randrange(1, 5)
        # From chunks of one token, shorter than what depth 3 looks ahead, up.
        lengths = [2 * size * rng.randrange(1, 6) for _ in range(documents)]
        rows = random_rows(seed, lengths, packed_inside)
        shard = ZigZagShard(lengths, group)
        starts = [sum(lengths[:i]) for i in range(documents)]
        places = [s + p for s, n in zip(starts, lengths, strict=True) for p in zig_zag(n, rank, size)]
        assert shard.indices.tolist() == places
        local = {name: shard.take(x) for name, x in rows.items()}
        for rule in ("target", "span"):
            for depth in (0, 1, 2, 3):
                whole = depth_targets(**rows, depth=depth, mask_rule=rule)
                part = depth_targets(**local, depth=depth, mask_rule=rule, look_ahead=shard.look_ahead)
                valid = shard.take(whole.valid)
                for field in FIELDS:
                    expected, found = shard.take(getattr(whole, field)), getattr(part, field)
                    if field == "valid":
                        assert found.equal(expected)
                    assert found[valid].equal(expected[valid]), f"{field} at depth {depth}, seed {seed}"
                checked += int(valid.sum())
            own = torch.tensor(depth_counts(local["documents"], local["loss_mask"], 3, rule, shard.look_ahead))
            dist.all_reduce(own, group=group)
            assert own.tolist() == depth_counts(rows["documents"], rows["loss_mask"], 3, rule)
    return checked


def exchanges_per_depth(group: dist.ProcessGroup) -> list[int]:
    counted: list[int] = []
    original = dist.all_gather

    def counting(gathered: list[Tensor], tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
        counted[-1] += 1
        original(gathered, tensor, group=group)

    dist.all_gather = counting
    try:
        rows = random_rows(1, [16], packed_inside=True)
        shard = ZigZagShard([16], group)
        for depth in (1, 2):
            counted.append(0)
            local = {name: shard.take(x) for name, x in rows.items()}
            depth_targets(**local, depth=depth, mask_rule="span", look_ahead=shard.look_ahead)
    finally:
        dist.all_gather = original
    return counted


def _rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    assert check(pairs[rank // 2], 2, rank % 2) > 100
    assert check(dist.group.WORLD, 4, rank) > 100
    assert exchanges_per_depth(pairs[rank // 2]) == [1, 1]
    with pytest.raises(ValueError, match="a document of 12 tokens does not divide into 8 chunks: pad each document"):
        ZigZagShard([16, 12])
    dist.destroy_process_group()


def test_shards_over_two_and_four_ranks(tmp_path: Path) -> None:
    mp.start_processes(_rank, (str(tmp_path / "store"),), nprocs=4, start_method="forkserver")
