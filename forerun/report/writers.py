"""Where metrics go while a run is on: JSON lines, TensorBoard, Weights & Biases, behind one small protocol."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from forerun.errors import ForerunError, UsageError, one_line
from forerun.report.atomic import failures, write_text

Metrics = Mapping[str, float | int | None]


class MetricsWriter(Protocol):
    """Takes a step's metrics. None means "cannot be known here" and is never written as 0."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def rewind(self, step: int) -> None:
        """Forget what was logged after `step`: a resumed run logs it again."""
        ...

    def close(self) -> None: ...


class JSONLWriter:
    """One JSON object a line, `{"step": ..., name: value, ...}`, appended and handed to the system at once.

    None is null; JSON has no other non-numbers, so nan and the infinities become the strings "nan", "inf", "-inf".

    Raises:
        ForerunError: the file cannot be opened or written; the lines before stay.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with failures(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._end_torn_line()
            self._file = self.path.open("a", buffering=1, encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        line = json.dumps({"step": step} | {name: _json_number(value) for name, value in metrics.items()})
        with failures(self.path):
            self._file.write(line + "\n")

    def rewind(self, step: int) -> None:
        self._file.close()
        rewind_lines(self.path, step)
        with failures(self.path):
            self._file = self.path.open("a", buffering=1, encoding="utf-8")

    def close(self) -> None:
        with failures(self.path):
            self._file.close()

    def _end_torn_line(self) -> None:
        """A run that was killed while writing leaves half a line; the next one must not continue it."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return
        with self.path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


class TensorBoardWriter:
    """Scalars as TensorBoard event files in `directory`; None is left out, as TensorBoard has no such value."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._open(purge_step=None)
        # Its thread hands what goes wrong to the next flush, which raises it here, and prints a traceback besides.
        self._excepthook = threading.excepthook
        threading.excepthook = self._on_thread_exception

    def _open(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with failures(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(log_dir=str(self.directory), purge_step=purge_step)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        from_tensorboard = type(args.thread).__module__.startswith("tensorboard.")
        if not (from_tensorboard and isinstance(args.exc_value, OSError)):
            self._excepthook(args)

    def log(self, step: int, metrics: Metrics) -> None:
        with failures(self.directory):
            for name, value in metrics.items():
                if value is not None:
                    self._writer.add_scalar(name, float(value), step)
            self._writer.flush()

    def rewind(self, step: int) -> None:
        with failures(self.directory):
            self._writer.close()
        self._open(purge_step=step + 1)

    def close(self) -> None:
        try:
            with failures(self.directory):
                self._writer.close()
        finally:
            threading.excepthook = self._excepthook


class WandbWriter:
    """Weights & Biases, which its variables steer: WANDB_PROJECT and WANDB_NAME win over ours, and
    WANDB_MODE=offline keeps it on this machine. None is left out.

    Raises:
        UsageError: wandb is not installed.
    """

    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError('the wandb logger needs wandb: pip install -e ".[wandb]"') from error
        Path(directory).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "forerun"),
                name=os.environ.get("WANDB_NAME", Path(directory).name),
                dir=str(directory),
                config=dict(config or {}),
            )
        except wandb.errors.Error as error:
            raise ForerunError(
                f"wandb refused to start ({one_line(error)}): mend that or set WANDB_MODE=offline"
            ) from error

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({name: value for name, value in metrics.items() if value is not None}, step=step)

    def rewind(self, step: int) -> None:
        """Nothing to do: every process is a run of its own there."""

    def close(self) -> None:
        self._run.finish()


class Writers:
    """Several writers as one; closing closes every one of them, whichever fails."""

    def __init__(self, writers: Sequence[MetricsWriter] = ()) -> None:
        self.writers = list(writers)

    def log(self, step: int, metrics: Metrics) -> None:
        for writer in self.writers:
            writer.log(step, metrics)

    def rewind(self, step: int) -> None:
        for writer in self.writers:
            writer.rewind(step)

    def close(self) -> None:
        with ExitStack() as stack:
            for writer in self.writers:
                stack.callback(writer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def make_writers(loggers: Sequence[str], output_dir: str | Path, config: Mapping[str, Any] | None = None) -> Writers:
    """The writers named in `trainer.logger`: `metrics.jsonl`, `tensorboard/` and wandb's files, all in `output_dir`.

    Raises:
        UsageError: a name that is not one of jsonl, tensorboard, wandb, or a missing package.
        ForerunError: `output_dir` cannot be written.
    """
    output_dir = Path(output_dir)
    made = Writers()
    for name in loggers:
        match name:
            case "jsonl":
                made.writers.append(JSONLWriter(output_dir / "metrics.jsonl"))
            case "tensorboard":
                made.writers.append(TensorBoardWriter(output_dir / "tensorboard"))
            case "wandb":
                made.writers.append(WandbWriter(output_dir, config))
            case _:
                made.close()
                raise UsageError(f"no logger is called {name!r}: use jsonl, tensorboard or wandb")
    return made


def rewind_lines(path: Path, step: int) -> None:
    """Drop the lines of a JSON lines file whose "step" is past `step`, and torn ones."""
    if not path.is_file():
        return
    with failures(path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if (logged := _step_of(line)) is not None and logged <= step]
    if len(kept) < len(lines):
        write_text(path, "".join(kept))


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


def _json_number(value: float | int | None) -> float | int | str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # numpy and torch scalars are numbers here too, but not to the json module.
    return value if value is None or isinstance(value, bool | int | float) else _json_number(float(value))
