"""What a training step depends on besides the model's weights: optimizer, schedule, step count, random numbers.

A checkpoint is a directory `checkpoint-<step>` inside the run directory; docs/checkpoints.md says what lies in it.
Nothing is pickled.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from forerun.engines.checkpoint_directory import STATE_FILE
from forerun.engines.random_state import RandomState, read_random_state, restore_random_state, write_random_state
from forerun.engines.ranks import RankGroup
from forerun.engines.tensor_shards import SavedTensors, write_tensors
from forerun.errors import ForerunError, one_line
from forerun.models.carrier import check_names
from forerun.report.atomic import write_text

OPTIMIZER_DIRECTORY = "optimizer"
# Checkpoints from before ranks wrote their own parts do not list their files. The optimizer's tensors lie among the
# model's there, and rank 0's random numbers in this file.
OLD_RANDOM_FILE = "random_state.safetensors"
# What a STATE_FILE has at least.
_KINDS = {"global_step": int, "trained": list, "scheduler": dict, "learning_rates": list, "extra": dict}


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Every state tensor as `<key>:<parameter name>`, e.g. `exp_avg:lm_head.weight`; one in shards stays in shards."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}:{name}"] = torch.as_tensor(value).detach()
    return tensors


def optimizer_targets(named: Mapping[str, nn.Parameter], index: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors to read `optimizer_tensors`' result into, laid out over ranks and devices as their parameters are.

    Args:
        named: the parameters that are trained.
        index: names and shapes of the saved ones.

    Raises:
        ForerunError: state that belongs to no parameter of this optimizer, or has another shape.
    """
    targets: dict[str, Tensor] = {}
    for full_name, saved in index.items():
        key, _, name = full_name.partition(":")
        if name not in named:
            raise ForerunError(
                f"the checkpoint holds optimizer state of {name}, which is not being trained now: "
                "resume with the same train_trunk and mtp settings"
            )
        if key == "step":  # AdamW keeps it on the CPU, unless it is fused
            targets[full_name] = torch.zeros(saved.shape, dtype=saved.dtype)
            continue
        if saved.shape != named[name].shape:
            raise ForerunError(
                f"optimizer state of {name} has shape {list(saved.shape)}, the parameter {list(named[name].shape)}: "
                "the checkpoint belongs to another model"
            )
        targets[full_name] = torch.zeros_like(named[name].detach())
    return targets


