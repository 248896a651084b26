"""A model saved in the place of another one by a process that is killed (SIGKILL) at every instant in turn.

Run as `python -m tests.models.killed_exports FOLDER`. An instant is just before a renaming, link or deletion; what is
written before the first of them has another name. Then what lies there is read; and, if the instant before left
something else, others are saved over it, and what lies there is read at every instant of theirs. Prints a JSON list
with, for each instant: the case, its number, the value of the weights found, and for each later save the values found
on the way and at the end, and the files left.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from forerun import MTPConfig, attach, load
from forerun.checkpoint.reader import SINGLE, CheckpointReader
from forerun.models.carrier import named_weights
from forerun.models.saving import save_streamed, saved_tensors
from tests.instants import at_every_instant, die_at, ended, forked
from tests.models.tiny import tiny_model

WATCHED = ("os.rename", "os.link", "os.remove")
# Bytes to a file that make 4 and 1 of such a model.
MANY, ONE = 13_000, 1 << 30
# (what is there before, None: nothing; what is saved)
CASES = [(MANY, MANY), (ONE, MANY), (MANY, ONE), (None, MANY)]


def changed(value: float) -> PreTrainedModel:
    model = attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def save(model: PreTrainedModel, directory: Path, size: int) -> None:
    save_streamed(model, directory, saved_tensors(model), size)


def values(directory: Path) -> list[float]:
    """Of the weights that count, for readers that look for an index first and for those that look for one file."""
    reader = CheckpointReader(directory)
    shards = {shard: load_file(directory / shard) for shard in reader.shards}
    tensors = [shards[reader.file_of(name)][name] for name in reader.tensor_names]
    if (directory / SINGLE).exists():
        tensors += load_file(directory / SINGLE).values()
    return sorted({float(value) for tensor in tensors for value in (tensor.min(), tensor.max())})


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()} if directory.exists() else {}


def saved_over(directory: Path, model: PreTrainedModel, size: int) -> list[list[float]]:
    """What is read at each instant of a save."""
    notes = directory.parent / "notes"

    def note(_: int) -> None:
        with notes.open("a") as file:
            file.write(json.dumps(values(directory)) + "\n")

    def work() -> None:
        at_every_instant(WATCHED, directory.parent, note)
        save(model, directory, size)

    assert ended(forked(work)) == 0, (directory, size)
    found = [json.loads(line) for line in notes.read_text().splitlines()]
    notes.unlink()
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    old, new, later = (changed(value) for value in (1.0, 2.0, 3.0))
    outcomes: list[dict[str, Any]] = []
    for before, after in CASES:
        if before is not None:
            save(old, folder / "old", before)
        there: dict[str, bytes] = {}
        for instant in itertools.count():
            place = folder / "at" / "out"
            if before is not None:
                shutil.copytree(folder / "old", place)

            def work(place: Path = place, after: int = after, instant: int = instant) -> None:
                at_every_instant(WATCHED, place.parent, die_at(instant))
                save(new, place, after)

            code = ended(forked(work))
            assert code in (0, -signal.SIGKILL), code
            outcome = {"case": [before, after], "instant": instant, "found": None, "later": []}
            if place.exists() and contents(place) == there:  # as at the instant before
                outcome["found"] = outcomes[-1]["found"]
            elif there := contents(place):
                loaded = {float(value) for _, tensor in named_weights(load(place)) for value in tensor.unique()}
                outcome["found"] = sorted(loaded | set(values(place)))
                for size in (MANY, ONE):
                    again = folder / "again" / "out"
                    shutil.copytree(place, again)
                    outcome["later"].append({"size": size, "on_the_way": saved_over(again, later, size)})
                    outcome["later"][-1] |= {"end": values(again), "left": sorted(contents(again))}
                    shutil.rmtree(folder / "again")
            outcomes.append(outcome)
            shutil.rmtree(folder / "at")
            if code == 0:
                break
        shutil.rmtree(folder / "old", ignore_errors=True)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
