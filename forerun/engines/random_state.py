"""The random numbers of a process: the generators' states, and their file in a checkpoint, one for each rank."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.engines.checkpoint_directory import flush
from forerun.report.atomic import failures

DIRECTORY = "random"
# What of it is tensors, and what is JSON.
RandomState = tuple[dict[str, Tensor], dict[str, Any]]


def random_state() -> RandomState:
    """Of the generators of torch (CPU and every CUDA device), numpy and Python."""
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


def restore_random_state(state: RandomState) -> None:
    """Put `random_state`'s result back; CUDA devices that this machine lacks are passed over."""
    tensors, values = state
    torch.set_rng_state(tensors["torch"].to(torch.uint8))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if (found := tensors.get(f"cuda.{index}")) is not None:
                torch.cuda.set_rng_state(found.to(torch.uint8), index)
    kind, position, has_gauss, gauss = values["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = values["python"]
    random.setstate((version, tuple(internal), gauss_next))


def write_random_state(directory: Path, rank: int, state: RandomState) -> None:
    """Write a rank's file into a checkpoint that is being written.

    Raises:
        ForerunError: it cannot be written.
    """
    path = random_file(directory, rank)
    with failures(path):
        path.parent.mkdir(exist_ok=True)
        save_file(state[0], path, {"values": json.dumps(state[1])})
        flush(path)


def read_random_state(directory: Path, rank: int) -> RandomState:
    """What a rank wrote.

    Raises:
        OSError, SafetensorError, KeyError, TypeError, ValueError: the file is missing or damaged.
    """
    with safe_open(random_file(directory, rank), framework="pt") as saved:
        tensors = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118 - no dict
        return tensors, json.loads(saved.metadata()["values"])


def random_file(directory: Path, rank: int) -> Path:
    """Where they lie in a checkpoint."""
    return directory / DIRECTORY / f"{rank:05}.safetensors"