def restore_optimizer(
    optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Put `optimizer_tensors`' result back."""
    optimizer.state.clear()
    for full_name, value in tensors.items():
        key, _, name = full_name.partition(":")
        fused = key == "step" and optimizer.defaults.get("fused")
        optimizer.state[named[name]][key] = value.to(named[name].device) if fused else value


def state_document(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    named: Mapping[str, nn.Parameter],
    global_step: int,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that is no tensor, as JSON."""
    return {
        "global_step": global_step,
        # Not all of them need have optimizer state: an expert that no token reached has never had a gradient.
        "trained": sorted(named),
        "scheduler": {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"},
        "learning_rates": [group["lr"] for group in optimizer.param_groups],
        "extra": copy.deepcopy(dict(extra)),  # it is written later, perhaps, and may change until then
    }


def write_state(
    directory: Path,
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    randoms: RandomState,
    document: Mapping[str, Any],
    ranks: RankGroup,
) -> None:
    """Write into a checkpoint that is being written. Every rank calls it.

    Args:
        directory: where the model lies already if its weights are not among `weights`.
        weights: under their checkpoint names, in shards.
        moments: `optimizer_tensors`.
        randoms: this rank's `random_state`.
        document: `state_document`.
        ranks: who writes.
    """

    def write_document() -> None:
        files = sorted(directory.rglob("*.safetensors"))
        sizes = {file.relative_to(directory).as_posix(): file.stat().st_size for file in files}
        content = {**document, "num_ranks": ranks.size, "files": sizes}
        write_text(directory / STATE_FILE, json.dumps(content, indent=1))

    ranks.on_each(lambda: write_random_state(directory, ranks.rank, randoms))
    if weights:
        write_tensors(directory, weights, ranks)
    # Apart: transformers takes a directory with such files for a model in shards.
    write_tensors(directory / OPTIMIZER_DIRECTORY, moments, ranks)
    ranks.on_first(write_document)


class SavedState:
    """A checkpoint to resume from, whatever the number of ranks that wrote it. Every rank makes one.

    Attributes:
        document: `state_document`'s.
        weights, moments: names of the model's tensors and of `optimizer_tensors`, each with a meta tensor of its shape.

    Raises:
        ForerunError: a file is missing or damaged.
    """

    def __init__(self, directory: Path, ranks: RankGroup) -> None:
        self._directory = directory
        self._rank = ranks.rank
        self.document = ranks.on_first(lambda: _read_document(directory))
        self._weights = self._moments = SavedTensors(directory, ranks)
        if "files" in self.document:
            self._moments = SavedTensors(directory / OPTIMIZER_DIRECTORY, ranks)
        index = {name: tensor for name, tensor in self._weights.index.items() if not _is_random(name)}
        self.weights = {name: tensor for name, tensor in index.items() if ":" not in name}
        self.moments = {name: tensor for name, tensor in self._moments.index.items() if ":" in name}
        if not self.weights:
            raise ForerunError(f"{directory} is not a training checkpoint: it has no model weights")

    def check_weights(self, own: Mapping[str, Tensor]) -> None:
        """Raise a ForerunError if a weight is missing from, unknown to, or of another shape or dtype than `own`."""
        check_names(own, self.weights)
        for name, tensor in self.weights.items():
            if tensor.dtype != own[name].dtype:  # which reading would round without a word
                raise ForerunError(
                    f"the checkpoint holds {name} in {tensor.dtype}, this run's model in {own[name].dtype}: resume "
                    "with the model.dtype that it was written with, or start anew from an exported model"
                )

    def check_trained(self, named: Mapping[str, nn.Parameter]) -> None:
        """Raise a ForerunError if one of the parameters was not trained."""
        if missing := sorted(named.keys() - set(self.document["trained"])):
            raise ForerunError(
                f"the checkpoint was made without training {missing[0]} (and {len(missing) - 1} more): "
                "resume with the same train_trunk and mtp settings"
            )

    def read(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Fill them in place, whatever their layout over ranks is. Every rank calls it."""
        self._weights.read(weights)
        self._moments.read(moments)

    def restore_random_state(self) -> None:
        """Set the generators as they were on this rank; on another number of ranks than wrote them, as on this rank
        modulo that number."""
        with _reading(self._directory):
            if "files" not in self.document:
                restore_random_state((load_file(self._directory / OLD_RANDOM_FILE), self.document["random"]))
                return
            rank = self._rank % int(self.document["num_ranks"])
            restore_random_state(read_random_state(self._directory, rank))


def _read_document(directory: Path) -> dict[str, Any]:
    if not (directory / STATE_FILE).is_file():
        raise ForerunError(f"{directory} is not a training checkpoint: {STATE_FILE} is missing")
    with _reading(directory):
        content = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
        if "layout" in content:
            raise ForerunError(f"{directory} was written by another engine: set engine.strategy=megatron")
        for name, kind in _KINDS.items():
            if not isinstance(content.get(name), kind):
                raise ValueError(f"{STATE_FILE} has no {name} of type {kind.__name__}")
        if "files" in content:
            _check_files(directory, content["files"])
        return content


def _check_files(directory: Path, sizes: Mapping[str, int]) -> None:
    """Compare what lies there with what was written: a shard that is not there would leave its part of the weights as
    they are, and one too many would write over some."""
    for name, size in sizes.items():
        if (found := (directory / name).stat().st_size) != size:
            raise ValueError(f"{name} has {found} bytes instead of {size}")
    there = {file.relative_to(directory).as_posix() for file in directory.rglob("*.safetensors")}
    if strange := sorted(there - sizes.keys()):
        raise ForerunError(f"{directory} holds {strange[0]}, which is no part of the checkpoint: move it elsewhere")


@contextmanager
def _reading(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        said = f"{directory} cannot be read ({one_line(error)}): resume from an older checkpoint"
        raise ForerunError(said) from error


def _is_random(name: str) -> bool:
    """Whether a tensor is of an OLD_RANDOM_FILE, which lies among the model's."""
    return name in ("torch", "numpy") or name.startswith("cuda.")
