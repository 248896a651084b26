"""A model written as a Hugging Face directory from weights that come one by one: a shard of them is in memory.

Tensors go into the files layer by layer, as transformers' conversions between what modules hold and what files hold
(experts stacked or apart, for instance) never need more of them at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from forerun.checkpoint.shards import SHARD_BYTES, write_shards
from forerun.checkpoint.writer import replace_files, scratch_directory
from forerun.errors import ForerunError
from forerun.models.carrier import MTPCarrier, complete_files, copied_weights, mtp_weight_names
from forerun.models.layout import file_tensors

_LAYER = re.compile(r".*?\.\d+\.")


def saved_tensors(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """(name in `state_dict()`, tensor) of every one that `save_streamed` takes, in order, tied ones once. No copies.

    Raises:
        RuntimeError: weights share memory in a way that the model does not declare.
    """
    held = model.state_dict(keep_vars=True)
    block = mtp_weight_names(model) if isinstance(model, MTPCarrier) else {}
    trunk = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in held.items()
        if name not in block and name not in (model._keys_to_ignore_on_save or ())
    }
    kept = set(remove_tied_weights_from_state_dict(trunk, model))
    first = {stored: name for name, stored in reversed(block.items())}  # depths that share a module share its name
    kept |= set(first.values())
    return [(name, tensor.detach()) for name, tensor in held.items() if name in kept]


def stored_names(model: PreTrainedModel) -> set[str]:
    """The names of the tensors that `save_streamed` writes; of a model on the meta device, too."""
    return {name for name, _ in _as_stored(model, saved_tensors(model))}


def save_streamed(
    model: PreTrainedModel,
    directory: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write what `model.save_pretrained(directory)` does, whole or not at all, from other tensors than the model's.

    Args:
        model: only its structure, its configuration and what it says of its files count.
        directory: a new one, or one whose files are replaced.
        tensors: those of `saved_tensors`, whole, on any device. They are taken one by one.
        shard_bytes: the most that a file of weights holds, see `write_shards`.

    Raises:
        ForerunError: disk full; one name for two tensors.
    """
    save = super(MTPCarrier, model).save_pretrained if isinstance(model, MTPCarrier) else model.save_pretrained
    with scratch_directory(directory) as scratch:
        save(scratch, state_dict={}, save_original_format=False)  # configuration and code
        stored = _as_stored(model, tensors)
        write_shards(scratch, stored, shard_bytes, {"total_parameters": model.num_parameters()})
        if isinstance(model, MTPCarrier):
            complete_files(model, scratch, Path(directory))
        replace_files(scratch, directory)


def _as_stored(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors under the names, and in the pieces, that files have them in."""
    block: dict[str, str] = {}
    copies: dict[str, str] = {}
    if isinstance(model, MTPCarrier):
        block = mtp_weight_names(model)
        copies = copied_weights(model, dict(saved_tensors(model)))
    written: set[str] = set()
    for _, layer in groupby(tensors, lambda item: _layer_of(item[0])):
        for name, tensor in _layer_as_stored(model, dict(layer), block, copies):
            if name in written:
                raise ForerunError(f"{name} is the name of two tensors of the model: report this as a bug")
            written.add(name)
            yield name, tensor


def _layer_of(name: str) -> str:
    """What the tensors of a layer have in common; of one that lies in no layer, its own name."""
    found = _LAYER.match(name)
    return found[0] if found else name


def _layer_as_stored(
    model: PreTrainedModel, layer: dict[str, Tensor], block: Mapping[str, str], copies: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """See `mtp_weight_names` for `block` and `copied_weights` for `copies`."""
    yield from revert_weight_conversion(model, {n: tensor for n, tensor in layer.items() if n not in block}).items()
    for copy, name in copies.items():
        if name in layer:
            yield copy, layer[name].clone()  # safetensors refuses one tensor under two names
    if isinstance(model, MTPCarrier):
        stored = {block[name]: tensor for name, tensor in layer.items() if name in block}
        yield from file_tensors(model.mtp_family, model.mtp_layout, stored)
