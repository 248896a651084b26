"""Families of MTP-carrying checkpoints, one record each. What differs between them is data here, not code elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from forerun.errors import UsageError
from forerun.families.attached import ATTACHED
from forerun.families.deepseek_v3 import DEEPSEEK_V3
from forerun.families.deepseek_v32 import DEEPSEEK_V32
from forerun.families.ernie4_5 import ERNIE4_5
from forerun.families.glm4_moe import GLM4_MOE
from forerun.families.glm_moe_dsa import GLM_MOE_DSA
from forerun.families.longcat_flash import LONGCAT_FLASH
from forerun.families.mimo import MIMO
from forerun.families.nemotron_h import NEMOTRON_H
from forerun.families.qwen3_5 import QWEN3_5
from forerun.families.qwen3_next import QWEN3_NEXT
from forerun.families.record import Duplicate, FamilyRecord, LayerSource
from forerun.families.unsupported import UNSUPPORTED

# The fallback comes last: it serves every trunk that never had MTP of its own.
RECORDS: tuple[FamilyRecord, ...] = (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    ERNIE4_5,
    GLM4_MOE,
    GLM_MOE_DSA,
    LONGCAT_FLASH,
    MIMO,
    NEMOTRON_H,
    QWEN3_5,
    QWEN3_NEXT,
    ATTACHED,
)


# Larger numbers are none that a checkpoint means, and would be counted up to.
MAX_DEPTH = 64
MAX_LAYERS = 10_000


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model: its text_config, or the whole of it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def family_of(config: Mapping[str, Any]) -> FamilyRecord:
    """The record for a checkpoint's config.json (as a dictionary).

    Raises:
        UsageError: the family carries MTP in a way that is not supported; the line says why.
    """
    for section in (config, text_section(config)):
        model_type = section.get("model_type")
        if model_type in UNSUPPORTED:
            raise UsageError(f"checkpoints of model_type {model_type} are not supported: {UNSUPPORTED[model_type]}")
        for record in RECORDS:
            if model_type in record.model_types:
                return record
    return ATTACHED


def declared_depth(record: FamilyRecord, config: Mapping[str, Any]) -> int | None:
    """Number of MTP layers that config.json declares, at its top or in its text_config; None without the key.

    Raises:
        UsageError: the value is no number, or above `MAX_DEPTH`.
    """
    for section in (config, text_section(config)):
        value = section.get(record.depth_key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_DEPTH:
                raise UsageError(
                    f"config.json has {record.depth_key}={value!r:.60}: give the number of MTP layers in the files"
                )
            return value
    return None


def present_depth(record: FamilyRecord, config: Mapping[str, Any], tensor_names: Collection[str]) -> int:
    """Number of MTP layers of which the checkpoint holds any tensor of the decoder layer."""
    layers = trunk_layers(config)
    depth = 0
    while record.max_layers is None or depth < record.max_layers:
        prefixes = record.prefixes(depth, layers, of="decoder.")
        if not any(name.startswith(prefixes) for name in tensor_names):
            break
        depth += 1
    return depth


def trunk_layers(config: Mapping[str, Any]) -> int:
    """The trunk's number of layers, from which some families number the MTP layers on; 0 where config.json has none.

    Raises:
        UsageError: the value is no number of layers.
    """
    value = text_section(config).get("num_hidden_layers")
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LAYERS:
        raise UsageError(f"config.json has num_hidden_layers={str(value)[:40]!r}: give a positive whole number")
    return value


__all__ = [
    "ATTACHED",
    "DEEPSEEK_V3",
    "DEEPSEEK_V32",
    "ERNIE4_5",
    "GLM4_MOE",
    "GLM_MOE_DSA",
    "LONGCAT_FLASH",
    "MAX_DEPTH",
    "MAX_LAYERS",
    "MIMO",
    "NEMOTRON_H",
    "QWEN3_5",
    "QWEN3_NEXT",
    "RECORDS",
    "UNSUPPORTED",
    "Duplicate",
    "FamilyRecord",
    "LayerSource",
    "declared_depth",
    "family_of",
    "present_depth",
    "text_section",
    "trunk_layers",
]
