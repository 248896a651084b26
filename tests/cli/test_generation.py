"""`forerun generate` on a tiny model: lossless with and without drafting, repeatable, clear about what it cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import forerun
from forerun import cli


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers whose tokens are bytes, with a context of 64."""
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {letter: i for i, letter in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("plain")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a" * 64], "prompt 1 has 64 tokens, which leaves no room in a context of 64"),
        (["--prompt", "abc", "--prompt", ""], "prompt 2 has no tokens"),
        (["--prompt", "caf\udce9"], "prompt 1 is not valid UTF-8"),  # how Python hands over a byte of Latin-1
        (["--prompt", "abc", "--num-speculative-tokens", "1"], "carries no MTP block to draft with"),
        (["--prompt", "abc", "--top-p", "1.5"], "top_p=1.5 must lie in (0, 1]"),
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
