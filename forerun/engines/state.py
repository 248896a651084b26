"""Resume state on disk: what a training step depends on besides the model's weights, as safetensors and JSON.

A checkpoint is a directory `checkpoint-<step>` inside the run directory: the model as a Hugging Face directory, and
beside its files `optimizer.safetensors` (moments under parameter names), `random_state.safetensors` and
`trainer_state.json`. Nothing is pickled.
"""

from __future__ import annotations

import glob
import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forerun.engines.data_parallel import like, whole
from forerun.errors import ForerunError
from forerun.report.atomic import failures

STATE_FILE = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
RANDOM_FILE = "random_state.safetensors"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def checkpoints(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first. A directory being written has another name and is not listed."""
    if not run_dir.is_dir():
        return []
    found = [(int(match[1]), path) for path in run_dir.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest whole checkpoint by step number, or None."""
    found = checkpoints(run_dir)
    return found[-1] if found else None


def prune_checkpoints(run_dir: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints (at least one stays; 0 keeps all)."""
    if keep < 1:
        return
    for path in checkpoints(run_dir)[:-keep]:
        # Renamed first, so that a kill in the middle leaves nothing that looks like a checkpoint.
        doomed = path.with_name(f".{path.name}.deleted")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A directory to write into that takes the name `directory` only when the block ends well and all is on the disk.

    Until then it has a dotted name beside it, which an interrupted run leaves behind and the next save clears away. A
    directory already there is replaced.

    Raises:
        ForerunError: disk full, permission denied and the like; what was there before stays.
    """
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    replaced = directory.with_name(f".{directory.name}.replaced")
    with failures(directory):
        _put_back(replaced, directory)  # of a save that was killed between its two renames
        # The last are `checkpoint.writer.scratch_directory`'s, of a save killed while it wrote the model.
        inner = directory.parent.glob(f".{glob.escape(unfinished.name)}.*.partial")
        for leftover in (unfinished, replaced, *inner):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            for path in [*unfinished.rglob("*"), unfinished]:
                _flush(path)
            if directory.exists():
                directory.rename(replaced)
            unfinished.rename(directory)
            _flush(directory.parent)
        except BaseException:
            _put_back(replaced, directory)
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        shutil.rmtree(replaced, ignore_errors=True)


def _put_back(replaced: Path, directory: Path) -> None:
    if replaced.exists() and not directory.exists():
        replaced.rename(directory)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors of a checkpoint, one at a time, under Hugging Face names.

    Raises:
        ForerunError: there are none, or a file is damaged.
    """
    files = [f for f in sorted(directory.glob("*.safetensors")) if f.name not in (OPTIMIZER_FILE, RANDOM_FILE)]
    if not files:
        raise ForerunError(f"{directory} is not a training checkpoint: it has no model weights")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a safetensors handle is not a dict
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ForerunError(f"{file} cannot be read ({error}): resume from an older checkpoint") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Every state tensor in full as `<key>:<parameter name>`, e.g. `exp_avg:model.layers.0.mlp.up_proj.weight`."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}:{name}"] = whole(torch.as_tensor(value).detach()).cpu().contiguous()
    return tensors


def restore_optimizer(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put `optimizer_tensors`' result back.

    Raises:
        ForerunError: state that belongs to no parameter of this optimizer, or has another shape.
    """
    state: dict[str, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        key, _, name = full_name.partition(":")
        if name not in named:
            raise ForerunError(
                f"the checkpoint holds optimizer state of {name}, which is not being trained now: "
                "resume with the same train_trunk and mtp settings"
            )
        if key != "step" and value.shape != named[name].shape:
            raise ForerunError(
                f"optimizer state of {name} has shape {list(value.shape)}, the parameter {list(named[name].shape)}: "
                "the checkpoint belongs to another model"
            )
        state.setdefault(name, {})[key] = value
    optimizer.state.clear()
    for name, entries in state.items():
        parameter = named[name]
        # AdamW keeps its step counts on the CPU (unless fused) and the moments beside the parameter.
        optimizer.state[parameter] = {
            key: value.clone() if key == "step" else like(value, parameter).clone() for key, value in entries.items()
        }


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, JSON) of the generators of torch (CPU and every CUDA device), numpy and Python."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda.{index}"] = state
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss_next = random.getstate()
    return tensors, {
        "numpy": [kind, int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }


def restore_random_state(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Put `random_state`'s result back; CUDA devices that this machine lacks are passed over."""
    torch.set_rng_state(tensors["torch"].to(torch.uint8))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if (state := tensors.get(f"cuda.{index}")) is not None:
                torch.cuda.set_rng_state(state.to(torch.uint8), index)
    kind, position, has_gauss, gauss = values["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = values["python"]
    random.setstate((version, tuple(internal), gauss_next))


def write_state(
    directory: Path,
    moments: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    named: Mapping[str, nn.Parameter],
    global_step: int,
    extra: Mapping[str, Any],
) -> None:
    """Write the three state files into `directory`, which the caller renames into place when all is there.

    `moments` are `optimizer_tensors` of this optimizer.
    """
    save_file(moments, directory / OPTIMIZER_FILE)
    tensors, random_values = random_state()
    save_file(tensors, directory / RANDOM_FILE)
    schedule = {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"}
    content = {
        "global_step": global_step,
        # Not all of them need have optimizer state: an expert that no token reached has never had a gradient.
        "trained": sorted(named),
        "scheduler": schedule,
        "learning_rates": [group["lr"] for group in optimizer.param_groups],
        "random": random_values,
        "extra": dict(extra),
    }
    (directory / STATE_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_state(
    directory: Path,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    named: Mapping[str, nn.Parameter],
) -> tuple[int, dict[str, Any]]:
    """Restore optimizer, schedule and random numbers. Returns (global step, the trainer's extra).

    Raises:
        ForerunError: a file is missing or damaged, or the state is another model's.
    """
    try:
        content = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
        if absent := {"global_step", "trained", "scheduler", "learning_rates", "random", "extra"} - set(content):
            raise ValueError(f"{STATE_FILE} lacks {min(absent)}")
        trained = set(content["trained"])
        moments = load_file(directory / OPTIMIZER_FILE)
        randoms = load_file(directory / RANDOM_FILE)
    except FileNotFoundError as error:
        raise ForerunError(
            f"{directory} is not a training checkpoint: {Path(error.filename or '').name or error} is missing"
        ) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise ForerunError(f"{directory} cannot be read ({error}): resume from an older checkpoint") from error
    if missing := sorted(named.keys() - trained):
        raise ForerunError(
            f"the checkpoint was made without training {missing[0]} (and {len(missing) - 1} more): "
            "resume with the same train_trunk and mtp settings"
        )
    restore_optimizer(optimizer, named, moments)
    scheduler.load_state_dict({**content["scheduler"], "lr_lambdas": [None] * len(optimizer.param_groups)})
    for group, lr in zip(optimizer.param_groups, content["learning_rates"], strict=True):
        group["lr"] = lr
    restore_random_state(randoms, content["random"])
    return int(content["global_step"]), content["extra"]
