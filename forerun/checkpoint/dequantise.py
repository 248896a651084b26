"""Checkpoints of eight-bit floating point weights with scales, written out in bfloat16: what training starts from.

DeepSeek-V3 and R1, the FP8 versions of Qwen3-Next, Qwen3.5 and GLM-4.5 and others are published so, MTP block included.
transformers takes the size of a scale's block from the weight's, so it refuses a weight whose last block is smaller
(576 rows in blocks of 128) and scales another wrongly (192 rows); here config.json says it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.checkpoint.files import shown
from forerun.checkpoint.quantised import quantisation_settings
from forerun.checkpoint.reader import CONFIG, CheckpointReader
from forerun.checkpoint.shards import SHARD_BYTES, new_directory, write_checkpoint
from forerun.errors import UsageError

# What a weight's scale is called behind the weight's name: DeepSeek's and Qwen's, compressed-tensors' and AutoFP8's.
_SCALES = ("_scale_inv", "_scale")
# Scales of activations and of the key-value cache, which weights in bfloat16 have no use for.
_OF_ACTIVATIONS = (".activation_scale", ".input_scale", ".output_scale", ".k_scale", ".v_scale")
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2")
_ONLY = "only float8 weights with their scales are written in bfloat16, so give the checkpoint that it was made from"


def refuse_quantised(reader: CheckpointReader) -> None:
    """Refuse a checkpoint whose config.json says that its weights are quantised.

    Raises:
        UsageError: it does; the line says what to do.
    """
    if (settings := quantisation_settings(reader.config)) is not None:
        raise UsageError(
            f"{reader.path} is quantised ({_method(settings)}): write it in bfloat16 first, with forerun convert "
            f"{reader.path} OUT --to bfloat16, or give the checkpoint that it was made from"
        )


def dequantise(
    source: str | Path,
    out: str | Path,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Write a checkpoint of float8 weights and scales as one of bfloat16 weights, without its quantization_config.

    A weight is its float8 numbers times its scale, in float32, rounded once: a scale for a block of
    `weight_block_size`, for a row, or for all of it. What is not quantised stays as it is. Tensors are read and written
    one by one; the directory appears whole or not at all.

    Args:
        report: is called after each tensor with how many are written, and of how many.

    Raises:
        UsageError: `out` is taken, the source is not quantised, or otherwise than so.
    """
    out = new_directory(out)
    reader = CheckpointReader(source)
    settings = quantisation_settings(reader.config)
    if settings is None:
        raise UsageError(f"{reader.path} is not quantised: {CONFIG} has no quantization_config")
    block = _block(settings)
    names = reader.tensor_names
    dtypes = {name: header.dtype for shard in reader.shards for name, header in reader.headers(shard).items()}
    packed = [name for name in names if dtypes.get(name) in _EIGHT_BITS]
    scale_of = {name: name + end for end in _SCALES for name in packed if name + end in names}
    left = names - set(scale_of.values()) - {name for name in names if name.endswith(_OF_ACTIVATIONS)}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        # In the order of the files, each of which is then read once.
        for count, name in enumerate(sorted(left, key=lambda name: (reader.file_of(name), name)), 1):
            tensor = reader.tensor(name)
            if name in scale_of:
                tensor = _scaled(name, tensor, reader.tensor(scale_of[name]), block).to(torch.bfloat16)
            elif not tensor.is_floating_point() or tensor.element_size() < 2:
                raise UsageError(f"{shown(name)} is quantised ({tensor.dtype}) without a scale of its own: {_ONLY}")
            yield name, tensor
            report(count, len(left))

    write_checkpoint(out, tensors(), _plain(reader.config), reader.path, shard_bytes=shard_bytes)


def _scaled(name: str, weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """The weight in float32, [..., rows, columns]."""
    if not scale.is_floating_point():
        raise UsageError(f"{shown(name)} has scales in {scale.dtype}: {_ONLY}")
    whole, scale = weight.float(), scale.float()
    if scale.numel() == 1:
        return whole.mul_(scale.reshape(()))
    *experts, rows, columns = whole.shape
    if list(scale.shape) == [*experts, rows, 1]:
        return whole.mul_(scale)
    if block is None:
        raise UsageError(
            f"{shown(name)} has scales of shape {list(scale.shape)}, and {CONFIG} no weight_block_size: restore the "
            "quantization_config that was saved with these weights"
        )
    needed = [*experts, -(-rows // block[0]), -(-columns // block[1])]
    if list(scale.shape) != needed:
        raise UsageError(
            f"{shown(name)} has scales of shape {list(scale.shape)}, weight_block_size={list(block)} implies {needed}: "
            "restore the quantization_config that was saved with these weights"
        )
    wide = scale.repeat_interleave(block[1], -1)[..., :columns]
    for place in range(needed[-2]):  # so that the scales never take the room of the whole weight
        whole[..., place * block[0] : (place + 1) * block[0], :] *= wide[..., place : place + 1, :]
    return whole


def _block(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """`weight_block_size`, or compressed-tensors' `block_structure`."""
    found = settings.get("weight_block_size")
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        found = found or (weights.get("block_structure") if isinstance(weights, dict) else None)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and n > 0 for n in found):
        raise UsageError(f"weight_block_size={found!r} in {CONFIG} is no pair of positive whole numbers: restore it")
    return found[0], found[1]


def _method(settings: Mapping[str, Any]) -> str:
    return str(settings.get("quant_method") or settings.get("format") or "by an unnamed method")[:40]


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the weights in bfloat16."""
    left = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    for key in ("dtype", "torch_dtype"):
        if key in left:
            left[key] = "bfloat16"
    if isinstance(left.get("text_config"), dict):
        left["text_config"] = _plain(left["text_config"])
    return left
