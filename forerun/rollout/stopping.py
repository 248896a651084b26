"""Strings that end a text, found in the token that completes them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from forerun.data.detokenize import Detokenizer


class StopStrings:
    """Watches a text for strings that end it.

    Special tokens count with the text they are written as.

    Args:
        strings: what ends the text, none of them empty.
        tokenizer: the model's.
        min_tokens: a string that is complete after so many tokens or fewer ends nothing.
    """

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase, min_tokens: int) -> None:
        self._strings = strings
        self._longest = max(map(len, strings))
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._tail = ""  # as much of the text as can still become part of a string

    def push(self, token: int) -> str | None:
        """The first of the strings that this token completes."""
        fresh = self._detokenizer.push(token)
        self._tokens += 1
        if not fresh:
            return None
        tail, text = self._tail, self._tail + fresh
        self._tail = text[len(text) - self._longest + 1 :] if self._longest <= len(text) else text
        if self._tokens <= self._min_tokens:
            return None
        for string in self._strings:
            # What lies in the tail as a whole came too early.
            if text.find(string, max(0, len(tail) - len(string) + 1)) >= 0:
                return string
        return None
