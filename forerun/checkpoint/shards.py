"""Write a checkpoint from tensors as they come: no more than one shard of them is in memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from forerun.checkpoint.reader import CONFIG, INDEX, SINGLE
from forerun.checkpoint.writer import carry_over, replace_files, scratch_directory
from forerun.errors import UsageError

SHARD_BYTES = 5 * 10**9  # the customary "5GB"


def new_directory(out: str | Path) -> Path:
    """`out`, which does not exist or is an empty directory.

    Raises:
        UsageError: something is there.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already: name a new directory")
    return out


def write_checkpoint(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    source: Path,
    code: Sequence[Path] = (),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint made from another one. A new directory appears whole or not at all.

    Args:
        out: see `new_directory`.
        tensors, shard_bytes: as `write_shards` takes them.
        config: config.json.
        source: the checkpoint that it was made from, whose tokenizer and the like go along.
        code: Python files to put beside the weights.
    """
    with scratch_directory(out) as scratch:
        write_shards(scratch, tensors, shard_bytes)
        (scratch / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for file in code:
            shutil.copy(file, scratch)
        carry_over(source, scratch, out)
        replace_files(scratch, out)


def write_shards(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write safetensors files, and an index if they are several, under the names that transformers gives them.

    Args:
        directory: one without weights.
        tensors: (name, tensor), each name once, on any device. They are taken one by one.
        shard_bytes: a file holds as many tensors as fit into this, and at least one.
        metadata: of the index, besides total_size.
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
        pending[name] = tensor.cpu().contiguous()
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
    index = {"metadata": {**(metadata or {}), "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
