"""SFT examples: rows of a file, and the documents that they become."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from forerun.data.chat import Messages, encode_conversation, encode_text
from forerun.data.packing import Document
from forerun.data.rows import BadRow, OnBadRow, Row, first_few, is_text, parse_messages, read_rows, short
from forerun.errors import UsageError

OnTooLong = Literal["error", "skip", "truncate"]


@dataclass(frozen=True)
class Example:
    """One SFT example: a conversation with at least one assistant turn, or plain text.

    `place` says where it came from, for errors.
    """

    content: Messages | str
    place: str = "the example"


def read_examples(
    path: str | Path, on_bad_row: OnBadRow = "error", report: Callable[[str], None] | None = None
) -> list[Example]:
    """Read SFT examples from JSONL or parquet.

    A row has `messages`, or `prompt` with `response` or `completion`, or `text`. `text` is a string; each of the others
    is a list of chat messages or a string (one turn: the user's in `prompt`, the assistant's in `response` and
    `completion`).

    Raises:
        UsageError: see `forerun.data.rows.read_rows`.
    """

    def parse(row: Row, place: str) -> Example:
        if "messages" in row:
            messages = parse_messages(row["messages"], "messages")
        else:
            answer = "response" if "response" in row else "completion"
            if "prompt" not in row or answer not in row:
                if "text" in row:
                    return Example(_text(row["text"]), place)
                needed = "'messages', or 'prompt' and 'response', or 'text'"
                raise BadRow(f"needs {needed}, but has {', '.join(map(repr, row))}")
            turns = row[answer]
            if isinstance(turns, str):
                turns = [{"role": "assistant", "content": turns}]
            messages = parse_messages(row["prompt"], "prompt") + parse_messages(turns, answer)
        if all(m["role"] != "assistant" for m in messages):
            raise BadRow("no assistant turn, so nothing in it is to be learned")
        if messages[0]["role"] == "assistant":
            raise BadRow("begins with the assistant's turn: put a user's turn before it")
        return Example(messages, place)

    return read_rows(path, parse, on_bad_row, report)


def encode_examples(
    tokenizer: PreTrainedTokenizerBase,
    examples: Iterable[Example],
    max_length: int,
    on_too_long: OnTooLong = "error",
    report: Callable[[str], None] | None = None,
) -> list[Document]:
    """Tokenize examples for training.

    Args:
        max_length: the most tokens of a document.
        on_too_long: "error", "skip" (leave it out) or "truncate" (cut the end off; left out if no target remains).
        report: called with one line if examples were left out or cut.

    Raises:
        UsageError: examples that are too long (with on_too_long="error") or cannot be tokenized: how many, and the
            first by their places; or none is left.
    """

    def encode(content: Messages | str) -> Document:
        return encode_text(tokenizer, content) if isinstance(content, str) else encode_conversation(tokenizer, content)

    documents: list[Document] = []
    unusable: list[str] = []
    long: list[str] = []
    count = longest = cut = 0
    for example in examples:
        count += 1
        try:
            document = encode(example.content)
        except UsageError as error:
            unusable.append(f"{example.place}: {error}")
            continue
        if len(document) > max_length:
            long.append(f"{example.place}: {len(document)}")
            longest = max(longest, len(document))
            document = Document(document.token_ids[:max_length], document.loss_mask[:max_length])
            if on_too_long == "skip" or not any(document.loss_mask):
                continue
            cut += 1
        documents.append(document.compact())
    if unusable:
        raise UsageError(f"{len(unusable)} of {count} examples cannot be trained on: {first_few(unusable)}")
    said = f"{len(long)} of {count} examples have more tokens than data.max_length={max_length}"
    if long and on_too_long == "error":
        raise UsageError(
            f"{said} ({first_few(long)}): set data.max_length={longest}, or data.on_too_long=truncate or skip"
        )
    if not documents:
        why = f"{said} ({first_few(long)}): set data.max_length={longest}" if long else "none was given"
        raise UsageError(f"no example is left to train on: {why}")
    if long and report is not None:
        report(f"{said} ({first_few(long)}): {cut} are cut, {len(long) - cut} left out")
    return documents


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise BadRow(f"column 'text' must be a string with something in it, not {short(value)}")
    if not is_text(value):
        raise BadRow(f"column 'text': half a surrogate pair is no text, in {short(value)}")
    return value
