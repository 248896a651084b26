"""`forerun generate` on a tiny model: lossless with and without drafting, repeatable, clear about what it cannot do."""

from __future__ import annotations

import sys
import time
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import forerun
from forerun import cli
from forerun.generation import Answers
from forerun.rollout.native.model import ModelRunner
from forerun.rollout.protocol import Completion
from tests.families.tiny import tiny_trunk


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers whose tokens are bytes, with a context of 64."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {letter: i for i, letter in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("plain")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)
    tiny_trunk("attached", vocab_size=len(vocabulary), eos_token_id=0, bos_token_id=None).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def carrying(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with an MTP block."""
    path = tmp_path_factory.mktemp("carrying")
    forerun.attach(forerun.load(plain), forerun.MTPConfig(enable=True)).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((plain / name).read_bytes())
    return path


def generate(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str) -> tuple[int, str, list[str]]:
    code = cli.main(["generate", "--model", str(model), *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


def test_drafting_does_not_change_the_text(capsys: pytest.CaptureFixture[str], plain: Path, carrying: Path) -> None:
    ask = ("--prompt", "abc", "--max-tokens", "20")
    expected = generate(capsys, plain, *ask)
    assert expected[0] == 0 and expected[1] and expected[2][-1].endswith("without drafting")
    for depth in ("0", "1", "3"):
        code, out, err = generate(capsys, carrying, *ask, "--num-speculative-tokens", depth)
        assert (code, out) == (0, expected[1])
        assert ("acceptance length" in err[-1]) == (depth != "0")
    # With a block, drafting is the default.
    assert "acceptance length" in generate(capsys, carrying, *ask)[2][-1]


def test_measuring_products_is_no_part_of_the_rate(
    capsys: pytest.CaptureFixture[str], plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    tune, clock = ModelRunner.tune, time.perf_counter
    monkeypatch.setattr(ModelRunner, "tune", lambda runner: (events.append("tune"), tune(runner))[1])
    monkeypatch.setattr("forerun.generation.time.perf_counter", lambda: (events.append("clock"), clock())[1])
    assert generate(capsys, plain, "--prompt", "abc", "--max-tokens", "2")[0] == 0
    assert events.index("tune") < events.index("clock")


def test_answers_are_told_apart_and_repeatable(capsys: pytest.CaptureFixture[str], plain: Path) -> None:
    ask = ("--prompt", "abc", "--prompt", "xyz", "-n", "2", "--temperature", "1", "--max-tokens", "12")
    code, out, _ = generate(capsys, plain, *ask, "--seed", "1")
    assert code == 0
    headers = [line for line in out.splitlines() if line.startswith("--- ")]
    assert headers == [f"--- prompt {i}, answer {j}" for i in (1, 2) for j in (1, 2)]
    first, second = out.split("--- ")[1:3]
    assert first.split("\n", 1)[1] != second.split("\n", 1)[1]
    assert generate(capsys, plain, *ask, "--seed", "1")[1] == out
    assert generate(capsys, plain, *ask, "--seed", "2")[1] != out


def test_answers_grow_in_their_order(monkeypatch: pytest.MonkeyPatch, plain: Path) -> None:
    """What is on stdout after each step: the first unfinished answer, and nothing of those behind it."""
    out = StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    texts = {
        "one": tokenizer.encode("a\u20acb"),
        "two": tokenizer.encode("xyz"),
        "three": tokenizer.encode("\u20ac")[:1],
    }
    answers = Answers(tokenizer, list(texts))
    seen = []
    for step in range(5):
        for name, tokens in texts.items():
            new = tokens[step : step + 1]
            if new:
                answers.grow(name, new)
            if step + 1 == len(tokens):
                answers.finish(Completion(name, [1], tokens, [], None, "length", []))
        seen.append(out.getvalue())
    first = ["a", "a", "a", "a\u20ac"]
    assert seen[:4] == [f"--- one\n{text}" for text in first]
    assert seen[4] == "--- one\na\u20acb\n--- two\nxyz\n--- three\n\ufffd\n"


def test_an_answer_is_printed_while_it_grows(monkeypatch: pytest.MonkeyPatch, plain: Path) -> None:
    written: list[str] = []

    class Watched(StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return super().write(text)

    out = Watched()
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["generate", "--model", str(plain), "--prompt", "abc", "--max-tokens", "20"]) == 0
    assert sum(bool(text.strip()) for text in written) > 4
    assert "".join(written) == out.getvalue()


def test_a_terminal_that_lacks_a_character_gets_its_number(monkeypatch: pytest.MonkeyPatch, plain: Path) -> None:
    ask = ["generate", "--model", str(plain), "--prompt", "abc", "--max-tokens", "20"]
    texts = []
    for encoding in ("utf-8", "ascii"):
        out = TextIOWrapper(BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(ask) == 0
        out.flush()
        texts.append(out.buffer.getvalue())  # type: ignore[attr-defined]
    whole, numbers = texts
    assert not whole.isascii() and numbers == whole.decode().encode("ascii", "backslashreplace")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_the_caller_closed_is_done_without(
    stream: str, monkeypatch: pytest.MonkeyPatch, plain: Path
) -> None:
    monkeypatch.setattr(sys, stream, None)
    assert cli.main(["generate", "--model", str(plain), "--prompt", "abc", "--max-tokens", "3"]) == 0


def test_a_stop_string_ends_the_answer(capsys: pytest.CaptureFixture[str], plain: Path) -> None:
    ask = ("--prompt", "abc", "--max-tokens", "30", "--temperature", "1", "--seed", "3")
    whole = generate(capsys, plain, *ask)[1].rstrip("\n")
    stop = next(letter for letter in whole[3:] if letter.isascii() and letter.isalpha())
    code, out, _ = generate(capsys, plain, *ask, "--stop", stop)
    assert code == 0 and out.rstrip("\n") == whole[: whole.index(stop) + 1]
    assert generate(capsys, plain, *ask, "--top-k", "1")[1] == generate(capsys, plain, *ask[:4])[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a" * 64], "prompt 1 has 64 tokens, which leaves no room in a context of 64"),
        (["--prompt", "abc", "--prompt", ""], "prompt 2 has no tokens"),
        (["--prompt", "caf\udce9"], "prompt 1 is not valid UTF-8"),  # how Python hands over a byte of Latin-1
        (["--prompt", "abc", "--num-speculative-tokens", "1"], "carries no MTP block to draft with"),
        (["--prompt", "abc", "--top-p", "1.5"], "top_p=1.5 must lie in (0, 1]"),
        (["--prompt", "abc", "--min-p", "2"], "min_p=2.0 must lie in [0, 1]"),
        (["--prompt", "abc", "--stop", ""], "stop holds an empty string"),
        (["--prompt", "abc", "--stop", "caf\udce9"], "--stop 'caf\\udce9' is not valid UTF-8"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    capsys: pytest.CaptureFixture[str], plain: Path, arguments: list[str], message: str
) -> None:
    code, out, err = generate(capsys, plain, *arguments)
    assert (code, out, len(err)) == (2, "", 1)
    assert err[0].startswith("forerun: error: ") and message in err[0]


def test_a_directory_that_is_no_checkpoint(capsys: pytest.CaptureFixture[str], plain: Path, tmp_path: Path) -> None:
    code, out, err = generate(capsys, tmp_path, "--prompt", "abc")
    assert (code, out, len(err)) == (2, "", 1) and str(tmp_path) in err[0]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((plain / name).read_bytes())
    code, out, err = generate(capsys, tmp_path, "--prompt", "abc")
    assert (code, out, len(err)) == (2, "", 1) and "has no usable tokenizer" in err[0]
