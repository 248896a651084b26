"""Families of MTP-carrying checkpoints, one record each. What differs between them is data here, not code elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from forerun.errors import UsageError
from forerun.families.attached import ATTACHED
from forerun.families.mimo import MIMO
from forerun.families.record import FamilyRecord

# The fallback comes last: it serves every trunk that never had MTP of its own.
RECORDS: tuple[FamilyRecord, ...] = (MIMO, ATTACHED)


def family_of(config: Mapping[str, Any]) -> FamilyRecord:
    """The record for a checkpoint's config.json (as a dictionary)."""
    for record in RECORDS:
        if config.get("model_type") in record.model_types:
            return record
    return ATTACHED


def declared_depth(record: FamilyRecord, config: Mapping[str, Any]) -> int:
    """Number of MTP layers that config.json declares; 0 without the key.

    Raises:
        UsageError: the value is no number.
    """
    value = config.get(record.depth_key) or 0
    if not isinstance(value, int):
        raise UsageError(f"config.json has {record.depth_key}={value!r}: give the number of MTP layers")
    return value


def present_depth(record: FamilyRecord, tensor_names: Iterable[str]) -> int:
    """Number of MTP layers of which the checkpoint holds the projection."""
    names = set(tensor_names)
    depth = 0
    while record.tensor_name(depth, "proj.weight") in names:
        depth += 1
    return depth


__all__ = ["ATTACHED", "MIMO", "RECORDS", "FamilyRecord", "declared_depth", "family_of", "present_depth"]
