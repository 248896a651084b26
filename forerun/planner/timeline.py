"""How many rows run while a batch is rolled out: constant, given, or shrinking as completions end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import UsageError

_SPANS = 64
_MOST_ROWS = 1 << 16
_MOST_TOKENS = 1 << 40


@dataclass(frozen=True)
class Span:
    """A stretch of a rollout in which the number of rows does not change.

    Attributes:
        rows: rows that run.
        tokens: tokens that each of them gains.
        context: tokens in a row's cache, on average over the stretch.
    """

    rows: int
    tokens: float
    context: float


def from_lengths(lengths: Sequence[int], prompt: int) -> list[Span]:
    """Completions of these lengths that all start together, after a prompt of `prompt` tokens.

    Raises:
        UsageError: no lengths, one below 1, or one above 2^40.
    """
    if not lengths or min(lengths) < 1:
        raise UsageError("completion lengths must be at least 1, and there must be one")
    if max(lengths) > _MOST_TOKENS:
        raise UsageError(f"a completion is longer than {_MOST_TOKENS} tokens, the most that is planned for")
    spans, done = [], 0
    ordered = sorted(lengths)
    for index, length in enumerate(ordered):
        # Long stretches are cut, as the cache grows along them.
        pieces = max(1, -(-(length - done) * _SPANS // ordered[-1]))
        step = (length - done) / pieces
        for piece in range(pieces if step else 0):
            spans.append(Span(len(ordered) - index, step, prompt + done + (piece + 0.5) * step))
        done = length
    return spans


def long_tail(rows: int, longest: int) -> list[int]:
    """Lengths that thin out as rollouts do: evenly spread squares up to the longest, a third of it on average."""
    return [max(1, round(longest * ((index + 1) / rows) ** 2)) for index in range(rows)]


def parse(text: str, prompt: int, context: float) -> list[Span]:
    """A timeline as it is written on the command line.

    Args:
        text: "32" (constant); "32,8,1" (as long each); "32:100,8:400" (rows:tokens); "tail:32:8192" (32 rows, the
            longest 8192 tokens: see `long_tail`); "@file" (completion lengths, whitespace or comma between them).
        prompt: tokens of a prompt, in front of completions of known lengths.
        context: tokens in a row's cache, where lengths are not known.

    Raises:
        UsageError: it is none of these, of more than 65,536 rows or 2^40 tokens a row; or no such context.
    """
    if not (0 <= prompt <= _MOST_TOKENS and 0 <= context <= _MOST_TOKENS):
        raise UsageError(
            f"--prompt-length {prompt} and --context {context} must be numbers of tokens, not negative and at "
            f"most {_MOST_TOKENS}"
        )
    spans = _read(text, prompt, context)
    if (rows := max(span.rows for span in spans)) > _MOST_ROWS:
        raise UsageError(f"--batch {text!r} has {rows} rows: {_MOST_ROWS} is the most that is planned for")
    return spans


def _read(text: str, prompt: int, context: float) -> list[Span]:
    try:
        if text.startswith("@"):
            words = Path(text[1:]).read_text(encoding="utf-8").replace(",", " ").split()
            return from_lengths([int(word) for word in words], prompt)
        if text.startswith("tail:"):
            rows, longest = (int(part) for part in text[5:].split(":"))
            if rows < 1 or not 1 <= longest <= _MOST_TOKENS:
                raise ValueError
            if rows > _MOST_ROWS:  # not worth working out
                return [Span(rows, longest, context)]
            return from_lengths(long_tail(rows, longest), prompt)
        spans = []
        for part in text.split(","):
            rows_text, _, tokens_text = part.partition(":")
            span = Span(int(rows_text), float(tokens_text or 1), context)
            if span.rows < 1 or not 0 < span.tokens <= _MOST_TOKENS:
                raise ValueError
            spans.append(span)
        return spans
    except OSError as error:
        raise UsageError(f"cannot read completion lengths from {text[1:]}: {error.strerror}") from None
    except ValueError:
        raise UsageError(
            f"--batch {text!r} is no timeline: write rows (32), a list (32,8,1), rows:tokens (32:100,1:900), "
            "tail:rows:longest, or @file of completion lengths"
        ) from None
