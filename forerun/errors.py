"""The errors a user can meet: one line that says what is wrong and what to do.

The command line prints the line without a traceback. `UsageError` (bad input or configuration, found before any work
is done) exits with 2, every other `ForerunError` with 1.
"""

from __future__ import annotations


class ForerunError(Exception):
    """Something failed while running; the message is one line and names the mend."""

    exit_code = 1


class UsageError(ForerunError):
    """The caller's input cannot be used: a path, a configuration key, a value."""

    exit_code = 2


def one_line(error: BaseException) -> str:
    """What an exception says, without line breaks; its type's name if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
