"""What a reward function is, and what becomes of one call of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Messages = list[dict[str, str]]


class RewardFunction(Protocol):
    """Judges one response. May raise and may hang: both become a zero reward with a name.

    Returns a number, or a dict with one under "score"; the dict's other numbers become metrics. verl's signature,
    `compute_score(data_source, solution_str, ground_truth, extra_info)`, is taken too, and so is `async def`.
    """

    def __call__(self, prompt: Messages, response: str, ground_truth: Any, extra: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class RewardRequest:
    """One response to judge.

    `ground_truth` and `extra` hold JSON values; `data_source` picks the function where several serve.
    """

    prompt: Messages
    response: str
    ground_truth: Any
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    """A score, what else the function told, and what went wrong if something did.

    `fields` are the numbers of a dict that the function returned, "score" aside: they become metrics `reward/NAME`.
    `event` is None, "exception", "timeout", "died" (the worker process ended) or "not_a_number" (nor one that is
    finite); with an event the score is 0. `detail` is one line for the log.
    """

    score: float
    event: str | None = None
    detail: str = ""
    fields: Mapping[str, float] = field(default_factory=dict)
