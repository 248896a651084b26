"""The command line as a user meets it: exit codes, one line on stderr, nothing heavy before it is needed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun import cli
from forerun.errors import ForerunError, UsageError

REQUIRED = ["model.path=nowhere", "data.train_files=[a.jsonl]"]


def run(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> tuple[int, str, list[str]]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: nowhere}\ndata: {train_files: [nothing.jsonl]}\n")
    return path


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, ["--version"]) == (0, f"forerun {forerun.__version__}\n", [])
    code, out, err = run(capsys, ["--help"])
    assert code == 0 and not err
    for verb in ("demo", "sft", "rl", "generate", "inspect"):
        assert verb in out
        code, _, err = run(capsys, [verb, "--help"])
        assert code == 0 and not err


BAD_ARGUMENTS = [
    (["nope"], "No such command 'nope' (see forerun --help)"),
    (["--nope"], "No such option: --nope (see forerun --help)"),
    (["sft"], "Missing argument '[CONFIG.yaml] key=value ...' (see forerun sft --help)"),
    (["sft", "trainer.total_steps=3"], "model.path is not set"),  # a setting where the file may stand
    (["rl", "model.path=a//b", "rollout.base_url=http://x"], "rollout.base_url is of rollout.engine=vllm and sglang"),
    (["sft", "--lr", "1"], "No such option: --lr (Possible options: --help) (see forerun sft --help)"),
    (["demo", "--seed", "-1"], "Invalid value for '--seed'"),
    (["demo", "--seed", "x"], "Invalid value for '--seed'"),
    (["demo", "--head", "mine"], "Invalid value for '--head'"),
    (["demo", "extra"], "Got unexpected extra argument(s) (extra) (see forerun demo --help)"),
    (["generate", "--model", "m"], "Missing option '--prompt' (see forerun generate --help)"),
    (["generate", "--prompt", "p"], "Missing option '--model' (see forerun generate --help)"),
    (["generate", "--model", "m", "--prompt", "p", "--max-tokens", "0"], "Invalid value for '--max-tokens'"),
    (["generate", "--model", "m", "--prompt", "p", "--temperature", "-1"], "Invalid value for '--temperature'"),
    (["generate", "--model", "m", "--prompt", "p", "-n", "0"], "Invalid value for '--n' / '-n'"),
    (["sft", "missing.yaml"], "no such configuration file: missing.yaml"),
    (["rl", "missing.yaml"], "no such configuration file: missing.yaml"),
    (["generate", "--model", "nowhere", "--prompt", "p"], "nowhere"),
    (["inspect"], "Missing argument 'PATH' (see forerun inspect --help)"),
    (["inspect", "nowhere"], "nowhere is not a directory"),
    (["inspect", "nowhere", "--text", "t"], "give --deep as well"),
    (["generate", "--model", "nowhere", "--prompt", "p", "--top-p", "0"], "top_p=0.0 must lie in (0, 1]"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=[" ".join(case[0]) for case in BAD_ARGUMENTS])
def test_unusable_arguments_exit_2_with_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, arguments)
    assert code == 2 and out == ""
    assert len(err) == 1 and err[0].startswith("forerun: error: ") and message in err[0]
    assert list(tmp_path.iterdir()) == []


BAD_SETTINGS = [
    ("sft", ["optim.lrr=1"], "unknown configuration key optim.lrr; did you mean optim.lr?"),
    ("rl", ["rollout.temprature=1"], "unknown configuration key rollout.temprature; did you mean rollout.temperature?"),
    ("rl", ["rollout.n=two"], "rollout.n=two must be an integer"),
    ("sft", ["optim.lr=-1"], "optim.lr=-1.0 must be greater than 0"),
    ("sft", ["mtp.enable_train=true"], "mtp.enable_train=true needs mtp.enable=true"),
    ("sft", [], "nowhere"),
    ("rl", [], "nowhere"),
]


@pytest.mark.parametrize(("verb", "overrides", "message"), BAD_SETTINGS)
def test_unusable_settings_exit_2_with_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    yaml: Path,
    verb: str,
    overrides: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, [verb, str(yaml), *overrides])
    assert code == 2 and out == ""
    assert len(err) == 1 and err[0].startswith("forerun: error: ") and message in err[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"]


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("bad input: mend it"), 2, "forerun: error: bad input: mend it"),
        (ForerunError("it failed\nover two lines"), 1, "forerun: error: it failed over two lines"),
        (KeyboardInterrupt(), 130, "forerun: interrupted; what was finished is kept"),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/file"),
            1,
            "forerun: error: /full/file: No space left on device; free some space and run again",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "forerun: error: /x: Permission denied"),
        (OSError("a library's first line\nand more"), 1, "forerun: error: a library's first line"),
    ],
)
def test_failures_while_working(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    line: str,
) -> None:
    assert cli.outcome(raising(error)) == code
    assert capsys.readouterr().err == line + "\n"
    monkeypatch.setenv("FORERUN_TRACEBACK", "1")
    assert cli.outcome(raising(error)) == code
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("Traceback") and told[-1] == line


def test_a_fault_of_our_own_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        cli.outcome(raising(ZeroDivisionError()))


def test_a_full_disk_while_writing() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")

    def work() -> int:
        with open("/dev/full", "w") as file:
            file.write("x")
        return 0

    assert cli.outcome(work) == 1


def test_version_and_help_import_nothing_heavy() -> None:
    program = (
        "import sys; from forerun.cli import main; "
        "codes = [main(['--version']), main(['generate', '--help'])]; "
        "heavy = {'torch', 'transformers', 'numpy', 'omegaconf', 'datasets'} & set(sys.modules); "
        "sys.exit(f'{codes} {heavy}' if any(codes) or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("given", "seen"), [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5")])
def test_the_demo_says_how_long_threads_spin_before_torch_is_there(given: dict[str, str], seen: str) -> None:
    """Later nobody would read it."""
    program = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('GOMP_SPINCOUNT'))\n"
        "            sys.exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from forerun.cli import main\n"
        "main(['demo', '--out', 'nowhere'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"} | given
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{seen}\n"), done.stderr


def test_the_installed_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "forerun.cli", "sft", "missing.yaml"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(forerun.__file__).parents[1])},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "forerun: error: no such configuration file: missing.yaml\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    program = (
        "import sys\n"
        "from forerun.cli import outcome\n"
        "def work():\n"
        "    while True:\n"
        "        print('line', flush=True)\n"
        "sys.exit(outcome(work))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(60) == 1


def test_an_interrupt_that_lands_in_a_destructor_is_not_lost() -> None:
    code = """
import sys, time
from forerun import cli

class Late:
    def __del__(self):
        raise KeyboardInterrupt

def work():
    Late()
    time.sleep(60)
    return 0

cli.app = lambda **_: work
sys.exit(cli.main(["verb"]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stderr) == (130, "forerun: interrupted; what was finished is kept\n")


def test_a_warning_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def work(**_: Any) -> int:
        print(warnings.formatwarning("no memory\nis freed", UserWarning, "engine.py", 7, "warn(...)"), end="")
        return 0

    before = warnings.formatwarning
    monkeypatch.setattr(cli, "app", work)
    assert cli.main([]) == 0
    assert capsys.readouterr().out == "no memory is freed\n"
    assert warnings.formatwarning is before
