"""Ranks as Ray actors: they train what one process does; a rank that fails is named; nothing is left of a run."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import forerun
from forerun.cluster import _REMOVE, _folder, connected
from forerun.config import DistributedConfig, RLConfig, SFTConfig
from forerun.config_file import load_config
from forerun.errors import ForerunError, UsageError
from forerun.launch.command import run
from forerun.launch.failure import RankFailedError, error_of, trace_lines
from forerun.launch.ray_ranks import _Place, _Rank, _reported, start_ranks
from forerun.rollout.protocol import Request
from forerun.rollout.ray_worker import RayWorker
from forerun.trainers.asynchronous.trainer import AsyncRLTrainer
from forerun.trainers.ray_workers import ray_workers, replacing_s, starting_s
from forerun.trainers.rl import RLTrainer
from forerun.trainers.sft import SFTTrainer
from tests.kills.runs import write_run
from tests.logged import repeatable_metrics

LIMIT_S = 240
TWO = DistributedConfig(nproc_per_node=2, timeout_s=300)


def _listening() -> set[tuple[int, str, int]]:
    """Process, address and port of every socket at which this process or what it started listens."""
    found = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # Ray ends workers that nobody wants
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((process.pid, connection.laddr.ip, connection.laddr.port))
    return found


@pytest.fixture(scope="module")
def listening_before() -> set[tuple[int, str, int]]:
    """What other tests left."""
    return _listening()


@pytest.fixture(scope="module")
def ray(listening_before: set[tuple[int, str, int]]) -> Iterator[Any]:
    """One for all tests of this module; what is launched in this process joins it."""
    before = dict(os.environ)
    with connected(None, cpus=4) as module:
        yield module
    os.environ.clear()
    os.environ |= before


def test_it_listens_to_this_machine_alone(ray: Any, listening_before: set[tuple[int, str, int]]) -> None:
    ray.get(ray.remote(lambda: None).remote())  # so that there is a worker
    listening = _listening() - listening_before
    assert {ip.removeprefix("::ffff:") for _, ip, _ in listening} == {"127.0.0.1"}
    started = {child.pid: _line(child) for child in psutil.Process().children(recursive=True)}
    lines = [started.get(process, "") for process, *_ in listening]
    assert all(any(name in line for line in lines) for name in ("raylet", "gcs_server"))
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_two_actors_train_what_one_process_does(ray: Any, tmp_path: Path) -> None:
    config = write_run("sft", tmp_path, 3)
    settings = ["optim.lr=1e-3", "train_batch_size=5"]
    alone, two = tmp_path / "alone", tmp_path / "two"
    SFTTrainer(load_config(SFTConfig, config, [f"trainer.output_dir={alone}", *settings])).train()
    run("sft", config, ["launch=ray", "distributed.nproc_per_node=2", f"trainer.output_dir={two}", *settings])
    found, expected = (load_file(path / "model" / "model.safetensors") for path in (two, alone))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=2e-5, msg=name)
    everything = ray.cluster_resources()["CPU"]
    _wait(lambda: ray.available_resources().get("CPU") == everything)  # the places are free again


def _met(then: Callable[[], None]) -> Callable[[], None]:
    """Work of a rank: meet the other, rank 1 does `then`, and both wait for each other again."""

    def work() -> None:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            print("about to end", flush=True)
            then()
        dist.all_reduce(torch.ones(1))

    return work


def _raise() -> None:
    raise RuntimeError("the data of rank 1 is gone")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _refuse() -> None:
    raise UsageError("no such file: /nowhere.jsonl")


def test_a_rank_that_raises_is_named_with_its_last_lines(ray: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError) as failed:
        start_ranks(_met(_raise), TWO, wants_cuda=False)
    report = str(failed.value)
    assert report.startswith("rank 1 (local rank 1, process ") and f"on {os.uname().nodename} failed" in report
    assert report.endswith("with exit code 1: RuntimeError: the data of rank 1 is gone") and failed.value.exit_code == 1
    assert '[rank 1]     raise RuntimeError("the data of rank 1 is gone")' in capfd.readouterr().err


def test_a_rank_that_is_killed_is_named_with_its_last_lines(ray: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """And not rank 0, whose connection to it broke."""
    with pytest.raises(RankFailedError) as failed:
        start_ranks(_met(_die), TWO, wants_cuda=False)
    report = str(failed.value)
    assert report.startswith("rank 1 (local rank 1, process ") and "was killed, or ended without a word" in report
    assert "[rank 1] about to end" in capfd.readouterr().err


def test_what_a_rank_cannot_use_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no traceback: the line says it all."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    raised = _Rank(0, 0, 1, os.getcwd()).work(_refuse, "127.0.0.1", 1)
    assert raised is not None and raised.exit_code == 2
    place = _Place("", "", "here", 17, Path())
    report = _reported(0, 0, place, raised)
    assert isinstance(report, UsageError) and report.exit_code == 2 and trace_lines(raised.trace) == []
    assert str(report) == "no such file: /nowhere.jsonl (on here)"
    place.host = os.uname().nodename
    assert str(_reported(0, 0, place, raised)) == "no such file: /nowhere.jsonl"
    other = error_of("rank 1", 3, "gone")  # and no failure passes for one, or for a success
    assert isinstance(other, RankFailedError) and (other.exit_code, str(other)) == (
        1,
        "rank 1 failed with exit code 3: gone",
    )


def test_ranks_without_room_are_refused_in_time(ray: Any) -> None:
    many = DistributedConfig(nproc_per_node=10_000, timeout_s=1)
    with pytest.raises(ForerunError, match=r"no room within distributed\.timeout_s=1 for 10000 CPU on each of 1 mach"):
        start_ranks(_refuse, many, wants_cuda=False)
    elsewhere = DistributedConfig(nproc_per_node=1, nnodes=2, timeout_s=1, ray_address="auto")
    with pytest.raises(ForerunError, match=r"for 1 CPU on each of 2 machines; it has \d+ CPU, 0 GPU on 1 in all"):
        start_ranks(_refuse, elsewhere, wants_cuda=False)


ASYNC = ["launch=ray", "async_training.enable=true", "async_training.max_staleness=1", "rollout.deterministic=false"]


def test_a_rollout_worker_that_is_killed_costs_no_response(ray: Any, tmp_path: Path) -> None:
    """Each is trained on once: those that the dead one held are given to the other, and a third takes its place."""
    more = ["async_training.num_workers=2", "rollout.max_response_length=48", "rollout.n=8"]
    config = load_config(RLConfig, write_run("rl", tmp_path, 6), [*ASYNC, *more, f"trainer.output_dir={tmp_path}/run"])
    workers, replace_worker = ray_workers(ray, config)
    victim = workers[0]
    assert isinstance(victim, RayWorker)
    submit, held = victim.submit, []

    def submit_and_die(requests: Sequence[Request]) -> None:
        submit(requests)
        if made.rl_step > 0 and not held:
            held.extend(request.request_id for request in requests)
            os.kill(victim.process[1], signal.SIGKILL)

    made = AsyncRLTrainer(config, workers=workers, replace_worker=replace_worker)
    victim.submit = submit_and_die  # type: ignore[method-assign]
    trained: list[str] = []
    try:
        for _ in range(6):
            metrics = made.turn(pause=False)
            trained += [sample.completion.request_id for sample in made.samples]
            assert metrics["staleness_max"] <= 1  # type: ignore[operator]
    finally:
        made.close()
    wanted = {f"{step}-{place}-{response}" for step in range(6) for place in range(4) for response in range(8)}
    assert len(trained) == len(wanted) and set(trained) == wanted
    assert metrics["requests_reissued"] >= len(held) > 0 and set(held) <= wanted  # type: ignore[operator]
    assert metrics["rollout_workers"] == 2 and metrics["drafter_in_sync"] == 1


def test_ranks_do_not_wait_for_a_worker_that_finds_no_place_as_long_as_they_wait_at_all(
    ray: Any, tmp_path: Path
) -> None:
    limits = ["async_training.worker_timeout_s=60", "distributed={nproc_per_node: 2, timeout_s: 62}"]
    config = load_config(RLConfig, write_run("rl", tmp_path, 1), [*ASYNC, *limits])
    alone = replace(config, distributed=replace(config.distributed, nproc_per_node=1))
    assert (starting_s(config), replacing_s(config)) == (31, 1) and starting_s(alone) == replacing_s(alone) == 62
    workers, replace_worker = ray_workers(ray, config)
    assert [each._settings.start_timeout_s for each in workers if isinstance(each, RayWorker)] == [31]
    holder = ray.remote(lambda: time.sleep(1000)).options(num_cpus=ray.cluster_resources()["CPU"] - 1).remote()
    try:
        with pytest.raises(ForerunError, match=r"no answer to start within 1 s; it asks Ray for 1 CPU"):
            replace_worker(workers[0].name)
    finally:
        ray.cancel(holder, force=True)
        for each in workers:
            each.close()


def test_an_asynchronous_run_is_launched(ray: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run("rl", write_run("rl", tmp_path, 3), [*ASYNC, f"trainer.output_dir={out}"])
    lines = repeatable_metrics(out)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["rollout_workers"] == 1 and line["drafter_in_sync"] == 1 for line in lines)
    _wait_for_the_end_of_workers()


def test_two_actors_of_rl_train_what_one_process_does(ray: Any, tmp_path: Path) -> None:
    """In turn, each with an engine of its own; and asynchronously, with a worker that is a third actor."""
    config = write_run("rl", tmp_path, 2)
    RLTrainer(load_config(RLConfig, config, [f"trainer.output_dir={tmp_path / 'alone'}"])).train()
    expected = load_file(tmp_path / "alone" / "model" / "model.safetensors")
    turns = ["async_training={enable: true, max_staleness: 0, partial_rollout: false}"]
    for name, mode in (("two", []), ("asynchronous", turns)):
        out = tmp_path / name
        run("rl", config, ["launch=ray", "distributed.nproc_per_node=2", f"trainer.output_dir={out}", *mode])
        found = load_file(out / "model" / "model.safetensors")
        assert found.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-3, atol=1e-4, msg=f"{name}: {key}")
        for line, other in zip(repeatable_metrics(out), repeatable_metrics(tmp_path / "alone"), strict=True):
            assert {key: line[key] for key in other} == pytest.approx(other, rel=1e-3, abs=1e-5)
    _wait_for_the_end_of_workers()


def _wait_for_the_end_of_workers() -> None:
    _wait(lambda: not [child for child in psutil.Process().children(recursive=True) if "_EngineActor" in _line(child)])


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def test_a_run_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    """Neither processes nor files: Ctrl-C of a terminal goes to the whole group."""
    config = write_run("sft", tmp_path, 10_000)
    short = tempfile.mkdtemp(prefix="fr")  # Ray's sockets lie under it, and their paths may not be long
    arguments = ["sft", str(config), "launch=ray", "distributed.nproc_per_node=2", f"trainer.output_dir={tmp_path}/run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "forerun.cli", *arguments, "trainer.save_freq=-1", "optim.warmup_steps=0"],
        env=os.environ | {"TMPDIR": short, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    started: list[psutil.Process] = []
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        _wait(lambda: process.poll() is None and metrics.exists() and metrics.read_text().count("\n") > 1)
        started = psutil.Process(process.pid).children(recursive=True)
        assert len([1 for child in started if "ray::_Rank" in _line(child)]) == 2
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130, output
        assert output.splitlines()[-1].startswith("forerun: interrupted before its first checkpoint"), output
        _, alive = psutil.wait_procs(started, timeout=LIMIT_S)
        assert not alive and os.listdir(short) == []
    finally:
        for child in [*started, process]:
            if psutil.pid_exists(child.pid):
                child.kill()
        shutil.rmtree(short, ignore_errors=True)


WAITING = """
import os, signal, time
from forerun.cluster import connected
try:
    with connected(None, cpus=1) as ray:
        print(os.getpid(), flush=True)
        ray.get(ray.remote(lambda: time.sleep(1000)).remote())
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGTERM).name)
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_sigterm_interrupts_as_ctrl_c_does_and_a_kill_leaves_no_files(end: signal.Signals) -> None:
    """Ray's own handler of SIGTERM would end its processes under the run's feet, which aborts then."""
    short = tempfile.mkdtemp(prefix="fr")
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        env=os.environ | {"TMPDIR": short},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    started: list[psutil.Process] = []
    try:
        assert process.stdout is not None and int(process.stdout.readline()) == process.pid
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(end)
        output, _ = process.communicate(timeout=LIMIT_S)
        if end == signal.SIGKILL:
            _wait(lambda: os.listdir(short) == [])
            return  # two of Ray's processes take their time over it
        assert (process.returncode, output) == (0, "interrupted SIG_DFL\n")
        _, alive = psutil.wait_procs(started, timeout=LIMIT_S)
        assert started and not alive and os.listdir(short) == []
    finally:
        for child in [*started, process]:
            if psutil.pid_exists(child.pid):
                child.kill()
        shutil.rmtree(short, ignore_errors=True)


