"""Stop strings end a text with the token that completes them, whatever tokens the text is cut into."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun.data.detokenize import Detokenizer
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Request, SamplingParams
from forerun.rollout.stopping import StopStrings
from tests.rollout import tiny
from tests.rollout.reference import written


def byte_level() -> PreTrainedTokenizerFast:
    """Pieces of bytes: some of several letters, and characters of two, three and four bytes in parts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_byte = dict(zip(sorted(range(256), key=lambda byte: _printed(byte)), alphabet, strict=True))
    pieces = [*b"abcdef .\n", *"é€🙂".encode(), 0x80]
    words = [of_byte[byte] for byte in dict.fromkeys(pieces)]
    words += ["".join(of_byte[b] for b in text) for text in (b"ab", b"bc", b".\n", b" a", "c€".encode()[:3], b"def ")]
    words += [f"<unused{n}>" for n in range(tiny.VOCAB - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _printed(byte: int) -> str:
    """How the byte-level alphabet prints a byte (Radford et al. 2019): itself, or shifted to where all are visible."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in plain else chr(256 + [b for b in range(256) if b not in plain].index(byte))


def metaspace() -> PreTrainedTokenizerFast:
    """Words that carry their space in front, which the first of a text loses."""
    words = [f"{space}{word}" for space in ("\u2581", "") for word in ("a", "b", "ab", "cd", ".", "abc")]
    words += [f"<unused{n}>" for n in range(tiny.VOCAB - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unused0>"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"bytes": (byte_level, 25), "metaspace": (metaspace, 12)}
STRINGS = ["ab", ".", "\n", "é", "€", "🙂", "bc.", " a", "c€a", "abcab", "a b", "cd ab", "abc."]


def first_end(
    tokenizer: PreTrainedTokenizerFast, tokens: list[int], strings: tuple[str, ...], min_tokens: int
) -> tuple[int, str] | None:
    """By decoding everything for every token: how many tokens there are when a string is complete, and which."""
    before = ""
    for n in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:n], clean_up_tokenization_spaces=False).rstrip("\ufffd")
        for string in strings:
            if n > min_tokens and text.find(string, max(0, len(before) - len(string) + 1)) >= 0:
                return n, string
        before = text
    return None


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_text_grows_to_what_decoding_all_of_it_gives(kind: str) -> None:
    make, words = TOKENIZERS[kind]
    tokenizer, rng = make(), random.Random(0)
    for _ in range(200):
        tokens = [rng.randrange(words) for _ in range(rng.randint(1, 25))]
        detokenizer, text = Detokenizer(tokenizer, skip_special_tokens=False), ""
        for n, token in enumerate(tokens, start=1):
            text += detokenizer.push(token)
            assert text.rstrip("\ufffd") == tokenizer.decode(tokens[:n]).rstrip("\ufffd")
            assert not text.endswith("\ufffd")


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_a_stop_string_is_found_in_the_token_that_completes_it(kind: str) -> None:
    make, words = TOKENIZERS[kind]
    tokenizer, rng = make(), random.Random(1)
    found = set()
    for _ in range(400):
        tokens = [rng.randrange(words) for _ in range(30)]
        strings = tuple(rng.sample(STRINGS, rng.randint(1, 3)))
        min_tokens = rng.choice([0, 0, 4])
        watch = StopStrings(strings, tokenizer, min_tokens)
        ends = next(((n, end) for n, token in enumerate(tokens, start=1) if (end := watch.push(token))), None)
        assert ends == first_end(tokenizer, tokens, strings, min_tokens)
        if ends:
            found.add(ends[1])
    assert len(found) > 5


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_ends_texts_at_stop_strings(k: int, temperature: float) -> None:
    model, tokenizer = tiny.carrier(), byte_level()
    engine = NativeEngine(
        model, tokenizer=tokenizer, products="linear", acceptance="match", num_speculative_tokens=k, max_num_seqs=5
    )
    # The texts are to hold what is looked for.
    bias = {token: 6.0 for token in range(25)}
    wanted = []
    for n, prompt in enumerate(tiny.prompts(12)):
        strings = (STRINGS[n], STRINGS[(n + 5) % len(STRINGS)])
        settings = SamplingParams(
            max_tokens=25, temperature=temperature, seed=n, stop=strings, min_tokens=n % 3, logit_bias=bias
        )
        wanted.append(Request(f"r{n}", prompt, settings))
    stopped = 0
    for request, completion in zip(wanted, engine.generate(wanted), strict=True):
        whole = written(model, request).token_ids
        end = first_end(tokenizer, whole, request.sampling.stop, request.sampling.min_tokens)
        stopped += end is not None
        if end is None:
            assert (completion.finish_reason, completion.stop_reason) == ("length", None)
            assert completion.token_ids == whole
        else:
            assert (completion.finish_reason, completion.stop_reason) == ("stop", end[1])
            assert completion.token_ids == whole[: end[0]]
    assert stopped > 1
