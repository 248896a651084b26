"""Several ranks, each of which may start an engine of its own: which ones do, on what, and that the run stays the same.

The protocol server stands where SGLang would; vLLM itself is in test_rl_vllm.py.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forerun.config import RLConfig
from forerun.engines.ranks import RankGroup
from forerun.errors import ForerunError, UsageError
from forerun.models.attach import attach
from forerun.models.loading import load
from forerun.models.serving import export
from forerun.mtp.config import MTPConfig
from forerun.rollout.sglang import engine as sglang
from forerun.rollout.sglang.launch import LaunchSettings
from forerun.trainers import rollout_engines
from forerun.trainers.ranked import RankedRollout
from forerun.trainers.rl import RLTrainer
from forerun.trainers.rollout_engines import make_rollout_engine
from forerun.trainers.rollout_places import Place, own_place
from tests.logged import repeatable
from tests.mtp.ranks import Ranks
from tests.rollout.sglang_server import SGLangServer, serving
from tests.trainers.test_rl_ranks import mesh_of
from tests.trainers.tiny import make_model, make_tokenizer
from tests.trainers.tiny_rl import MTP, PROMPTS, ShareOfWord, settings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("hosts", "size", "writers", "starts"),
    [
        ("aaaa", 1, [0, 0, 0, 0], [0, 1, 2, 3]),
        ("aaaa", 2, [0, 0, 0, 0], [0, 2]),
        ("aabb", 2, [0, 0, 2, 2], [0, 2]),
        ("abab", 1, [0, 1, 0, 1], [0, 1, 2, 3]),
        ("abab", 2, [0, 1, 0, 1], [0, 1]),
        ("aabb", 4, [0, 0, 0, 0], [0]),  # over devices that no rank trains on
        ("aabbbb", 4, [0] * 6, [0]),
        ("aabbbb", 2, [0, 0, 2, 2, 2, 2], [0, 2, 4]),
    ],
)
def test_who_starts_one(hosts: str, size: int, writers: list[int], starts: list[int]) -> None:
    places = [own_place(rank, hosts, size, CPU) for rank in range(len(hosts))]
    assert [place.writer for place in places] == writers
    assert [rank for rank, place in enumerate(places) if place.starts] == starts
    assert all(place.environment == {} for place in places)


@pytest.mark.parametrize(
    ("visible", "own", "size", "given"),
    [(None, 2, 2, "2,3"), ("4,5,6,7", 2, 2, "6,7"), ("GPU-a,GPU-b", 1, 1, "GPU-b")],
)
def test_on_the_gpus_that_its_ranks_train_on(
    visible: str | None, own: int, size: int, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: own)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert own_place(own, "aaaa", size, CUDA) == Place(0, True, {"CUDA_VISIBLE_DEVICES": given})


def test_ranks_that_do_not_come_out_even_are_refused() -> None:
    for rank in range(5):  # those of the other machine, too
        with pytest.raises(UsageError, match=r"parallel_size=2 must divide the number of ranks of a machine, 3: so ma"):
            own_place(rank, "aaabb", 2, CPU)


def test_a_rank_that_sees_too_few_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(UsageError, match=r"is to have 2 GPUs .* sees 1 from its own on: let every rank see all GPUs"):
        own_place(0, "aa", 2, CUDA)


def config_of(path: Path, *more: str) -> RLConfig:
    drafting = ["mtp.speculative_num_steps=2", "mtp.speculative_num_draft_tokens=3", "rollout.deterministic=true"]
    engine = ["mtp.enable_rollout=true", "rollout.engine=sglang", f"rollout.python={sys.executable}", *drafting]
    return settings(path, *MTP, *engine, f"model.path={path / 'model'}", *more)


def train(config: RLConfig, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Two steps, whose engines are servers of the protocol; what the run shows, and how they were asked for."""
    asked: list[LaunchSettings] = []
    served: list[int] = []

    def start(asks: LaunchSettings, mtp: MTPConfig | None) -> tuple[str, ExitStack]:
        asked.append(asks)
        assert mtp is not None
        model = load(asks.model_dir, dtype=getattr(torch, asks.dtype)).eval()
        server = SGLangServer(model, asks.model_dir, mtp.speculative_num_steps, deterministic=True, end_tokens=(0,))
        running = ExitStack()
        return running.enter_context(serving(server)), running

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang, "launch", start)
        if group is not None:
            patch.setattr(rollout_engines, "machine", lambda: "aabb"[group.rank()])
        made = RLTrainer(
            config,
            prompts=PROMPTS,
            reward=ShareOfWord(),
            tokenizer=make_tokenizer(),
            mesh=None if group is None else mesh_of(group),
        )
        if isinstance(made.rollout, RankedRollout) and made.rollout.engine is not None:
            generate = made.rollout.engine.generate
            patch.setattr(
                made.rollout.engine, "generate", lambda share, *_: served.append(len(share)) or generate(share)
            )
        with made._owned:
            reports = [repeatable(made.step(PROMPTS)) for _ in range(2)]
        responses = [sample.completion.token_ids for sample in made.samples]
        assert not any(asks.model_dir.exists() for asks in asked)
    return {"reports": reports, "responses": responses, "served": served, "on": [asks.model_dir for asks in asked]}


