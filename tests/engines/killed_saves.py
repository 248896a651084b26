"""Two ranks that save beside their training, of which one is killed (SIGKILL) at every instant of the save in turn.

Run as `python -m tests.engines.killed_saves FOLDER`. An instant is just before an access to a file: opening, making,
renaming, deleting. Each pair of ranks is forked, saves over what a whole save left, and ends; then what lies there is
read. Prints a JSON list of what was found: scenario, rank and number of the instant, and per checkpoint its value.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from forerun.engines.checkpoint_directory import checkpoints, put_back_replaced
from forerun.engines.random_state import random_state
from forerun.engines.ranks import RankGroup
from forerun.engines.saving import Saver, Tensors
from forerun.engines.state import SavedState, state_document, write_state
from tests.instants import at_every_instant, die_at, ended, forked

WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def tensors(value: float, mesh: DeviceMesh | None) -> Tensors:
    weight = torch.full((3, 2), value)
    if mesh is not None:
        weight = distribute_tensor(weight, mesh, [Shard(0)])
    return {"weights": {"weight": weight}, "moments": {"exp_avg:weight": weight.clone()}}


def save(saver: Saver, directory: Path, given: Tensors, wait: bool) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    document = state_document(optimizer, schedule, {}, 0, {})

    def write(unfinished: Path, groups: Tensors, ranks: RankGroup) -> None:
        write_state(unfinished, groups["weights"], groups["moments"], random_state(), document, ranks)

    saver.save(directory, given, write, wait)


def be_rank(rank: int, run: Path, directory: Path, victim: int, instant: int) -> None:
    """Save the value 2 beside an update to 3. The victim dies at its instant, or says that there is none so late."""
    dist.init_process_group(
        "gloo", init_method=f"file://{run}.store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mesh = DeviceMesh("cpu", [0, 1])
    given = tensors(2.0, mesh)
    saver = Saver(RankGroup(mesh))
    if rank == victim:
        at_every_instant(WATCHED, run, die_at(instant))
    try:
        save(saver, directory, given, wait=False)
        for group in given.values():
            for tensor in group.values():
                tensor.fill_(3.0)
        saver.finish()
    except RuntimeError:
        os._exit(3)  # the other one is gone
    os._exit(0)


def killed_at(run: Path, directory: Path, victim: int, instant: int) -> bool:
    """Whether the victim lived that long."""
    children = [forked(partial(be_rank, rank, run, directory, victim, instant)) for rank in range(2)]
    codes = [ended(child) for child in children]
    Path(f"{run}.store").unlink(missing_ok=True)
    if codes == [0, 0]:
        return False
    # The other may have been done before the victim was.
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] in (0, 3), codes
    return True


def values(run: Path) -> dict[str, float]:
    """What each whole checkpoint holds; fails where one is not of one save."""
    put_back_replaced(run)
    found = {}
    for directory in checkpoints(run):
        saved = SavedState(directory, RankGroup())
        read = {"weight": torch.zeros(3, 2)}, {"exp_avg:weight": torch.zeros(3, 2)}
        saved.read(*read)
        saved.restore_random_state()
        numbers = set(read[0]["weight"].flatten().tolist() + read[1]["exp_avg:weight"].flatten().tolist())
        assert len(numbers) == 1, numbers
        found[directory.name] = numbers.pop()
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    outcomes = []
    # (name of what is saved, the rank that dies): one in the place of another, which rank 0 has more to do for, and a
    # new checkpoint.
    for name, victim in (("checkpoint-1", 0), ("checkpoint-2", 1)):
        for instant in itertools.count():
            run = folder / f"{name}-{victim}-{instant}"
            save(Saver(RankGroup()), run / "checkpoint-1", tensors(1.0, None), wait=True)
            lived = killed_at(run, run / name, victim, instant)
            after = values(run)
            # The next save clears up.
            save(Saver(RankGroup()), run / name, tensors(4.0, None), wait=True)
            left = sorted(path.name for path in run.iterdir())
            outcomes.append({"saves": name, "rank": victim, "instant": instant, "found": after, "left": left})
            shutil.rmtree(run)
            if not lived:
                break
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
