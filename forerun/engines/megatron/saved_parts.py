"""What a rank writes into a checkpoint and reads back: its part of weights and optimizer state, as the layout cut them.

So a checkpoint resumes in the layout that wrote it. Another layout, or another engine, starts from an export, whose
weights are whole under Hugging Face names. (Megatron-core's own sharded checkpoints, which reshard, assert on a tied
embedding that the last pipeline stage has a copy of.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forerun.engines.checkpoint_directory import STATE_FILE, flush
from forerun.engines.megatron.optimizer import MegatronOptimizer
from forerun.engines.random_state import (
    RandomState,
    random_file,
    random_state,
    read_random_state,
    restore_random_state,
    write_random_state,
)
from forerun.errors import ForerunError, one_line
from forerun.report.atomic import failures

DIRECTORY = "parts"
_TRACKER = "tracker."


def _weights(models: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for index, model in enumerate(models):
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):
                yield f"model.{index}.{name}", tensor.detach()


def _optimized(optimizer: MegatronOptimizer) -> Iterator[tuple[str, Any, Tensor]]:
    """(name, torch's optimizer, what it updates) of this rank: parameters, or their shards in float32."""
    for which, part in enumerate(optimizer.optimizers):
        inner = part.optimizer
        for group, entry in enumerate(inner.param_groups if inner is not None else ()):
            for index, parameter in enumerate(entry["params"]):
                yield f"{which}.{group}.{index}", inner, parameter


def part_tensors(models: Sequence[nn.Module], optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    """Everything of this rank that is a tensor and goes on from one step to the next."""
    tensors = dict(_weights(models))
    for name, inner, parameter in _optimized(optimizer):
        tensors[f"main.{name}"] = parameter.detach()
        for key, value in inner.state.get(parameter, {}).items():
            tensors[f"{key}:{name}"] = torch.as_tensor(value).detach()
    return tensors


def part_randoms() -> RandomState:
    """Random numbers of this rank, megatron-core's generators included."""
    tensors, values = random_state()
    return tensors | {_TRACKER + name: state for name, state in get_cuda_rng_tracker().get_states().items()}, values


def write_part(directory: Path, rank: int, tensors: Mapping[str, Tensor], randoms: RandomState) -> None:
    """Write this rank's files into a checkpoint that is being written.

    Raises:
        ForerunError: one cannot be written.
    """
    write_random_state(directory, rank, randoms)
    path = _path(directory, rank)
    whole: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        here = tensor.cpu().contiguous()
        storage = here.untyped_storage().data_ptr()
        # Weights in float32 are their own main copy, and safetensors refuses memory under two names.
        whole[name] = here.clone() if storage in seen else here
        seen.add(storage)
    with failures(path):
        path.parent.mkdir(exist_ok=True)
        save_file(whole, path)
        flush(path)


def read_document(directory: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in the checkpoint's STATE_FILE.

    Args:
        wanted: entries that say how the ranks divide the model; they must be the same now.

    Raises:
        ForerunError: it is no checkpoint of this engine, or of another layout.
    """
    try:
        document: dict[str, Any] = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ForerunError(f"{directory} is not a training checkpoint ({one_line(error)})") from error
    if not isinstance(document, dict) or "layout" not in document:
        raise ForerunError(f"{directory} was written by another engine: set engine.strategy=torch")
    for key, value in wanted.items():
        if document.get(key) != value:
            raise ForerunError(
                f"it was written with {key}={document.get(key)}, and this run has {value}: resume with the same, or "
                "start anew from an exported model"
            )
    for name, kind in (("global_step", int), ("schedule", dict), ("extra", dict)):
        if not isinstance(document.get(name), kind):
            raise ForerunError(
                f"{directory / STATE_FILE} has no {name} of type {kind.__name__}: resume from an older checkpoint"
            )
    return document


def read_part(
    directory: Path, rank: int, models: Sequence[nn.Module], optimizer: MegatronOptimizer
) -> tuple[dict[str, Tensor], RandomState]:
    """A rank's `part_tensors` and `part_randoms`, for these models and this optimizer.

    Raises:
        ForerunError: the file is missing or damaged, or belongs to another model.
    """
    path = _path(directory, rank)
    reading = random_file(directory, rank)
    try:
        randoms = read_random_state(directory, rank)
        reading = path
        tensors = load_file(path)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ForerunError(f"{reading} cannot be read ({one_line(error)}): resume from an older checkpoint") from error
    wanted = _places(models, optimizer)
    for name in sorted(tensors.keys() - wanted.keys()):
        key, _, of = name.partition(":")
        if (main := wanted.get(f"main.{of}")) is not None:
            wanted[name] = torch.zeros((), dtype=torch.float32) if key == "step" else main
    for name, place in wanted.items():
        if name not in tensors or tensors[name].shape != place.shape:
            raise ForerunError(f"{path} has no {name} of shape {list(place.shape)}: it belongs to another model")
        if (dtype := tensors[name].dtype) != place.dtype:  # which copying would round without a word
            raise ForerunError(
                f"{path} has {name} in {dtype}, and here it is in {place.dtype}: resume with the model.dtype that it "
                "was written with"
            )
    if strange := sorted(tensors.keys() - wanted.keys()):
        raise ForerunError(f"{path} has {strange[0]}, which has no place here: it belongs to another model")
    return tensors, randoms


@torch.no_grad()
def restore_part(
    tensors: Mapping[str, Tensor], randoms: RandomState, models: Sequence[nn.Module], optimizer: MegatronOptimizer
) -> None:
    """Put what `read_part` gave back into models, optimizer and generators."""
    for name, tensor in _places(models, optimizer).items():
        tensor.copy_(tensors[name])
    by_name = {name: (inner, parameter) for name, inner, parameter in _optimized(optimizer)}
    for full_name, tensor in tensors.items():
        key, separator, name = full_name.partition(":")
        if separator:
            inner, parameter = by_name[name]
            inner.state[parameter][key] = tensor.clone() if key == "step" else tensor.to(parameter.device, copy=True)
    restore_random_state(randoms)
    states = {name.removeprefix(_TRACKER): t for name, t in randoms[0].items() if name.startswith(_TRACKER)}
    get_cuda_rng_tracker().set_states(states)


def _places(models: Sequence[nn.Module], optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    """Every tensor of `part_tensors` that there is before the first step, too."""
    return dict(_weights(models)) | {f"main.{name}": p.detach() for name, _, p in _optimized(optimizer)}


def _path(directory: Path, rank: int) -> Path:
    return directory / DIRECTORY / f"{rank:05}.safetensors"
