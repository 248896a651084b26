"""`forerun sft` and `rl` on two ranks: what one process trains, whoever starts them; refusals; ranks that fail."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import forerun
from forerun import cli
from forerun.config import RLConfig, SFTConfig
from forerun.config_file import load_config
from forerun.errors import UsageError
from forerun.launch.command import run as run_command
from forerun.launch.rank import run_as_rank
from forerun.models.carrier import named_weights
from forerun.report.progress import ProgressBar
from forerun.rollout.loopback import free_port
from forerun.trainers.rl import RLTrainer
from forerun.trainers.sft import SFTTrainer
from tests.logged import repeatable_metrics
from tests.trainers.test_sft import write_examples
from tests.trainers.tiny import make_model, make_tokenizer

# Seconds; a run takes some ten of them, and on a busy machine many times that.
LIMIT = 280
ROOT = Path(__file__).parents[2]
TWO = ["launch=torchrun", "distributed={nproc_per_node: 2, timeout_s: 600, shutdown_timeout_s: 5}"]
OUTER = ["--standalone", "--nproc-per-node=2"]
# Started by Python itself, in rank 1 alone.
FAILING = """
import os
if os.environ.get("RANK") == "1":
    import signal
    from forerun.trainers.sft import SFTTrainer
    step = SFTTrainer.step
    def failing(trainer):
        if trainer.engine.global_step == 1:
            print("about to end", flush=True)
            if os.environ["FAILURE"] == "raise":
                raise RuntimeError("the data of rank 1 is gone")
            os.kill(os.getpid(), signal.SIGKILL)
        return step(trainer)
    SFTTrainer.step = failing
