"""Ranks that compute with one model have read the same config.json: weights of equal shapes would not show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forerun.engines.ranks import RankGroup
from forerun.errors import UsageError

# Where a model was read and how it is stored, which is compared weight by weight, and by whom the file was written.
_STORED = frozenset({"_name_or_path", "dtype", "quantization_config", "transformers_version"})


def agree_on_settings(config: Mapping[str, Any], ranks: RankGroup) -> None:
    """Every rank calls it with its model's configuration.

    Raises:
        UsageError: on every rank: another rank's says something else than rank 0's of how the model computes.
    """
    settings = dict(_settings(config))
    ranks.fail_together(_difference(settings, ranks.agree(settings)))


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value)."""
    sections = [("", config)]
    for prefix, section in sections:
        for name, value in section.items():
            if isinstance(value, dict) and name not in _STORED:
                sections.append((f"{prefix}{name}.", value))
            elif name not in _STORED:
                yield f"{prefix}{name}", value


def _difference(own: Mapping[str, Any], first: Mapping[str, Any]) -> UsageError | None:
    for name in sorted(own.keys() | first.keys()):
        if own.get(name) != first.get(name):
            return UsageError(
                f"this rank's model has {name}={own.get(name)}, rank 0's {first.get(name)}: give every rank the same "
                "config.json"
            )
    return None
