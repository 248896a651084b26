"""Files that are whole or not there: written beside their place, flushed to the disk, then renamed onto it."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from forerun.errors import ForerunError


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace `path` by `data`; at any instant it holds the old content or the new one, whole.

    Raises:
        ForerunError: disk full, permission denied and the like; what was there before is untouched.
    """
    path = Path(path)
    with failures(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # mkstemp makes files that only their owner can read; a report is meant to be read.
            os.chmod(beside, 0o666 & ~_umask())
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise
        _sync_directory(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """`write_bytes` of `text` in UTF-8."""
    write_bytes(path, text.encode())


@contextmanager
def failures(path: str | Path) -> Iterator[None]:
    """Turn an OSError about `path`, or safetensors' own error for one, into one line that says what to do."""
    try:
        yield
    except OSError as error:
        raise ForerunError(describe(error, path)) from error
    except SafetensorError as error:
        raise ForerunError(
            f"cannot write {path}: {error}; free some space and run again (what was written before is kept)"
        ) from error


def describe(error: OSError, path: str | Path) -> str:
    """One line for a failed write, with the mend where there is one to name."""
    reason = f"cannot write {path}: {(error.strerror or str(error)).lower()}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{reason}; free some space and run again (what was written before is kept)"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{reason}; choose a directory that you may write to"
    return reason


def _umask() -> int:
    # The process's umask can only be read by setting it; /proc has it without that race between threads.
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    return 0o022


def _sync_directory(directory: Path) -> None:
    """Make the rename itself durable; not every file system can, and the file is whole either way."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