"""
FAILING_ROLLOUT = """
import os
if os.environ.get("RANK") == "1":
    import signal
    from forerun.rollout.native.run import Run
    step, started = Run.step, []
    def failing(run, version):
        started.append(version)
        if started.count(1) == 2:  # in the middle of the second step's rollout
            print("about to end", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(run, version)
    Run.step = failing
"""
# Rank 0's only rollout worker fails in the second step.
WITHOUT_WORKERS = """
import os
if os.environ.get("RANK") == "0":
    from forerun.errors import ForerunError
    from forerun.rollout.native.run import Run
    step = Run.step
    def failing(run, version):
        if version == 1:
            raise ForerunError("the power is gone")
        return step(run, version)
    Run.step = failing
"""
ASYNCHRONOUS = ["async_training={enable: true, max_staleness: 0, partial_rollout: false}"]
REWARD = """
def reward(prompt, response, ground_truth, extra):
    return response.split().count(ground_truth) / 4
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, examples, the configuration of a run, and `alone/`: that run in one process."""
    path = tmp_path_factory.mktemp("launch")
    make_model().save_pretrained(path / "checkpoint")
    make_tokenizer().save_pretrained(path / "checkpoint")
    train = write_examples(path / "train.jsonl", 30, seed=1)
    val = write_examples(path / "val.jsonl", 9, seed=2)
    (path / "run.yaml").write_text(
        f"model: {{path: {path / 'checkpoint'}}}\n"
        f"data: {{train_files: [{train}], val_files: [{val}], max_length: 24}}\n"
        "mtp: {enable: true, enable_train: true, detach_encoder: true, num_layers: 2}\n"
        "optim: {lr: 1e-2}\n"
        "trainer: {total_steps: 4, save_freq: 2, test_freq: 2, logger: [jsonl]}\n"
        "train_batch_size: 5\n"  # an odd number of micro-batches: two ranks do not share them evenly
    )
    run_alone(path, "alone")
    prompts = [{"prompt": [{"role": "user", "content": f"say {word}"}], "answer": word} for word in "abcde"]
    rows = [
        {"prompt": row["prompt"], "data_source": "tiny", "reward_model": {"ground_truth": row["answer"]}}
        for row in prompts
    ]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "reward.py").write_text(REWARD)
    (path / "rl.yaml").write_text(
        f"model: {{path: {path / 'checkpoint'}}}\n"
        f"data: {{train_files: [{path / 'prompts.jsonl'}], val_files: [{path / 'prompts.jsonl'}]}}\n"
        f"reward: {{function: '{path / 'reward.py'}:reward'}}\n"
        "mtp: {enable: true, enable_train: true, enable_rollout: true, detach_encoder: true}\n"
        "rollout: {n: 4, max_response_length: 6, max_prompt_length: 16, deterministic: true}\n"
        "optim: {lr: 1e-2}\n"
        "trainer: {total_steps: 2, logger: [jsonl]}\n"
        "train_batch_size: 5\nppo_mini_batch_size: 5\nmicro_batch_size: 3\n"
    )
    return path


def run_alone(place: Path, name: str, *settings: str) -> None:
    config = load_config(SFTConfig, place / "run.yaml", [f"trainer.output_dir={place / name}", *settings])
    SFTTrainer(config).train()


def run(
    place: Path,
    name: str,
    *settings: str,
    torchrun: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    command: Sequence[str] = ("sft", "run.yaml"),
) -> tuple[int, str]:
    """`forerun sft` into the directory `name`, under torchrun if its arguments are given: (exit code, output)."""
    verb, file = command
    outer = ["-m", "torch.distributed.run", *torchrun, "-m", "forerun.cli"] if torchrun else ["-m", "forerun.cli"]
    process = subprocess.Popen(
        [sys.executable, *outer, verb, str(place / file), f"trainer.output_dir={place / name}", *settings],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        process.terminate()  # if it hangs: the agent ends its ranks
    return process.returncode, output


def metrics(place: Path, name: str) -> list[dict[str, Any]]:
    return repeatable_metrics(place / name)


def assert_same_as_alone(place: Path, name: str) -> None:
    """To float32 rounding."""
    found, expected = metrics(place, name), metrics(place, "alone")
    assert [line["step"] for line in found] == [line["step"] for line in expected] == [0, 1, 2, 3, 4]
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-6)
    trained, alone = (dict(named_weights(forerun.load(place / run / "model"))) for run in (name, "alone"))
    assert trained.keys() == alone.keys()
    for key in alone:
        assert_close(key, trained[key], alone[key])


def assert_close(name: str, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5, msg=lambda message: f"{name}: {message}")


def test_two_ranks_train_what_one_process_does(place: Path) -> None:
    """The fitted start of the head, held-out figures and checkpoints included; and rank 0 alone speaks."""
    code, output = run(place, "two", *TWO)
    assert code == 0, output
    assert_same_as_alone(place, "two")
    assert output.count("sft: 4 steps to do") == 1 and output.count("carries no MTP block") == 1
    assert output.splitlines()[-3:] == [
        f"model: {place / 'two' / 'model'}; checkpoints: checkpoint-2, checkpoint-4 in {place / 'two'}",
        f'next: forerun generate --model {place / "two" / "model"} --prompt "What is 12 * 7?"',
        f"      forerun report {place / 'two'}",
    ]


def test_a_run_goes_on_with_another_number_of_ranks(place: Path) -> None:
    """One process to step 2, then two ranks under an outer torchrun; two such ranks to step 2, then one process."""
    run_alone(place, "grown", "trainer.total_steps=2")
    code, output = run(place, "grown", "engine.fsdp_size=1", torchrun=OUTER)
    assert code == 0, output
    assert_same_as_alone(place, "grown")
    settings = ("trainer.total_steps=2", "engine.reshard_after_forward=false", "trainer.async_save=true")
    code, output = run(place, "shrunk", *settings, torchrun=OUTER)
    assert code == 0, output
    run_alone(place, "shrunk")
    assert_same_as_alone(place, "shrunk")


@pytest.mark.parametrize("failure", ["raise", "kill"])
def test_a_rank_that_fails_is_named_and_ends_the_run(place: Path, tmp_path: Path, failure: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAILING)
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "FAILURE": failure}
    code, output = run(place, failure, "data.val_files=[]", *TWO, environment=environment)
    assert code == 1, output  # and long before distributed.timeout_s, or `run` had given up
    report = output.splitlines()[-1]
    assert report.startswith("forerun: error: rank 1 (local rank 1, process ") and os.uname().nodename in report
    if failure == "raise":
        assert report.endswith("failed with exit code 1: RuntimeError: the data of rank 1 is gone")
        assert '[rank 1]     raise RuntimeError("the data of rank 1 is gone")' in output
    else:
        assert "was killed by SIGKILL" in report and "[rank 1] about to end" in output
    assert output.count("forerun: error:") == 1


def test_what_no_rank_can_use_is_one_line_with_its_exit_code(place: Path) -> None:
    """The line that a run in one process ends with, though every rank finds it."""
    code, output = run(place, "unreadable", "data.train_files=[/nowhere.jsonl]", *TWO)
    assert code == 2, output
    assert output.startswith("forerun: error: /nowhere.jsonl: no such file: ") and len(output.splitlines()) == 1, output


REFUSED = [
    (["distributed.nnodes=2"], "distributed.nnodes=2 with distributed.rdzv_endpoint=null"),
    (["engine.fsdp_size=2"], "engine.fsdp_size=2 is for ranks that share the model"),
    (["engine.reshard_after_forward=false"], "engine.reshard_after_forward=false is for ranks that share the model"),
    ([*TWO, "engine.fsdp_size=3"], "engine.fsdp_size=3 must divide the number of ranks, 2"),
    (["engine.cpu_offload=true"], "engine.cpu_offload=true is for ranks that share the model"),
    ([*TWO, "engine.cpu_offload=true", "engine.device=cpu"], "engine.device is the CPU already"),
    (["engine.context_parallel_size=2"], "engine.context_parallel_size=2 is for ranks that share the model"),
    ([*TWO, "engine.context_parallel_size=4"], "engine.context_parallel_size=4 must divide the number of ranks, 2"),
    ([*TWO, "engine.device=cpu:0"], "engine.device=cpu:0 would put every rank there"),
    ([*TWO, "freeze_trunk=true", "cache_hiddens=true"], "set cache_hiddens=false"),
    ([*TWO, "model.path=forerun-demo/model"], "model.path: forerun-demo/model is not a directory: run `forerun demo`"),
    ([*TWO, "model.path=/nowhere"], "model.path: /nowhere is not a directory"),
    (["engine.autocast=bfloat16", "engine.param_dtype=bfloat16"], "engine.autocast and engine.param_dtype both set"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_contradict_are_refused_before_anything_starts(
    place: Path, settings: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError) as refused:
        run_command("sft", place / "run.yaml", [f"trainer.output_dir={place / 'refused'}", *settings])
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert not (place / "refused").exists()


def test_a_configuration_of_the_other_verb_is_named(place: Path) -> None:
    for verb, other, file in (("sft", "rl", "rl.yaml"), ("rl", "sft", "run.yaml")):
        path = place / file
        more = [] if verb == "sft" else ["freeze_trunk=false"]
        with pytest.raises(UsageError, match=rf"{file} is a configuration of `forerun {other}`: run that$"):
            run_command(verb, path, more)
        with pytest.raises(UsageError, match=r"optim\.lrr; did you mean optim\.lr\?"):
            run_command(other, path, [*more, "optim.lrr=1"])
    # What both have says nothing, though the other verb's rules may let it pass.
    shared = [f"model.path={place / 'checkpoint'}", "data.train_files=p.jsonl"]
    with pytest.raises(UsageError, match=r"train_batch_size=4 .*ppo_mini_batch_size=8"):
        run_command("rl", None, [*shared, "train_batch_size=4"])
    with pytest.raises(UsageError, match=r"micro_batch_size=16"):
        run_command("sft", None, [*shared, "micro_batch_size=16"])


def test_ranks_that_srun_or_mpirun_started_are_quiet_but_for_their_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        print("a result")
        with ProgressBar("sft", 2):
            raise UsageError("no data")

    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert cli.outcome(lambda: run_as_rank(work) or 0) == 2
        said = capsys.readouterr()
        assert said.err.splitlines()[-1] == "forerun: error: no data"
        assert ("a result" in said.out, "sft: 2 steps to do" in said.err) == (
            (True, True) if rank == "0" else (False, False)
        )


@pytest.fixture(scope="module")
def rl_alone(place: Path) -> Path:
    RLTrainer(load_config(RLConfig, place / "rl.yaml", [f"trainer.output_dir={place / 'rl-alone'}"])).train()
    return place / "rl-alone"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_where_it_would_go_on(
    how: signal.Signals, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    step = SFTTrainer.step

    def interrupted(trainer: SFTTrainer) -> dict[str, float]:
        if trainer.engine.global_step == 3:
            signal.raise_signal(how)
        return step(trainer)

    def missed(*_: object) -> None:
        pytest.fail("nobody heard of it")

    earlier = signal.signal(how, missed) if how == signal.SIGTERM else None
    monkeypatch.setattr(SFTTrainer, "step", interrupted)
    run_dir = place / f"interrupted-{how.name}"
    for settings, words in (
        (["trainer.save_freq=-1"], "interrupted before its first checkpoint, so nothing is kept: trainer.save_freq=N"),
        ([], f"interrupted; the same command goes on from {run_dir / 'checkpoint-2'}"),
    ):
        output = f"trainer.output_dir={run_dir}"
        assert cli.main(["sft", str(place / "run.yaml"), "data.val_files=[]", output, *settings]) == 130
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"forerun: {words}")
    if how == signal.SIGTERM:
        assert signal.signal(how, earlier) is missed  # as it was before


def _ended_in_its_fourth_step(arguments: list[str]) -> None:
    step = SFTTrainer.step

    def interrupted(trainer: SFTTrainer) -> dict[str, float]:
        if trainer.engine.global_step == 3:
            signal.raise_signal(signal.SIGTERM)
        return step(trainer)

    SFTTrainer.step = interrupted  # type: ignore[method-assign]
    sys.argv[1:] = arguments
    cli.command()


def test_a_rank_of_srun_says_it_when_the_scheduler_ends_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own: torch goes on listening in one that was a rank."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**rank, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    run_dir = place / "interrupted-srun"
    settings = ["data.val_files=[]", "engine.device=cpu", f"trainer.output_dir={run_dir}"]
    started = multiprocessing.get_context("spawn").Process(
        target=_ended_in_its_fourth_step, args=(["sft", str(place / "run.yaml"), *settings],), daemon=True
    )
    started.start()
    started.join(LIMIT)
    assert started.exitcode == 130
    said = capfd.readouterr().err.splitlines()[-1]
    assert said == f"forerun: interrupted; the same command goes on from {run_dir / 'checkpoint-2'}"


def test_a_rank_ends_before_python_takes_itself_apart() -> None:
    """In which threads of gloo's, which outlive their group, may abort the process."""
    code = """
import atexit, threading, time
import torch
from forerun import cli

class Last:
    def __del__(self):
        print("taken apart", flush=True)

last = Last()
cli.app = lambda **_: lambda: 3
atexit.register(print, "at exit", end="")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
cli.command()
"""
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    rank = {"RANK": "1", "WORLD_SIZE": "2"}
    for more, said in ((rank, "a thread\nat exit"), ({}, "a thread\nat exittaken apart\n")):
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, env=alone | more, capture_output=True, text=True, cwd=ROOT)
        assert (ended.returncode, ended.stdout) == (3, said), ended.stderr
    buffered = {name: value for name, value in alone.items() if name != "PYTHONUNBUFFERED"} | rank
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, env=buffered, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.parametrize("mode", [[], ASYNCHRONOUS], ids=["in turn", "asynchronous"])
def test_two_ranks_of_rl_train_what_one_process_does(place: Path, rl_alone: Path, mode: list[str]) -> None:
    """Rank 0 alone starts the reward, which sees every response once, and writes."""
    name = "rl-asynchronous" if mode else "rl-two"
    code, output = run(place, name, *TWO, *mode, command=("rl", "rl.yaml"))
    assert code == 0, output
    found, expected = metrics(place, name), metrics(place, "rl-alone")
    assert [line["step"] for line in found] == [line["step"] for line in expected] == [0, 1, 2]
    assert found[1]["drafter_in_sync"] == 1.0 and found[1]["reward_mean"] > 0 and found[1]["reward_events"] == 0
    for line, other in zip(found, expected, strict=True):
        assert {key: line[key] for key in other} == pytest.approx(other, rel=1e-3, abs=1e-5)
    responses = [
        [(line["step"], line["prompt"], line["response"]) for line in map(json.loads, path.open())]
        for path in (place / name / "samples.jsonl", rl_alone / "samples.jsonl")
    ]
    assert responses[0] == responses[1]
    assert output.count("rl: 2 steps to do") == output.count("next: forerun generate --model") == 1
    assert output.count("carries no MTP block") == 1  # though rank 0 loads it for training and for the rollouts


