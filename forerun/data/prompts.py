"""Prompts for RL and generation: chat messages with what a reward needs to judge the answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.data.rows import BadRow, OnBadRow, Row, is_hub, parse_messages, read_rows
from forerun.errors import UsageError

Messages = list[dict[str, str]]
# Columns that hold the ground truth in data sets that are not verl's.
_GROUND_TRUTH = ("ground_truth", "answer", "solution")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        messages: chat messages, each {"role": ..., "content": ...}.
        ground_truth: what a verifiable reward compares with, a JSON value; None where nothing can be verified.
        data_source: names the data set; picks the reward.
        extra_info: JSON values handed to the reward.
        place: says where it came from, for errors.
    """

    messages: Messages
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    place: str = field(default="", compare=False)


def read_prompts(
    path: str | Path, on_bad_row: OnBadRow = "error", report: Callable[[str], None] | None = None
) -> list[Prompt]:
    """Read a JSONL or parquet file, or a data set of the Hub (`hub:NAME`), in verl's layout.

    Columns: `prompt` (chat messages, or a string for one turn of the user), and optionally `reward_model` with
    `ground_truth` in it, or else a column `ground_truth`, `answer` or `solution`; `data_source` (default: the file's
    name); `extra_info`. Others are left alone.

    Raises:
        UsageError: see `read_rows`.
    """
    default_source = str(path) if is_hub(path) else Path(path).stem

    def parse(row: Row, place: str) -> Prompt:
        if "prompt" not in row:
            raise BadRow(f"no column 'prompt' among {', '.join(map(repr, row)) or 'none at all'}")
        reward_model, extra_info = row.get("reward_model") or {}, row.get("extra_info") or {}
        for column, value in (("reward_model", reward_model), ("extra_info", extra_info)):
            if not isinstance(value, dict):
                raise BadRow(f"column {column!r} must be an object, not {value!r:.60}")
        truths = [reward_model.get("ground_truth"), *(row.get(column) for column in _GROUND_TRUTH)]
        return Prompt(
            messages=parse_messages(row["prompt"], "prompt"),
            ground_truth=next((value for value in truths if value is not None), None),
            data_source=str(row.get("data_source") or default_source),
            extra_info=extra_info,
            place=place,
        )

    return read_rows(path, parse, on_bad_row, report)


def split_prompts(prompts: Sequence[Prompt], num_held_out: int, seed: int = 0) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held-out): disjoint, together everything, each in the order of a shuffle made by `seed`.

    Prompts with the same messages go to the same side.

    Raises:
        UsageError: fewer prompts than would leave one to train on.
    """
    distinct: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        distinct.setdefault(json.dumps(prompt.messages), []).append(prompt)
    keys = list(distinct)
    if not 0 <= num_held_out < len(keys):
        raise UsageError(f"cannot hold out {num_held_out} of {len(keys)} distinct prompts: leave some to train on")
    random.Random(f"split/{seed}").shuffle(keys)
    held_out = [p for key in keys[:num_held_out] for p in distinct[key]]
    return [p for key in keys[num_held_out:] for p in distinct[key]], held_out