# Goes before the remover, and writes once more when that has looked three times, or ends before.
WRITTEN_LATE = """
import atexit, itertools, os, sys, time
looks, pause = itertools.count(1), time.sleep
def write():
    atexit.unregister(write)
    os.makedirs(sys.argv[1])
    open(os.path.join(sys.argv[1], "late.log"), "w").close()
def pausing(seconds):
    if next(looks) == 3:
        write()
    pause(seconds)
atexit.register(write)
time.sleep = pausing
"""


def test_files_that_are_written_once_more_are_removed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.cluster._REMOVE", WRITTEN_LATE + _REMOVE)
    monkeypatch.setattr("forerun.cluster._REMOVED_S", LIMIT_S)
    with _folder() as folder:
        shutil.rmtree(folder)  # as if its remover had found it gone already
    assert not os.path.exists(folder)


def test_files_are_removed_also_where_a_scheduler_ends_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.cluster._REMOVED_S", LIMIT_S)
    with _folder() as folder:
        remover = next(child for child in psutil.Process().children() if folder in _line(child))
        _wait(lambda: _ignores_sigterm(remover.pid))
        remover.terminate()
        time.sleep(0.1)
    assert not os.path.exists(folder)


def _ignores_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


def test_the_end_does_not_wait_for_files_that_are_written_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forerun.cluster._REMOVED_S", 0.1)
    with _folder() as folder:
        pass
    assert f"processes of Ray still write into {folder}: it is removed within a minute" in caplog.text
    _wait(lambda: not os.path.exists(folder))


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("somewhere", "distributed.ray_address=somewhere is no address"),
        ("ray://127.0.0.1:1", "is no address: give the HOST:PORT of `ray start --head`"),
        ("127.0.0.1:1", r"nobody answers at distributed.ray_address=127.0.0.1:1"),
    ],
)
def test_an_address_without_ray_is_one_line(address: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # as in a process that has not joined the module's
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    config = DistributedConfig(nproc_per_node=2, ray_address=address)
    with pytest.raises(ForerunError, match=message) as refused:
        start_ranks(_refuse, config, wants_cuda=False)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["engine.device=cuda"], r"nobody answers at distributed.ray_address=127.0.0.1:1"),
        (["engine.device=auto", "engine.cpu_offload=true"], r"nobody answers at distributed.ray_address=127.0.0.1:1"),
        (["engine.device=cuda", "engine.fsdp_size=3"], "engine.fsdp_size=3 must divide the number of ranks, 2"),
        (["engine.device=cuda:0"], "engine.device=cuda:0 would put every rank there"),
        (["engine.device=cpu", "engine.cpu_offload=true"], "engine.device is the CPU already"),
    ],
)
def test_ranks_elsewhere_may_have_gpus_that_this_machine_has_not(
    settings: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    there = ["launch=ray", "distributed={nproc_per_node: 2, ray_address: '127.0.0.1:1'}"]
    with pytest.raises(ForerunError, match=message):
        run("sft", write_run("sft", tmp_path, 1), [*there, *settings])


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = write_run("sft", tmp_path, 1)
    with pytest.raises(UsageError, match=re.escape("pip install -e '.[ray]'")):
        run("sft", config, ["launch=ray", f"trainer.output_dir={tmp_path}/run"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["launch=torchrun", "distributed.ray_address=auto"], "distributed.ray_address is of launch=ray"),
        (
            ["launch=ray", "distributed={nnodes: 2, rdzv_endpoint: 'a:1'}"],
            "distributed.rdzv_endpoint is of launch=torchrun",
        ),
        (["launch=ray", "distributed.nnodes=2"], "distributed.nnodes=2 with distributed.rdzv_endpoint=null"),
    ],
)
def test_settings_of_another_launcher_are_refused(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run("sft", write_run("sft", tmp_path, 1), settings)


def test_ray_is_imported_in_one_place_and_by_need() -> None:
    found = [
        (file.name, isinstance(node, ast.FunctionDef))
        for file in Path(forerun.__file__).parent.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        for inner in ast.walk(node)
        if (isinstance(inner, ast.Import) and any(alias.name.split(".")[0] == "ray" for alias in inner.names))
        or (isinstance(inner, ast.ImportFrom) and (inner.module or "").split(".")[0] == "ray")
    ]
    assert found == [("cluster.py", True)]
