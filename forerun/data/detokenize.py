"""Text from tokens that come one by one."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"  # what the first bytes of a character decode to


class Detokenizer:
    """Grows the text of a list of tokens without decoding all of it again.

    A token decodes differently behind others (a space goes or comes), so each piece of text is read off the difference
    between decoding the last few tokens with and without the new ones. Bytes of a character that is not whole yet are
    held back.

    Args:
        tokenizer: whose `decode` is used.
        skip_special_tokens: leave tokens such as an end of turn out of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []  # the tokens of the last piece of text, then those that wait for more
        self._before = ""  # what the former alone decode to
        self._read = 0  # how many they are
        self._shown = 0  # characters behind `_before` that were handed out

    def push(self, token: int) -> str:
        """The text that this token completes; empty in the middle of a character."""
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(_INCOMPLETE)
        start = len(self._before) + self._shown
        fresh = whole[start:]
        if len(whole) == len(text) > len(self._before):
            self._window = self._window[self._read :]
            self._before, self._read, self._shown = self._decode(self._window), len(self._window), 0
        else:
            self._shown += len(fresh)
        return fresh

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
