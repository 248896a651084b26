"""Metrics as JSON lines, TensorBoard, Weights & Biases, and all at once."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from forerun.errors import ForerunError, UsageError
from forerun.report.writers import JSONLWriter, Metrics, TensorBoardWriter, Writers, make_writers


def strict_lines(path: Path) -> list[dict[str, object]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_jsonl_keeps_every_value_valid(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JSONLWriter(path)
    writer.log(1, {"loss": 2.5, "tokens": 7, "unknown": None})
    writer.log(2, {"nan": math.nan, "inf": math.inf, "ninf": -math.inf})
    writer.log(3, {"numpy": np.float32(0.5), "torch": torch.tensor(3), "bad": np.float32("nan")})
    # Line-buffered: what was logged can be read before the run ends.
    assert strict_lines(path) == [
        {"step": 1, "loss": 2.5, "tokens": 7, "unknown": None},
        {"step": 2, "nan": "nan", "inf": "inf", "ninf": "-inf"},
        {"step": 3, "numpy": 0.5, "torch": 3.0, "bad": "nan"},
    ]
    writer.close()


def test_jsonl_appends_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    writer = JSONLWriter(path)
    writer.log(3, {})
    writer.close()
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "lo', '{"step": 3}']


def test_rewinding_forgets_the_steps_after(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value in (1.0, 2.0):  # a run, and the one that resumes it after step 2
        writers = make_writers(["jsonl", "tensorboard"], tmp_path)
        first = 1
        if value == 2.0:
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write('{"step": 5, "lo')
            writers.rewind(2)
            first = 3
        for step in range(first, 5):
            writers.log(step, {"loss": value})
        writers.close()
    assert strict_lines(tmp_path / "metrics.jsonl") == [
        {"step": step, "loss": value} for step, value in [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    ]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_jsonl_on_a_full_disk() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    writer = JSONLWriter("/dev/full")
    with pytest.raises(ForerunError, match="free some space"):
        writer.log(1, {"loss": 1.0})


def test_tensorboard_holds_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter(tmp_path)
    writer.log(1, {"loss": 2.5, "unknown": None})
    writer.log(2, {"loss": 1.5, "unknown": None})
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 1.5)]


def test_tensorboard_that_cannot_write_is_one_error_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stops its thread as a full disk does."""
    resource = pytest.importorskip("resource")
    shown: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", hook := shown.append)
    writer = TensorBoardWriter(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ForerunError, match="cannot write"):
            for step in range(1000):
                writer.log(step, {"loss": 1.0})
        assert not shown
        another = threading.Thread(target=lambda: 1 / 0)
        another.start()
        another.join()
        assert len(shown) == 1  # not ours to hide
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with contextlib.suppress(ForerunError):
            writer.close()
    assert threading.excepthook == hook


class Collected:
    """Keeps what it was given; fails on close if told to."""

    def __init__(self, on_close: Callable[[], None] = lambda: None) -> None:
        self.logged: list[tuple[int, Mapping[str, float | int | None]]] = []
        self.closed = False
        self._on_close = on_close

    def log(self, step: int, metrics: Metrics) -> None:
        self.logged.append((step, metrics))

    def close(self) -> None:
        self.closed = True
        self._on_close()


def test_several_writers_all_get_everything_and_all_close() -> None:
    def fail() -> None:
        raise ForerunError("disk full")

    writers = [Collected(), Collected(fail), Collected()]
    with pytest.raises(ForerunError, match="disk full"), Writers(writers) as together:
        together.log(4, {"loss": 1.0})
    assert all(writer.logged == [(4, {"loss": 1.0})] and writer.closed for writer in writers)


def test_make_writers_puts_files_where_users_look(tmp_path: Path) -> None:
    with make_writers(["jsonl", "tensorboard"], tmp_path) as writers:
        writers.log(1, {"loss": 1.0})
    assert strict_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    with pytest.raises(UsageError, match="no logger is called 'csv'"):
        make_writers(["csv"], tmp_path)


def test_wandb_gets_the_run_and_its_own_variables_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for project, name in ((None, None), ("mine", "first try")):
        if project is not None and name is not None:
            monkeypatch.setenv("WANDB_PROJECT", project)
            monkeypatch.setenv("WANDB_NAME", name)
        with make_writers(["wandb"], tmp_path / "rl_math", {"seed": 1}) as writers:
            assert (wandb.run.project, wandb.run.name) == (project or "forerun", name or "rl_math")
            writers.log(1, {"loss": 0.5, "acceptance_length": None})
        assert wandb.run is None


def test_wandb_that_refuses_to_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb").teardown()  # it reads its variables once a process
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(
        ForerunError, match=r"^wandb refused to start \(.*[Kk]ey.*\): mend that or set WANDB_MODE=offline$"
    ):
        make_writers(["wandb"], tmp_path)


def test_wandb_missing_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r'pip install -e "\.\[wandb\]"'):
        make_writers(["wandb"], tmp_path)
