"""The command line: `forerun <verb>`. Reads arguments, calls what does the work, turns errors into one line.

A verb's arguments are parsed first and its work runs afterwards, outside the argument parser, so that every way of
failing ends in the same place (`main`). Everything heavy is imported by the work itself: `--version` and `--help`
answer at once.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import typer

from forerun.cli.verbs import Work, app
from forerun.errors import ForerunError, UsageError

# click's UsageError, the base of everything it says about arguments; typer carries click under a private name.
_ArgumentError = cast(type[Exception], typer.BadParameter.__base__)


def command() -> NoReturn:
    """The process of a command: `main`, and its end."""
    code = main()
    if "torch" in sys.modules:
        from forerun.launch.rank import is_rank, leave

        if is_rank():
            leave(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 1 (failed), 2 (unusable input) or 130 (interrupted)."""

    # Libraries read these when they are imported. Models are local directories and progress is ours to show.
    for name, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
    ):
        os.environ.setdefault(name, value)

    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character of a text gets its number
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")

    def parse_and_work() -> int:
        given = None if arguments is None else list(arguments)
        work = app(args=given, prog_name="forerun", standalone_mode=False)
        return work() if callable(work) else int(work or 0)  # not callable: --help and --version have answered

    earlier, verbose = sys.unraisablehook, warnings.formatwarning
    sys.unraisablehook = partial(_again, earlier)
    warnings.formatwarning = _one_line
    try:
        return outcome(parse_and_work)
    finally:
        sys.unraisablehook = earlier
        warnings.formatwarning = verbose


def _one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning as it is for a user, without the line of code that it is from."""
    return f"{' '.join(str(message).split())}\n"


def _again(earlier: Callable[[Any], Any], lost: Any) -> None:
    """Python drops a Ctrl-C that lands in a destructor, of which imports run many: send it once more."""
    if lost.exc_type is KeyboardInterrupt:
        main_thread = threading.main_thread().ident or 0
        threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT)).start()
    else:
        earlier(lost)


def outcome(work: Work) -> int:
    """Exit code of `work`; what it raises is told in one line on stderr, unless it is a fault of our own."""
    try:
        return work()
    except _ArgumentError as error:
        message, context = cast(Any, error).format_message(), getattr(error, "ctx", None)
        if not message:  # no arguments at all: the help has been shown
            return UsageError.exit_code
        verb = context.command_path if context is not None else "forerun"
        return _fail(f"{message.rstrip('.')} (see {verb} --help)", UsageError.exit_code)
    except ForerunError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort) as error:
        return _fail(str(error) or "interrupted; what was finished is kept", 130, label="")
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ForerunError.exit_code
    except OSError as error:
        return _fail(_describe(error), ForerunError.exit_code)


def _describe(error: OSError) -> str:
    text = (error.strerror or str(error) or type(error).__name__).strip().split("\n", 1)[0]
    where = f"{error.filename}: " if error.filename else ""
    mend = "; free some space and run again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return where + text + mend


def _fail(message: str, code: int, label: str = "error: ") -> int:
    if os.environ.get("FORERUN_TRACEBACK") == "1":
        traceback.print_exc()
    print(f"forerun: {label}{' '.join(message.split())}", file=sys.stderr)
    return code
