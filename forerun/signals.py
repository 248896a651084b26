"""SIGTERM, which schedulers send some time before they kill, ends a run as Ctrl-C does: it says where it goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """In the block, SIGTERM raises KeyboardInterrupt in the main thread."""
    earlier = signal.getsignal(signal.SIGTERM)
    handle_sigterm(interrupt)
    try:
        yield
    finally:
        handle_sigterm(earlier or signal.SIG_DFL)


def interrupt(*_: object) -> None:
    """A handler."""
    raise KeyboardInterrupt


def handle_sigterm(handler: Any) -> None:
    """Set the handler, in the thread that has it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
