"""Progress of one phase with rate and ETA: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """Progress through `total` units of work, as a context manager.

        with ProgressBar("rollout", total=64, unit="prompts") as bar:
            bar.advance(1, "acceptance 1.43")

    On a terminal it is a bar; into a file or a pipe it prints a line at the start, about every ten seconds and at the
    end, so that a log shows that work goes on and when it will end. Output goes to stderr: stdout is for results.

    Args:
        name: the phase.
        total: how many units there are; None where that cannot be known (then there is no percentage and no ETA).
        unit: what is counted, in the plural.
        file: where to print.
        clock: seconds, for tests.
        done: units that an earlier run did; they count towards the total and not towards the rate.
    """

    def __init__(
        self,
        name: str,
        total: float | None,
        unit: str = "steps",
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        done: float = 0.0,
    ) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = self._done_before = done
        self._file = file if file is not None else sys.stderr
        self._clock = clock
        self._start = self._last_line = self._last_advance = clock()
        self._note = ""
        self._rich: Progress | None = None
        console = Console(file=self._file)
        if console.is_terminal:
            self._rich = Progress(
                SpinnerColumn(),
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=10),  # so short, the words fit beside it into 80 columns
                _State(self),
                console=console,
            )
            self._task = self._rich.add_task(name, total=total)
            self._rich.update(self._task, completed=done)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    @property
    def rate(self) -> float | None:
        """Units a second, from the start to the last that was done; None before the first."""
        new, seconds = self.done - self._done_before, self._last_advance - self._start
        return new / seconds if new > 0 and seconds > 0 else None

    @property
    def eta(self) -> float | None:
        """Seconds until the end at the rate so far; None while that cannot be told."""
        rate = self.rate
        if rate is None or self.total is None:
            return None
        return max(0.0, (self.total - self.done) / rate - (self._clock() - self._last_advance))

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        """Count `amount` units as done; `note` is a short figure shown at the end of the line."""
        self.done += amount
        self._last_advance = self._clock()
        if note is not None:
            self._note = note
        if self._rich is not None:
            self._rich.update(self._task, completed=self.done)
        elif self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._print(self.state())

    def expect(self, total: float) -> None:
        """Go on with a better known total."""
        self.total = total
        if self._rich is not None:
            self._rich.update(self._task, total=total)

    def state(self) -> str:
        """What a line shows: percentage, count, rate, ETA, note."""
        done = "" if self.total is None else f"{self.done:.0f}/"
        parts = [done + self._counted(self.done if self.total is None else self.total)]
        if self.total:
            parts.insert(0, f"{100 * self.done / self.total:3.0f}%")
        if (rate := self.rate) is not None:
            parts.append(f"{rate:.3g} {self.unit}/s" if rate >= 1 else f"{1 / rate:.3g} s each")
        if (eta := self.eta) is not None:
            parts.append(f"ETA {duration(eta)}")
        return "  ".join(parts + ([self._note] if self._note else []))

    def __enter__(self) -> Self:
        self._start = self._last_line = self._last_advance = self._clock()
        if self._rich is not None:
            self._rich.start()
        else:
            left = f"{self.total - self.done:.0f} of " if self.total is not None and self.done else ""
            self._print(f"{left}{self._counted(self.total)} to do" if self.total is not None else "started")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._rich is not None:
            self._rich.stop()
        outcome = "done in" if kind is None else "stopped after"
        words = [f"{outcome} {duration(self.elapsed)}", self._counted(self.done)]
        self._print("  ".join(words + ([self._note] if self._note else [])))

    def _counted(self, number: float) -> str:
        """A number with its unit."""
        one = self.unit.removesuffix("es") if self.unit.endswith("ches") else self.unit.removesuffix("s")
        return f"{number:.0f} {one if number == 1 else self.unit}"

    def _print(self, text: str) -> None:
        self._last_line = self._clock()
        print(f"{self.name}: {text}", file=self._file, flush=True)


class _State(ProgressColumn):
    """The same words on a terminal as in a log."""

    def __init__(self, bar: ProgressBar) -> None:
        super().__init__()
        self._bar = bar

    def render(self, task: Task) -> Text:
        return Text(self._bar.state())


def duration(seconds: float) -> str:
    """Seconds as people say them: 4.2s, 3:07, 1:02:45."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest}s"
