"""Rows out of JSONL and parquet files and Hub data sets, each with its place, so that a bad one can be named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from forerun.errors import UsageError, one_line

OnBadRow = Literal["error", "skip"]
Row = dict[str, Any]
T = TypeVar("T")
HUB = "hub:"
# How many of several like faults are told; of the others, how many there are.
_TOLD = 3


class BadRow(ValueError):
    """A row that cannot be used; the message says why, without the place."""


def read_rows(
    path: str | Path,
    parse: Callable[[Row, str], T],
    on_bad_row: OnBadRow = "error",
    report: Callable[[str], None] | None = None,
) -> list[T]:
    """Parse every row of a `.jsonl`, `.json` (an object a line, or one list) or `.parquet` file, or a Hub data set.

    Args:
        path: a file; or `hub:NAME`, `hub:NAME:SPLIT` or `hub:NAME:CONFIG:SPLIT`, where NAME is what
            `datasets.load_dataset` takes and SPLIT is train unless given (slices such as `train[:100]` too).
        parse: turns a row into what is wanted, given the row and its place ("data.jsonl, line 7"); raises `BadRow`
            where it cannot.
        on_bad_row: "error" refuses a file with bad rows, "skip" leaves them out.
        report: called with one line if rows were left out.

    Raises:
        UsageError: no such file or data set, another kind of file, bad rows (how many, and the first by line; rows of
            parquet files and data sets are counted from 1), or no usable row at all.
    """
    places, word = _places(path)
    items: list[T] = []
    alike: dict[str, list[int]] = {}
    for number, row in places:
        try:
            if isinstance(row, BadRow):
                raise row
            items.append(parse(row, f"{path}, {word} {number}"))
        except BadRow as error:
            alike.setdefault(str(error), []).append(number)
    bad = sum(map(len, alike.values()))
    told = first_few([_told(word, numbers, reason) for reason, numbers in alike.items()])
    counted = f"{path}: {bad} of {len(items) + bad} rows cannot be used"
    if not items:
        raise UsageError(f"{counted}: {told}" if bad else f"{path} is empty: it has no rows")
    if bad and on_bad_row == "error":
        raise UsageError(f"{counted}: {told} (data.on_bad_row=skip leaves such rows out)")
    if bad and report is not None:
        report(f"{counted} and are left out: {told}")
    return items


def _told(word: str, numbers: Sequence[int], reason: str) -> str:
    more = f" and {len(numbers) - 1} like it" if len(numbers) > 1 else ""
    return f"{word} {numbers[0]}{more}: {reason}"


def first_few(told: Sequence[str]) -> str:
    """The first of several like things, and how many more there are."""
    more = len(told) - _TOLD
    return "; ".join([*told[:_TOLD], *([f"and {more} more"] if more > 0 else [])])


def is_hub(path: str | Path) -> bool:
    """Whether a name is a Hub data set's and no file's."""
    return str(path).startswith(HUB)


def _places(path: str | Path) -> tuple[Iterator[tuple[int, Row | BadRow]], str]:
    """The numbered rows, and what a number counts."""
    if is_hub(path):
        return _hub(str(path)), "row"
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path}: no such file: give a .jsonl or .parquet file, or a data set of the Hub as hub:NAME")
    if path.suffix == ".json" and _is_list(path):
        return _json_list(path), "item"
    if path.suffix in (".jsonl", ".json"):
        return _jsonl(path), "line"
    if path.suffix == ".parquet":
        return _parquet(path), "row"
    raise UsageError(f"{path}: cannot read {path.suffix or 'a file without a suffix'}: give .jsonl or .parquet")


def parse_messages(value: Any, column: str) -> list[dict[str, str]]:
    """Chat messages as they stand in a row; a string is one turn of the user.

    Raises:
        BadRow: not a list of {"role": ..., "content": ...} with strings.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise BadRow(f"column {column!r} must be a list of chat messages or a string, not {short(value)}")
    messages = []
    for turn in value:
        if (
            not isinstance(turn, dict)
            or not isinstance(turn.get("role"), str)
            or not isinstance(turn.get("content"), str)
        ):
            raise BadRow(f"column {column!r}: a message needs the strings 'role' and 'content', not {short(turn)}")
        if unread := [key for key in ("tool_calls", "reasoning_content", "thinking") if turn.get(key)]:
            raise BadRow(
                f"column {column!r}: {unread[0]!r} of a message is not read: write it into 'content' as the model does"
            )
        if not is_text(turn["content"]):
            raise BadRow(f"column {column!r}: half a surrogate pair is no text, in {short(turn['content'])}")
        messages.append({"role": turn["role"], "content": turn["content"]})
    return messages


def is_text(text: str) -> bool:
    """Whether a string can be encoded. Half a surrogate pair cannot; JSON escapes and command lines can hold one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def short(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        return next((line.lstrip()[:1] for line in file if line.strip()), b"") == b"["


def _json_list(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:  # JSON or UTF-8
        raise UsageError(f"{path}: not JSON ({error})") from None
    for number, row in enumerate(rows, start=1):
        yield number, row if isinstance(row, dict) else BadRow(f"not a JSON object but {short(row)}")


def _jsonl(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # JSON or UTF-8
                yield number, BadRow(f"not JSON ({error})")
                continue
            yield number, row if isinstance(row, dict) else BadRow(f"not a JSON object but {short(row)}")


def _parquet(path: Path) -> Iterator[tuple[int, Row | BadRow]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{path}: not a readable parquet file ({str(error).splitlines()[0]})") from None


def _hub(name: str) -> Iterator[tuple[int, Row | BadRow]]:
    import datasets

    path, *rest = re.split(r":(?![^\[]*\])", name.removeprefix(HUB))  # train[:100] stays whole
    if not path or len(rest) > 2 or not all(rest):
        raise UsageError(f"{name} is no data set: write hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT")
    split = rest[-1] if rest else "train"
    try:
        found = datasets.load_dataset(path, rest[0] if len(rest) == 2 else None, split=split)
    except Exception as error:  # the library has no common base: a missing name, split or connection
        raise UsageError(
            f"{name} cannot be loaded ({type(error).__name__}: {one_line(error):.200}): check the name and the "
            "connection, or give a local .parquet file"
        ) from None
    yield from enumerate(found, start=1)
