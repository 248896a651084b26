"""How weights travel to an engine that was started on files."""

from __future__ import annotations

import torch

from forerun.rollout.served import buckets


def test_buckets_keep_order_and_size() -> None:
    named = [(str(i), torch.zeros(size)) for i, size in enumerate((2, 3, 1, 9, 1, 1))]  # 4 bytes each
    parts = [[name for name, _ in bucket] for bucket in buckets(named, 20)]
    assert parts == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    assert list(buckets([], 20)) == []
