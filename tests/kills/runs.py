"""Runs of `forerun sft` and `forerun rl` that are killed with SIGKILL at random instants and go on, beside one that
nobody touches.

After every kill, and at the end: the newest checkpoint is no older than it was, every checkpoint holds what the
untouched run had saved at that step, and no process of the killed run is left. At the end the exported model and all
logged figures are the untouched run's, to the bit, and nothing is left of what a kill cut short.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from forerun.engines.checkpoint_directory import checkpoints, latest_checkpoint
from tests.logged import repeatable_metrics
from tests.trainers.tiny import make_model, make_tokenizer

# "async": forerun rl with rollout workers in threads. "sft" writes its checkpoints while it goes on.
Kind = Literal["sft", "rl", "async"]
KILLS_PER_RUN = 10
LIMIT_S = 300.0  # for one run to end, and for what it started to end with it
_MARK = "FORERUN_KILLED_RUN"
# Names of directories that exist during a save and the deletion of an old checkpoint (`engines.checkpoint_directory`).
_SAVING = (".unfinished", ".replaced", ".deleted")

_context = multiprocessing.get_context("forkserver")
# What takes seconds to import is imported once, and the kills fall into runs instead of into imports.
_context.set_forkserver_preload(
    ["forerun.trainers.rl", "forerun.trainers.sft", "forerun.trainers.asynchronous.trainer"]
)


@dataclass
class Tally:
    """What was done to the killed runs; `in_saves` of the kills fell between the first and the last write of one."""

    tries: int = 0
    kills: int = 0
    in_saves: int = 0
    runs: int = 0
    checkpoints_compared: int = 0


def kill_and_compare(kind: Kind, place: Path, tries: int, steps: int, seed: int = 0) -> Tally:
    """Try `tries` times in all to kill runs of `steps` steps, each at most `KILLS_PER_RUN` times, and compare.

    A run that ends before its kill was a try, too, or a machine that is busy only now and then would never be done.

    Raises:
        AssertionError: a checkpoint was lost or damaged, the result differs, or a process was left behind.
    """
    config = write_run(kind, place, steps)
    untouched = place / "untouched"
    started = time.monotonic()
    assert _run(kind, config, untouched, keep=0) == 0, _log(untouched)
    life = time.monotonic() - started
    assert len(checkpoints(untouched)) == steps
    draw, tally = random.Random(seed), Tally()
    while tally.tries < tries:
        run = place / f"killed-{tally.runs}"
        tally.runs += 1
        for _ in range(KILLS_PER_RUN):
            left = life * (1 - _newest(run) / steps)
            if tally.tries == tries or not _killed(kind, config, run, draw, left, tally):
                break
            _compare_checkpoints(run, untouched, tally)
        assert _run(kind, config, run, keep=2) == 0, _log(run)
        _compare_checkpoints(run, untouched, tally)
        _compare(run / "model", untouched / "model")
        left = [name for name in os.listdir(run) if name.startswith(".")]
        assert not left, f"{run}: {left} of a killed save or deletion are still there"
        assert repeatable_metrics(run) == repeatable_metrics(untouched), f"{run}: metrics.jsonl differs"
    return tally


def write_run(kind: Kind, place: Path, steps: int) -> Path:
    """A tiny checkpoint, its data, and the configuration of a run that saves after every step."""
    make_model().save_pretrained(place / "checkpoint")
    make_tokenizer().save_pretrained(place / "checkpoint")
    words = "abcdefgh"
    if kind == "sft":
        rows: list[dict[str, Any]] = [
            {"prompt": f"say {w} {v}", "response": f" {w} {v} "} for w in words for v in words
        ]
        own = "data: {train_files: [TRAIN], max_length: 24}\ntrain_batch_size: 4\nmicro_batch_size: 2\n"
    else:
        rows = [
            {
                "prompt": [{"role": "user", "content": f"say {w}"}],
                "reward_model": {"ground_truth": w},
                "data_source": "tiny",
            }
            for w in words
        ]
        (place / "reward.py").write_text(
            "def share(prompt, response, truth, extra):\n    return response.count(truth)\n"
        )
        own = (
            "data: {train_files: [TRAIN]}\n"
            f"reward: {{function: '{place / 'reward.py'}:share'}}\n"
            "rollout: {n: 4, max_response_length: 6, max_prompt_length: 16, deterministic: true}\n"
            "train_batch_size: 4\nppo_mini_batch_size: 2\nmicro_batch_size: 8\n"
        )
    if kind == "async":
        own += "async_training: {enable: true, num_workers: 2, partial_rollout: false}\n"
    (place / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = place / "run.yaml"
    config.write_text(
        f"model: {{path: {place / 'checkpoint'}}}\n"
        + own.replace("TRAIN", str(place / "train.jsonl"))
        + "mtp: {enable: true, enable_train: true, enable_rollout: true, num_layers: 2, num_speculative_tokens: 2}\n"
        "optim: {lr: 1e-2, lr_scheduler_type: cosine, warmup_steps: 3}\n"
        f"trainer: {{total_steps: {steps}, save_freq: 1, logger: [jsonl], async_save: {str(kind == 'sft').lower()}}}\n"
    )
    return config


def _run(kind: Kind, config: Path, run: Path, keep: int) -> int | None:
    process = _start(kind, config, run, keep, mark="")
    process.join(LIMIT_S)
    if process.exitcode is None:
        process.kill()
    return process.exitcode


def _killed(kind: Kind, config: Path, run: Path, draw: random.Random, left: float, tally: Tally) -> bool:
    """Start the run, or go on with it, and kill it; False if it ended first.

    Half of the kills are at any instant of the run, which has about `left` seconds to go, half during a save.
    """
    mark = uuid.uuid4().hex
    tally.tries += 1
    process = _start(kind, config, run, 2, mark)
    aims_at_save = draw.random() < 0.5
    deadline = time.monotonic() + draw.uniform(0, left)
    saves = draw.randint(1, 4)
    seen = False
    while process.is_alive():
        saving = _is_saving(run)
        saves -= saving and not seen
        seen = saving
        if (saves <= 0 and saving) if aims_at_save else time.monotonic() >= deadline:
            break
        time.sleep(0.0005)
    if aims_at_save:
        time.sleep(draw.uniform(0, 0.03))
    if not process.is_alive():
        process.join()
        assert process.exitcode == 0, _log(run)
        return False
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    tally.kills += 1
    tally.in_saves += _is_saving(run)
    _wait_for_the_end_of(mark)
    return True


def _start(kind: Kind, config: Path, run: Path, keep: int, mark: str) -> Any:
    run.mkdir(exist_ok=True)
    arguments = [
        "sft" if kind == "sft" else "rl",
        str(config),
        f"trainer.output_dir={run}",
        f"trainer.save_total_limit={keep}",
    ]
    process = _context.Process(target=_work, args=(arguments, str(run / "output.log"), mark))
    process.start()
    return process


def _work(arguments: list[str], log: str, mark: str) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ[_MARK] = mark
    torch.set_num_threads(1)
    from forerun.cli import main

    sys.exit(main(arguments))


def _is_saving(run: Path) -> bool:
    try:
        return any(name.startswith(".") and name.endswith(_SAVING) for name in os.listdir(run))
    except FileNotFoundError:
        return False


def _wait_for_the_end_of(mark: str) -> None:
    """Of the processes that the killed one had started, such as its reward workers."""
    deadline = time.monotonic() + LIMIT_S
    while left := list(_marked(mark)):
        assert time.monotonic() < deadline, f"processes of the killed run are still there: {left}"
        time.sleep(0.01)


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{_MARK}={mark}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    yield int(entry)
            except OSError:  # it has ended, or is another user's
                continue


def _compare_checkpoints(run: Path, untouched: Path, tally: Tally) -> None:
    seen = run / "newest"  # what was there at the last look
    last = _newest(run)
    before = int(seen.read_text()) if seen.exists() else 0
    assert last >= before, f"{run}: checkpoint-{before} was lost, the newest is {last}"
    seen.write_text(str(last))
    for path in checkpoints(run):
        _compare(path, untouched / path.name)
        tally.checkpoints_compared += 1


def _newest(run: Path) -> int:
    """The step of the newest checkpoint, 0 where there is none."""
    path = latest_checkpoint(run)
    return 0 if path is None else int(path.name.removeprefix("checkpoint-"))


def _compare(found: Path, expected: Path) -> None:
    """Two directories hold the same files: tensors to the bit, JSON by value, anything else byte by byte."""
    names = sorted(str(path.relative_to(expected)) for path in expected.rglob("*") if path.is_file())
    assert sorted(str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()) == names, found
    for name in names:
        if name.endswith(".safetensors"):
            a, b = load_file(found / name), load_file(expected / name)
            assert a.keys() == b.keys(), f"{found / name}"
            for key in a:
                same = a[key].dtype == b[key].dtype and torch.equal(a[key], b[key])
                assert same, f"{found / name}: {key} differs"
        elif name.endswith(".json"):
            assert json.loads((found / name).read_text()) == json.loads((expected / name).read_text()), found / name
        else:
            assert (found / name).read_bytes() == (expected / name).read_bytes(), found / name


def _log(run: Path) -> str:
    return (run / "output.log").read_text()[-3000:]