def rank_trains(group: dist.ProcessGroup, config: RLConfig) -> dict[str, Any]:
    return train(config, group)


@pytest.mark.parametrize(("size", "started"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (4, [0])])
def test_engines_of_ranks_are_one_run(size: int, started: list[int], ranks: Ranks, tmp_path: Path) -> None:
    """Four ranks on two machines."""
    attach(make_model(), MTPConfig(enable=True), init="plain", seed=1).save_pretrained(tmp_path / "attached")
    export(tmp_path / "attached", tmp_path / "model")
    config = config_of(tmp_path, f"rollout.tensor_model_parallel_size={size}")
    alone = train(config, None)
    assert alone["reports"][1]["spec_num_accepted_tokens"] > 0
    found = ranks.run(rank_trains, [config] * 4)
    for rank, one in enumerate(found):
        assert one["responses"] == alone["responses"]
        for report, expected in zip(one["reports"], alone["reports"], strict=True):
            assert report["drafter_in_sync"] == 1.0
            assert report == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert len(one["on"]) == (rank in started)
        assert one["served"] == ([32 // len(started)] * 2 if rank in started else [])
    directories = {rank: found[rank]["on"][0] for rank in started}
    assert len(set(directories.values())) == len({rank // 2 for rank in started})  # one for each machine


def rank_fails(group: dist.ProcessGroup, argument: tuple[RLConfig, Path]) -> tuple[str, bool]:
    """What a rank raises where another one's engine does not start, and whether by then all have put away theirs."""
    config, left = argument

    class Started:
        def close(self) -> None:
            time.sleep(0.3)
            (left / "engine").unlink()

    def start(*_: Any) -> Any:
        if group.rank() == 1:
            raise ForerunError("no memory")
        (left / "engine").touch()
        return Started()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(left))
        patch.setattr(rollout_engines, "_started", start)
        with pytest.raises(ForerunError) as raised:
            make_rollout_engine(config, None, None, RankGroup(mesh_of(group)))
    return str(raised.value), not any(left.iterdir())


def test_one_that_does_not_start_ends_the_others(ranks: Ranks, tmp_path: Path) -> None:
    attach(make_model(), MTPConfig(enable=True), init="plain", seed=1).save_pretrained(tmp_path / "attached")
    export(tmp_path / "attached", tmp_path / "model")
    (tmp_path / "left").mkdir()
    found = ranks.run(rank_fails, [(config_of(tmp_path), tmp_path / "left")] * 2)
    assert found == [("rank 1: no memory", True), ("no memory", True)]
