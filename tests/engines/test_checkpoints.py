"""Checkpoints over ranks: each writes its part, also beside the training; any number resumes; nothing is lost.

See tests/engines/test_sharded.py for what is trained.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from forerun.engines.checkpoint_directory import checkpoints, whole_directory
from forerun.engines.ranks import RankGroup
from forerun.engines.saving import Saver, Tensors
from forerun.engines.tensor_shards import SavedTensors, write_tensors
from forerun.engines.torch_engine import TorchEngine
from forerun.errors import ForerunError
from tests.engines.test_sharded import Case, assert_close, engine, mesh_of, train
from tests.mtp.ranks import TIMEOUT_S, Ranks


def rank_stands_apart(group: dist.ProcessGroup, steps: int) -> list[Any]:
    """Groups beside the ranks' own, which have its patience; rank 0 is in one more, of which the others do not know."""
    members = RankGroup(DeviceMesh.from_group(group, "cpu", mesh=list(range(group.size()))))
    if members.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    found: list[Any] = []
    for _ in range(steps):
        beside = members.apart()
        assert beside.group is not None and beside.group != group
        patience = beside.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        found.append((beside.collect(beside.size, [(beside.rank, 10 * members.rank)]), patience))
    return found


def test_ranks_in_unlike_numbers_of_groups_make_another(ranks: Ranks) -> None:
    """Also two ranks that have been in a group of two, which the other two have not."""
    for size in (4, 2, 4):
        expected = ([(rank, 10 * rank) for rank in range(size)], TIMEOUT_S / 2)
        assert ranks.run(rank_stands_apart, [2] * size) == [[expected, expected]] * size


def go_on(made: TorchEngine) -> dict[str, Any]:
    """A step, and what the random numbers are then."""
    return {"weights": train(made, 1, first=2)["weights"], "draw": torch.rand(3)}


def rank_saves(group: dist.ProcessGroup, argument: tuple[Case, Path, bool]) -> Any:
    """Save beside further training, or while it waits; what comes then, and what comes after resuming from that."""
    case, run, wait = argument
    made = engine(case, mesh_of(case, group))
    torch.manual_seed(100 + group.rank())
    train(made, 2)
    extra = {"place": [3]}
    made.save(run / "checkpoint-2", extra, wait=wait)
    extra["place"].append(4)
    straight = go_on(made)
    made.finish_saves()
    resumed = engine(case, mesh_of(case, group))
    assert resumed.load(run / "checkpoint-2") == {"place": [3]}
    return straight, go_on(resumed)


