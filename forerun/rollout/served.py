"""Weights on their way to an engine that was started on files: under the files' names, in buckets."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from forerun.families import FamilyRecord
from forerun.models.layout import split
from forerun.rollout.sync import Named


def split_experts(named_tensors: Iterable[Named], family: FamilyRecord, stored: Container[str]) -> Iterator[Named]:
    """The trainer's weights as files hold them: experts that a module stacks come one by one, as views.

    Args:
        named_tensors: under the trainer's names.
        family: says how its files hold experts.
        stored: the files' names; what is among them is left as it is.
    """
    for name, tensor in named_tensors:
        if name in stored:
            yield name, tensor
        else:
            yield from split(name, tensor, family)


def buckets(named_tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """Lists of tensors of at most `limit` bytes together; one that is larger goes alone."""
    bucket: list[Named] = []
    size = 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
