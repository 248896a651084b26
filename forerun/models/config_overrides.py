"""Keys of a checkpoint's config.json set by a run, before its model is built: a longer context, another RoPE scaling.

What is overridden stands in config.json wherever the run saves the model.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_type_hints

from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from forerun.errors import UsageError, one_line
from forerun.families import FamilyRecord, family_of

# What says which code runs the model, or in what numbers it is stored: other settings, or other files.
_FIXED = {
    "model_type": "which model it is stands in its files",
    "architectures": "which model it is stands in its files",
    "auto_map": "which code runs it stands in its files",
    "quantization_config": "how it is stored stands in its files",
    "dtype": "set model.dtype",
    "torch_dtype": "set model.dtype",
    "attn_implementation": "set model.attn_implementation",
    "_attn_implementation": "set model.attn_implementation",
}
_ROPE = ("rope_parameters", "rope_scaling")  # transformers' name, and that of older files


class HasConfig(Protocol):
    """A `CheckpointReader`, or a config.json alone: a directory and what it holds."""

    path: Path
    config: dict[str, Any]


@dataclass
class ConfigFile:
    """A config.json without weights beside it."""

    path: Path
    config: dict[str, Any]


def build_config(reader: HasConfig, family: FamilyRecord, trust_remote_code: bool) -> PreTrainedConfig:
    """The trunk's configuration from `reader.config` as it is now, whatever the file says.

    Raises:
        Exception: whatever transformers raises at a value that it cannot use.
    """
    stored = _decoded(reader.config)  # a copy: transformers writes into the sections that it is given
    if family.trunk_model_type is not None:
        own = {k: v for k, v in stored.items() if k not in ("model_type", "architectures", "auto_map")}
        return AutoConfig.for_model(family.trunk_model_type, **own)
    found = AutoConfig.from_pretrained(reader.path, trust_remote_code=trust_remote_code)
    return type(found).from_dict(stored)


def _decoded(value: Any) -> Any:
    """A copy with the floats that JSON cannot spell, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(inner) for key, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


def overridden_config(
    reader: HasConfig, overrides: Mapping[str, Any], trust_remote_code: bool = False
) -> dict[str, Any]:
    """`reader.config` with the overrides merged in; no weight is read.

    Args:
        reader: the checkpoint.
        overrides: values by config.json's keys; what is nested there is nested here, or dotted
            ("rope_scaling.factor"). `rope_scaling` and `rope_parameters` are one, by whichever name the file has it.

    Raises:
        UsageError: a key that neither the file nor the model's configuration class has, with the nearest that is there;
            one that cannot be overridden; a value that the model's configuration refuses.
    """
    family = family_of(reader.config)
    try:
        defaults = build_config(reader, family, trust_remote_code)
    except Exception as error:  # a wrong value in config.json ends in whatever the model's code makes of it
        raise UsageError(f"transformers cannot read {reader.path}/config.json ({one_line(error):.200})") from error
    merged = copy.deepcopy(reader.config)
    for key, value in settings(overrides):
        _set(merged, key, value, defaults, reader)
    try:
        build_config(ConfigFile(reader.path, merged), family, trust_remote_code)
    except Exception as error:
        raise UsageError(
            f"model.override_config makes a configuration that the model refuses: {one_line(error):.300}"
        ) from error
    return merged


def settings(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every setting. An empty mapping is a value."""
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            yield from settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _set(config: dict[str, Any], key: str, value: Any, defaults: PreTrainedConfig, reader: HasConfig) -> None:
    *sections, last = key.split(".")
    place, known = config, _names(config, defaults)
    at: Any = defaults
    for done, name in enumerate([*sections, last]):
        if name in _FIXED:
            raise UsageError(f"model.override_config.{key} cannot be set: {_FIXED[name]}")
        if known is not None and name not in known:
            raise UsageError(
                f"model.override_config.{key} is no key of {reader.path}/config.json; {_nearest(key, config, defaults)}"
            )
        if name in _ROPE:
            name = next((spelt for spelt in _ROPE if spelt in place), "rope_scaling")
        elif name == "rope_theta" and isinstance(place.get("rope_parameters"), dict):
            place = place["rope_parameters"]  # where transformers has written it
        if done == len(sections):
            place[name] = value
            return
        inner = place.get(name)
        if not isinstance(inner, dict):
            inner = place[name] = {}
        at = getattr(at, name, None)
        known = set(get_type_hints(RopeParameters)) | {"type"} if name in _ROPE else _names(inner, at)
        place = inner


def _names(section: Mapping[str, Any], defaults: Any) -> set[str] | None:
    """Valid keys of a section; None where it is a free one, of which nothing is known."""
    names = set(section)
    if isinstance(defaults, PreTrainedConfig):
        names |= defaults.to_dict().keys() | defaults.attribute_map.keys()
        if hasattr(defaults, "rope_parameters"):
            names |= {*_ROPE, "rope_theta"}
    elif isinstance(defaults, Mapping):
        names |= defaults.keys()
    return names or None


def _nearest(key: str, config: Mapping[str, Any], defaults: PreTrainedConfig) -> str:
    """The valid key most like this one, here or a section below."""
    valid = _names(config, defaults) or set()
    for name in sorted(valid):
        inner = getattr(defaults, name, None)
        below = _names(config.get(name) or {}, inner) if isinstance(inner, PreTrainedConfig) else None
        valid |= {f"{name}.{part}" for part in below or ()}
    valid -= _FIXED.keys()
    by_end = {name.rpartition(".")[2]: name for name in sorted(valid, reverse=True)}
    last = key.rpartition(".")[2]
    if last in by_end:
        return f"did you mean {by_end[last]}?"
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)
    return f"did you mean {close[0]}?" if close else "it has none"