@pytest.fixture(scope="module")
def two_ranks_checkpoint(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Where two ranks saved at step 2, and what `rank_saves` gave."""
    run = tmp_path_factory.mktemp("run")
    return run / "checkpoint-2", ranks.run(rank_saves, [(Case(depths=2), run, False)] * 2)


def assert_same(found: Any, expected: Any) -> None:
    assert torch.equal(found["draw"], expected["draw"])
    assert found["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        assert torch.equal(found["weights"][name], tensor), name


def test_ranks_resume_bit_identically(two_ranks_checkpoint: tuple[Path, list[Any]]) -> None:
    """From a save that went on while the weights changed; every rank with its own random numbers."""
    _, given = two_ranks_checkpoint
    for straight, resumed in given:
        assert_same(resumed, straight)
    assert not torch.equal(given[0][0]["draw"], given[1][0]["draw"])


def test_each_rank_writes_its_part(two_ranks_checkpoint: tuple[Path, list[Any]]) -> None:
    """Half of every tensor, and nothing twice."""
    checkpoint, _ = two_ranks_checkpoint
    made = engine(Case(depths=2))
    whole = dict(made.named_weights())
    known = whole | dict(made.model.named_parameters())
    for place, factor in (checkpoint, 1), (checkpoint / "optimizer", 2):
        parts = [load_file(place / f"shard-0000{rank}-model-00001-of-00001.safetensors") for rank in (1, 2)]
        for name in parts[0]:
            if name.startswith("step:"):
                continue
            rows = len(known[name.partition(":")[2] or name])
            assert [len(part[name]) for part in parts] == [rows - rows // 2, rows // 2], name
        tensors = [tensor for part in parts for tensor in part.values() if tensor.dim() > 0]
        assert sum(map(torch.numel, tensors)) == factor * sum(map(torch.numel, whole.values()))


def rank_resumes(group: dist.ProcessGroup, argument: tuple[Case, Path]) -> Any:
    case, checkpoint = argument
    made = engine(case, mesh_of(case, group))
    made.load(checkpoint)
    return go_on(made)


def test_a_checkpoint_resumes_on_other_layouts(
    two_ranks_checkpoint: tuple[Path, list[Any]], ranks: Ranks, tmp_path: Path
) -> None:
    """2 ranks -> 2 x 2 (HSDP) -> 2 -> 1 -> 2; a further rank takes the random numbers of one that there was."""
    checkpoint, given = two_ranks_checkpoint
    expected, draws = given[0][0]["weights"], [straight["draw"] for straight, _ in given]
    replicas = Case(depths=2, replicas=2)
    for rank, found in enumerate(ranks.run(rank_resumes, [(replicas, checkpoint)] * 4)):
        assert_close(found["weights"], expected)
        assert torch.equal(found["draw"], draws[rank % 2])
    again = ranks.run(rank_saves, [(replicas, tmp_path, False)] * 4)
    for straight, resumed in again:
        assert_same(resumed, straight)
    sizes = [
        file.get_slice(name).get_shape()
        for path in tmp_path.rglob("shard-*.safetensors")
        for file in [safe_open(path, framework="pt")]
        for name in file.keys()  # noqa: SIM118 - no dict
        if ":" not in name
    ]
    held = sum(torch.Size(size).numel() for size in sizes)
    assert held == sum(tensor.numel() for tensor in expected.values())  # replicas are written once
    for found in ranks.run(rank_resumes, [(Case(depths=2), tmp_path / "checkpoint-2")] * 2):
        assert_close(found["weights"], expected)
    alone = engine(Case(depths=2))
    alone.load(tmp_path / "checkpoint-2")
    alone.save(tmp_path / "checkpoint-3", wait=False)
    assert_close(go_on(alone)["weights"], expected)
    alone.finish_saves()
    for found in ranks.run(rank_resumes, [(Case(depths=2), tmp_path / "checkpoint-3")] * 2):
        assert_close(found["weights"], expected)


class Trap:
    """Unpickling one makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_nothing_in_a_checkpoint_is_unpickled(two_ranks_checkpoint: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """Not the index that torch.distributed.checkpoint would have, nor anything under a name of its own."""
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(two_ranks_checkpoint[0], checkpoint)
    assert {file.suffix for file in checkpoint.rglob("*") if file.is_file()} == {".safetensors", ".json"}
    for name in (".metadata", "optimizer/.metadata", "__0_0.distcp", "optimizer.pt", "random/00000.pt"):
        (checkpoint / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    engine(Case(depths=2)).load(checkpoint)
    assert not (tmp_path / "sprung").exists()
    pickle.loads((checkpoint / ".metadata").read_bytes()).close()
    assert (tmp_path / "sprung").exists()


def damage_shard(checkpoint: Path) -> None:
    # DCP itself takes what is left, and leaves the other half of every weight as it was.
    (checkpoint / "shard-00001-model-00001-of-00001.safetensors").unlink()


def damage_moments(checkpoint: Path) -> None:
    file = checkpoint / "optimizer" / "shard-00002-model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def damage_header(checkpoint: Path) -> None:
    file = checkpoint / "shard-00002-model-00001-of-00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"saved_offsets", b"saved_offsetz"))


def damage_random(checkpoint: Path) -> None:
    file = checkpoint / "random" / "00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'\\"python\\"', b'\\"pythin\\"'))


def damage_state(checkpoint: Path) -> None:
    file = checkpoint / "trainer_state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"scheduler": "none"}))


@pytest.mark.parametrize("damage", [damage_shard, damage_moments, damage_header, damage_random, damage_state])
def test_a_damaged_part_is_found(damage: Any, two_ranks_checkpoint: tuple[Path, list[Any]], tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(two_ranks_checkpoint[0], checkpoint)
    damage(checkpoint)
    with pytest.raises(ForerunError, match=r"checkpoint-2[a-z/]* cannot be read .*: resume from an older checkpoint$"):
        engine(Case(depths=2)).load(checkpoint)


def test_what_a_save_did_not_write_is_not_read(two_ranks_checkpoint: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """The whole model that somebody put together there, for instance; and what another engine wrote."""
    checkpoint, made = tmp_path / "checkpoint-2", engine(Case(depths=2))
    shutil.copytree(two_ranks_checkpoint[0], checkpoint)
    before = {name: tensor.clone() for name, tensor in made.named_weights()}
    save_file({name: torch.zeros_like(tensor) for name, tensor in before.items()}, checkpoint / "model.safetensors")
    with pytest.raises(ForerunError, match=r"checkpoint-2 holds model.safetensors, which is no part of the checkpoint"):
        made.load(checkpoint)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"layout": {}, "num_ranks": 2, "global_step": 2}))
    with pytest.raises(ForerunError, match=r"written by another engine: set engine.strategy=megatron$"):
        made.load(checkpoint)
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.named_weights())


def test_a_checkpoint_from_before_shards_is_read(tmp_path: Path) -> None:
    """Optimizer and random numbers of one process, in a file each beside the model."""
    made = engine(Case())
    train(made, 2)
    checkpoint = tmp_path / "checkpoint-2"
    made.save(checkpoint, {"place": 3})
    moments: dict[str, Tensor] = {}
    for file in (checkpoint / "optimizer").iterdir():
        moments |= load_file(file)
    save_file(moments, checkpoint / "optimizer.safetensors")
    shutil.rmtree(checkpoint / "optimizer")
    with safe_open(checkpoint / "random" / "00000.safetensors", framework="pt") as file:
        values = json.loads(file.metadata()["values"])
    (checkpoint / "random" / "00000.safetensors").rename(checkpoint / "random_state.safetensors")
    document = json.loads((checkpoint / "trainer_state.json").read_text())
    del document["files"], document["num_ranks"]
    (checkpoint / "trainer_state.json").write_text(json.dumps({**document, "random": values}))
    straight = go_on(made)
    old = engine(Case())
    assert old.load(checkpoint) == {"place": 3}
    assert_same(go_on(old), straight)


def rank_files(group: dist.ProcessGroup, directory: Path) -> list[list[Tensor]]:
    """Tensors in every layout through files of 32 bytes."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    whole = {
        "rows": torch.arange(14, dtype=torch.bfloat16).view(7, 2),
        "few": torch.arange(1, dtype=torch.int64),  # the second shard is empty
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "none": torch.zeros(0, 3),
    }
    placements = {"rows": [Replicate(), Shard(0)], "few": [Replicate(), Shard(0)]}
    laid = {n: distribute_tensor(t, mesh, placements[n]) if n in placements else t for n, t in whole.items()}
    members = RankGroup(mesh)
    write_tensors(directory, laid, members, file_bytes=8)
    other = {name: [Shard(1), Shard(0)] if name == "rows" else None for name in whole}
    read = {n: torch.zeros_like(t) if other[n] is None else distribute_tensor(torch.zeros_like(t), mesh, other[n])
            for n, t in whole.items()}  # fmt: skip
    saved = SavedTensors(directory, members)
    assert {n: (t.shape, t.dtype) for n, t in saved.index.items()} == {n: (t.shape, t.dtype) for n, t in whole.items()}
    saved.read(read)
    return [[t.full_tensor() if hasattr(t, "full_tensor") else t, whole[n]] for n, t in read.items()]


def test_tensors_of_every_layout_come_back(ranks: Ranks, tmp_path: Path) -> None:
    for pairs in ranks.run(rank_files, [tmp_path] * 4):
        assert len(pairs) == 5
        for found, expected in pairs:
            assert torch.equal(found, expected)
    assert len(list(tmp_path.glob("*-of-00002.safetensors"))) > 1


def rank_full(group: dist.ProcessGroup, argument: tuple[Path, bool]) -> Any:
    """A save that finds no space on rank 1's disk, the one after it, and what was said."""
    run, wait = argument
    mesh = DeviceMesh.from_group(group, "cpu", mesh=[0, 1])
    weights = {"weight": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])}
    full = True

    def write(unfinished: Path, tensors: Tensors, members: RankGroup) -> None:
        if members.rank == 1 and full:
            (unfinished / "shard-00002-model-00001-of-00001.safetensors").symlink_to("/dev/full")
        write_tensors(unfinished, tensors["weights"], members)
        if members.rank == 0:
            (unfinished / "trainer_state.json").write_text("{}")

    saver, said = Saver(RankGroup(mesh)), []
    for step in (1, 2):
        full = step == 2
        try:
            saver.save(run / f"checkpoint-{step}", {"weights": weights}, write, wait)
            saver.finish()
        except ForerunError as error:
            said.append(str(error))
    kept = [path.name for path in checkpoints(run)]
    full = False
    group.barrier().wait()
    saver.save(run / "checkpoint-2", {"weights": weights}, write, wait)
    saver.finish()
    return said, kept