def test_an_asynchronous_run_ends_when_rank_0_has_no_worker_left(place: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_WORKERS)
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code, output = run(place, "rl-lost", *TWO, *ASYNCHRONOUS, environment=environment, command=("rl", "rl.yaml"))
    assert code == 1, output  # and long before distributed.timeout_s, or `run` had given up
    report = output.splitlines()[-1]
    assert report.startswith("forerun: error: rank ") and output.count("forerun: error:") == 1, output
    assert report.endswith(
        "every rollout worker is lost: rollout worker local-0: the power is gone; the same command goes on from the "
        "last checkpoint"
    )
    assert "Traceback" not in output
    assert [line["step"] for line in metrics(place, "rl-lost")] == [0, 1]


def test_a_rank_killed_in_a_rollout_is_named_and_ends_the_run(place: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAILING_ROLLOUT)
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code, output = run(place, "rl-killed", *TWO, environment=environment, command=("rl", "rl.yaml"))
    assert code == 1, output  # and long before distributed.timeout_s, or `run` had given up
    report = output.splitlines()[-1]
    assert report.startswith("forerun: error: rank 1 (local rank 1, process ") and "was killed by SIGKILL" in report
    assert "[rank 1] about to end" in output and output.count("forerun: error:") == 1
    assert [line["step"] for line in metrics(place, "rl-killed")] == [0, 1]
