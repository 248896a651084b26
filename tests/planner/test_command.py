"""`forerun plan` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forerun import cli
from forerun.planner.acceptance import measure_acceptance
from tests.rollout import tiny

BASE = ["plan", "--model", "mimo-7b", "--hardware", "h20"]


def run(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, str, list[str]]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "Missing option '--model'"),
        (["plan", "--model", "mimo-7b", "--acceptance", ".5"], "give either --hardware"),
        ([*BASE, "--calibrate", "--acceptance", ".5"], "give either --hardware"),
        (BASE, "give --acceptance"),
        ([*BASE, "--acceptance", "x"], "--acceptance 'x' must be shares"),
        ([*BASE, "--acceptance", "0.5,0.6"], "must not rise"),
        ([*BASE, "--acceptance", "1.5"], "between 0 and 1"),
        ([*BASE, "--acceptance", ".5", "--batch", "many"], "'many' is no timeline"),
        ([*BASE, "--acceptance", ".5", "--batch", "tail:2000000000:5"], "65536 is the most"),
        ([*BASE, "--acceptance", ".5", "--context", "inf", "--batch", "8"], "--context inf must be numbers of tokens"),
        ([*BASE, "--acceptance", ".5", "--context", "1e308", "--batch", "8"], "--context 1e+308 must be numbers"),
        ([*BASE, "--acceptance", ".5", "--batch", "8:1e308"], "'8:1e308' is no timeline"),
        ([*BASE, "--acceptance", ".5", "--batch", f"tail:8:{10**300}"], "is no timeline"),
        ([*BASE, "--acceptance", ".5", "--tensor-parallel", f"{10**400}"], "must lie between 1 and 65536"),
        ([*BASE, "--acceptance", ".5", "--max-step-tokens", "1"], "--max-step-tokens 1 leaves no room"),
        ([*BASE, "--acceptance", ".5", "--temperature", "inf"], "--temperature inf must be a number"),
        ([*BASE, "--acceptance", ".5", "--batch", "@nowhere"], "cannot read completion lengths from nowhere"),
        ([*BASE, "--acceptance", ".5", "--weights", "int4"], "--weights 'int4' must be one of"),
        ([*BASE, "--acceptance", ".5", "--kv-cache", "q"], "--kv-cache 'q' must be one of"),
        ([*BASE, "--acceptance", ".5", "--max-depth", "0"], "Invalid value for '--max-depth'"),
        (["plan", "--model", "mimo-7b", "--hardware", "abacus", "--acceptance", ".5"], "choose one of a100"),
        (["plan", "--model", "nowhere", "--hardware", "h20", "--acceptance", ".5"], "nowhere is neither a directory"),
        (["plan", "--model", "nowhere", "--hardware", "h20", "--text", "t"], "nowhere is neither a directory"),
    ],
)
def test_unusable_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, out, err = run(capsys, arguments)
    assert code == 2 and out == "" and len(err) == 1 and message in err[0]


def test_the_answer_in_print_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*BASE, "--acceptance", "0.7,0.11,0.02", "--batch", "256"]
    code, out, err = run(capsys, arguments)
    assert code == 0 and not err and out.splitlines()[-2].startswith("Leave it off")
    code, as_json, err = run(capsys, [*arguments, "--json"])
    answer = json.loads(as_json)
    assert code == 0 and not err and answer["worth_it"] is False
    assert answer["sentence"] == out.splitlines()[-2]
    assert answer["batches"][0]["rows"] == 256 and len(answer["run_speedups"]) == 4
    assert f"k=3 {answer['run_speedups'][3]:.2f}x" in out
    code, as_json, _ = run(capsys, [*BASE, "--acceptance", "0.9,0.8", "--batch", "1", "--json"])
    assert json.loads(as_json)["worth_it"] is True


def test_options_reach_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    def step(*extra: str) -> float:
        _, out, _ = run(capsys, [*BASE, "--acceptance", "0.7", "--batch", "64", "--json", *extra])
        return float(json.loads(out)["batches"][0]["step_seconds"][1])

    plain = step()
    assert step("--weights", "fp8") < plain < step("--weights", "float32")
    assert step("--kv-cache", "fp8") < plain < step("--context", "4000")
    assert step("--tensor-parallel", "2") < plain < step("--eager")
    assert step("--max-step-tokens", "64") > plain


def test_whether_it_fits_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    """MiMo-7B in bfloat16: 7.2 B weights in layers and head, embedding 0.62 B, MTP layer 0.22 B; 144 KiB a token."""

    def plan(*extra: str) -> tuple[dict[str, Any], str]:
        arguments = ["plan", "--model", "mimo-7b", "--hardware", "h100", "--acceptance", "0.7", *extra]
        _, printed, _ = run(capsys, arguments)
        _, out, _ = run(capsys, [*arguments, "--json"])
        return json.loads(out), printed.splitlines()[-1]

    few, said = plan("--batch", "32:1000", "--context", "4096")
    weights = 2 * (36 * (4096 * 128 * 80 + 3 * 4096 * 11008) + 2 * 4096 * 151680)
    drafter = 2 * (4096 * 128 * 80 + 3 * 4096 * 11008 + 2 * 4096**2)
    assert few["memory"]["weights"] == weights + drafter
    assert few["memory"]["row"] == 37 * 2 * 8 * 128 * 2 * 4096 and few["memory"]["rows"] == 32
    assert few["fits"] is True and said.startswith("Memory: 33.1 GiB on each device")
    many, said = plan("--batch", "512:1000,32:1000", "--context", "4096")
    assert many["memory"]["rows"] == 512 and many["fits"] is False
    room = int((0.92 * 80e9 - few["memory"]["weights"]) / few["memory"]["row"])
    assert said.startswith("It does not fit") and f"at most {room} rows" in said
    assert plan("--batch", str(room), "--context", "4096")[0]["fits"] is True
    assert plan("--batch", str(room + 1), "--context", "4096")[0]["fits"] is False
    assert plan("--batch", "512:1000", "--context", "4096", "--tensor-parallel", "8")[0]["fits"] is True
    whole, said = plan("--batch", "1", "--weights", "float32", "--model", "deepseek-r1")
    assert whole["fits"] is False and said.endswith("usable; raise --tensor-parallel.")


def test_planning_loads_neither_torch_nor_a_model() -> None:
    code = (
        "import sys; from forerun.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or 3 * bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *BASE, "--acceptance", "0.7"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_acceptance_of_a_checkpoint_that_always_agrees(tmp_path: Path) -> None:
    model = tiny.perfect_carrier()
    model.save_pretrained(tmp_path)
    tokenizer(tmp_path, model.config.vocab_size)
    (tmp_path / "text").write_text(" ".join(f"w{i * i % 7}" for i in range(200)))
    assert measure_acceptance(tmp_path, tmp_path / "text")[0] == 1.0
    assert measure_acceptance(tmp_path, tmp_path / "text", temperature=1.0)[0] == pytest.approx(1.0, abs=1e-3)


def test_calibrating_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.carrier()
    model.save_pretrained(tmp_path)
    tokenizer(tmp_path, model.config.vocab_size)
    arguments = ["plan", "--model", str(tmp_path), "--calibrate", "--batch", "2,1", "--max-depth", "1", "--json"]
    code, out, err = run(capsys, arguments)
    answer = json.loads(out)
    assert code == 0 and not err and answer["hardware"] == "measured here"
    assert len(answer["acceptance"]) == 1 and 0 <= answer["acceptance"][0] <= 1
    assert [batch["rows"] for batch in answer["batches"]] == [2, 1]
    (tmp_path / "empty").write_text(" ")
    code, _, err = run(capsys, [*arguments, "--text", str(tmp_path / "empty")])
    assert code == 2 and len(err) == 1 and "is empty" in err[0]
    code, _, err = run(capsys, [*arguments, "--eager"])
    assert code == 2 and len(err) == 1 and "options of a deployment" in err[0]


def test_what_cannot_be_measured_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.trunk().save_pretrained(tmp_path)
    (tmp_path / "text").write_text("w1 w2 " * 50)
    arguments = ["plan", "--model", str(tmp_path), "--hardware", "cpu", "--text", str(tmp_path / "text")]
    code, out, err = run(capsys, arguments)
    assert code == 2 and out == "" and len(err) == 1 and "carries no MTP block" in err[0]
    tiny.carrier().save_pretrained(tmp_path)
    code, out, err = run(capsys, arguments)
    assert code == 2 and out == "" and len(err) == 1 and "tokenizer" in err[0]
    tokenizer(tmp_path, 31)
    (tmp_path / "text").write_text("w1 w2 w3")
    code, out, err = run(capsys, arguments)
    assert code == 2 and out == "" and len(err) == 1 and "too short" in err[0]


def test_acceptance_of_a_drawn_head_is_low(tmp_path: Path) -> None:
    model = tiny.carrier()
    model.save_pretrained(tmp_path)
    tokenizer(tmp_path, model.config.vocab_size)
    (tmp_path / "text").write_text(" ".join(f"w{i * i % 7}" for i in range(200)))
    assert measure_acceptance(tmp_path, tmp_path / "text")[0] < 0.9


def tokenizer(directory: Path, size: int) -> None:
    """One word per id, written as a tokenizer of the directory."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)