@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "beside"])
def test_a_full_disk_on_one_rank_is_said_on_all_and_loses_nothing(wait: bool, ranks: Ranks, tmp_path: Path) -> None:
    for said, kept in ranks.run(rank_full, [(tmp_path, wait)] * 2):
        (line,) = said
        assert "checkpoint-2: no space left on device; free some space" in line and "\n" not in line
        assert kept == ["checkpoint-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]


def rank_gives_up(group: dist.ProcessGroup, directory: Path) -> str:
    """Rank 1's disk is full for a file that it writes without a word to the other."""
    members = RankGroup(DeviceMesh.from_group(group, "cpu", mesh=[0, 1]))
    try:
        with whole_directory(directory, members) as unfinished:
            (Path("/dev/full") if members.rank == 1 else unfinished / "part").write_text("part")
    except ForerunError as error:
        return str(error)
    return ""


def test_a_directory_gets_its_name_only_when_all_ranks_have_written(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.run(rank_gives_up, [tmp_path / "checkpoint-1"] * 2)
    assert said[0] == f"rank 1: {said[1]}" and "no space left on device; free some space" in said[1]
    assert list(tmp_path.iterdir()) == []


def rank_blocked(group: dist.ProcessGroup, run: Path) -> list[str]:
    made = engine(Case(), mesh_of(Case(), group))
    said = []
    made.save(run / "file" / "checkpoint-1", wait=False)
    train(made, 1)  # goes on
    try:
        made.save(run / "checkpoint-2", wait=False)
    except ForerunError as error:
        said.append(str(error))
    made.save(run / "checkpoint-3", wait=False)
    made.finish_saves()
    return said


def test_what_went_wrong_beside_the_training_is_raised_by_the_next_save(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for said in ranks.run(rank_blocked, [tmp_path] * 2):
        assert len(said) == 1 and "cannot write" in said[0] and "checkpoint-1: not a directory" in said[0]
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3"]


def test_a_kill_at_any_instant_of_a_save_keeps_the_one_before(tmp_path: Path) -> None:
    """Of either of two ranks; what is there is whole, of one save, and the next save clears up the rest."""
    command = [sys.executable, "-m", "tests.engines.killed_saves", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    instants = {(outcome["saves"], outcome["rank"]): outcome["instant"] for outcome in outcomes}
    assert instants["checkpoint-1", 0] > 20 and instants["checkpoint-2", 1] > 4
    for outcome in outcomes:
        old = {"checkpoint-1": 1.0}
        new = old | {outcome["saves"]: 2.0}
        lived = outcome["instant"] == instants[outcome["saves"], outcome["rank"]]
        assert outcome["found"] in ([new] if lived else [old, new]), outcome
        assert outcome["left"] == sorted(new), outcome
    assert any(outcome["found"] == {"checkpoint-1": 1.0} for outcome in outcomes)
