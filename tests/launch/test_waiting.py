"""A rank that waits in vain for another says so in one line, which names the setting."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from forerun.config import DistributedConfig, EngineConfig
from forerun.engines.ranks import RankGroup
from forerun.errors import ForerunError
from forerun.launch.rank import joined
from forerun.rollout.loopback import free_port
from tests.mtp.ranks import PRELOADED

LIMIT_S = 240
SAID = r"another rank was waited for longer than distributed\.timeout_s={}: raise it if "


def _environment(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _work(rank: int, port: int, answer: Any, others: Any) -> None:
    """Rank 1 waits for rank 0, which does something else."""
    os.environ |= _environment(rank, port)
    try:
        # Ranks that start on busy cores may do so some seconds apart.
        with joined(EngineConfig(device="cpu"), DistributedConfig(timeout_s=LIMIT_S)) as mesh:
            _set_pg_timeout(timedelta(seconds=1), mesh.get_group())
            if rank == 0:
                others.wait(LIMIT_S)
                os._exit(0)
            answer.send("met")
            RankGroup(mesh).agree(None)
    except Exception as error:
        answer.send((type(error), str(error)))


def test_in_an_exchange() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe()
    others, port = context.Event(), free_port()
    ranks = [context.Process(target=_work, args=(rank, port, theirs, others), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    assert ours.poll(LIMIT_S) and ours.recv() == "met"
    assert ours.poll(LIMIT_S)
    raised, said = ours.recv()
    others.set()
    for process in ranks:
        process.join(LIMIT_S)
    with pytest.raises(ForerunError, match=SAID.format(LIMIT_S)):
        raise raised(said)


def test_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _environment(0, free_port()).items():
        monkeypatch.setenv(name, value)
    limit = DistributedConfig(timeout_s=1)
    with pytest.raises(ForerunError, match=SAID.format(1)), joined(EngineConfig(device="cpu"), limit):
        pass
    assert not dist.is_initialized()
