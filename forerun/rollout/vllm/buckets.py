"""Weights on their way into another process of this machine: files in shared memory, one at a time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from forerun.models.weight_stream import Named
from forerun.rollout.served import buckets

_SHARED_MEMORY = "/dev/shm"


def shared_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory in memory where the system has such a thing, else the usual one for temporary files."""
    place = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="forerun-weights-", dir=place)


def write_buckets(tensors: Iterable[Named], directory: Path, bucket_bytes: int) -> Iterator[Path]:
    """Write the tensors, which are in host memory, to files of at most `bucket_bytes` each, or of one larger tensor.

    A file is removed when the next one is asked for, and its tensors are let go when it is written: there is never more
    than one bucket.
    """
    for bucket in buckets(tensors, bucket_bytes):
        yield from _written(bucket, directory)


def _written(bucket: list[Named], directory: Path) -> Iterator[Path]:
    path = directory / "bucket.safetensors"
    try:
        _write(bucket, path)
        bucket.clear()
        yield path
    finally:
        path.unlink(missing_ok=True)


def _write(bucket: list[Named], path: Path) -> None:
    ready: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in bucket:
        tensor = tensor.contiguous()
        # A copy of the embedding is lent twice, and safetensors refuses one tensor under two names.
        ready[name] = tensor.clone() if tensor.data_ptr() in places else tensor
        places.add(ready[name].data_ptr())
    save_file(ready, path)
