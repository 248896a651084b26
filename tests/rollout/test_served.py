"""How weights travel to an engine that was started on files."""

from __future__ import annotations

import pytest
import torch

from forerun.rollout.child import environment_without
from forerun.rollout.served import buckets


def test_buckets_keep_order_and_size() -> None:
    named = [(str(i), torch.zeros(size)) for i, size in enumerate((2, 3, 1, 9, 1, 1))]  # 4 bytes each
    parts = [[name for name, _ in bucket] for bucket in buckets(named, 20)]
    assert parts == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    assert list(buckets([], 20)) == []


def test_a_server_that_a_rank_starts_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PYTHONPATH", "UNWANTED"):
        monkeypatch.setenv(name, "1")
    for name in ("FRANK", "HOSTNAME", "RANKED"):
        monkeypatch.setenv(name, "kept")
    seen = environment_without(["UNWANTED"])
    assert {"FRANK", "HOSTNAME", "RANKED"} <= seen.keys()
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PYTHONPATH"} & seen.keys()
    assert "UNWANTED" not in seen
