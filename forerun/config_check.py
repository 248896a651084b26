"""What the values of a configuration's dataclasses must satisfy, and how that is said to someone who writes YAML.

Bounds stand with the fields (`bounded`), contradictions between fields in a dataclass's `validate`.
"""

from __future__ import annotations

import math
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from typing import Any, Literal

from forerun.errors import UsageError
from forerun.mtp.config import MTPConfig

_BOUNDS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "greater than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}


def bounded(default: Any, **bounds: float) -> Any:
    """A numeric field with bounds out of ge, gt, le, lt; `check` applies them, to each element of a tuple or list."""
    return field(default=default, metadata=bounds)


def check(config: Any, prefix: str = "") -> None:
    """Check bounds and contradictions of a configuration built in Python; `load_config` has done so already.

    Raises:
        UsageError: names the dotted key, the value and what is allowed.
    """
    hints = typing.get_type_hints(type(config))
    for item in fields(config):
        key, value = prefix + item.name, getattr(config, item.name)
        if is_dataclass(value):
            check(value, key + ".")
            continue
        if not _is_choice(value, hints[item.name]):
            raise UsageError(f"{key}={value!r} must be {type_name(hints[item.name])}")
        _check_bounds(key, value, item.metadata)
    if not hasattr(config, "validate"):
        return
    if isinstance(config, MTPConfig):
        try:
            config.validate()
        except ValueError as error:
            raise UsageError(str(error)) from error
    else:
        config.validate(prefix)


def _is_choice(value: Any, hint: Any) -> bool:
    """Whether a value is one that its Literal, or Literal or None, names; True of every other type."""
    choices = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is Literal]
    if not choices or (value is None and type(None) in typing.get_args(hint)):
        return True
    return any(value in typing.get_args(choice) for choice in choices)


def _check_bounds(key: str, value: Any, bounds: Mapping[str, Any]) -> None:
    for number in value if isinstance(value, list | tuple) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise UsageError(f"{key}={number} must be a finite number")
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        for bound, limit in bounds.items():
            holds, words = _BOUNDS[bound]
            if not holds(number, limit):
                raise UsageError(f"{key}={number} must be {words} {limit}")


def type_name(hint: Any) -> str:
    """A type in the words of someone who writes YAML."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args)
    if origin is list:
        return f"a list (each item {type_name(args[0])}), written [a, b]"
    if origin is tuple:
        return f"a list of {len(args)} items (each {type_name(args[0])})"
    if origin is dict:
        return "a section of key: value pairs"
    names = {float: "a number", int: "an integer", bool: "true or false", str: "text", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
