"""Write a checkpoint's tensors as they come, so that no more than one shard of them is in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from forerun.checkpoint.reader import INDEX, SINGLE

SHARD_BYTES = 2 << 30


def write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write safetensors files, and an index if they are several, under the names that transformers gives them.

    Args:
        directory: an empty one, or a scratch one (`forerun.checkpoint.writer.scratch_directory`).
        tensors: (name, tensor), each name once. They are taken one by one.
        shard_bytes: a file holds as many tensors as fit into this, and at least one.
    """
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total = 0

    def flush() -> None:
        nonlocal pending_bytes
        save_file(pending, directory / f"part-{len(shards)}", {"format": "pt"})
        shards.append(list(pending))
        pending.clear()
        pending_bytes = 0

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = tensor.contiguous()
        pending_bytes += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        os.rename(directory / "part-0", directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        os.rename(directory / f"part-{number}", directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
