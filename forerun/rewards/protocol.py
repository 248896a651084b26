"""What a reward function is, and what becomes of one call of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Messages = list[dict[str, str]]


class RewardFunction(Protocol):
    """Judges one response. May raise and may hang: both become a zero reward with a name.

    verl's signature, `compute_score(data_source, solution_str, ground_truth, extra_info)`, is taken too.
    """

    def __call__(self, prompt: Messages, response: str, ground_truth: str | None, extra: dict[str, Any]) -> float: ...


@dataclass(frozen=True)
class RewardRequest:
    """One response to judge. `extra` holds JSON values; `data_source` picks the function where several serve."""

    prompt: Messages
    response: str
    ground_truth: str | None
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """A score, what else the function told, and what went wrong if something did.

    `fields` are the numbers of a dict that the function returned, "score" aside: they become metrics `reward/NAME`.
    `event` is None, "exception", "timeout", "died" (the worker process ended) or "not_a_number"; with an event the
    score is 0. `detail` is one line for the log.
    """

    score: float
    event: str | None = None
    detail: str = ""
    fields: Mapping[str, float] = field(default_factory=dict)
