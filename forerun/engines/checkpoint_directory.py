"""The checkpoints of a run as directories: which are whole, how one takes its name only when it is, which go.

This is what engines share, whatever they write. One that writes over several ranks calls `whole_directory` on every
rank with the `RankGroup` of those ranks:

    with whole_directory(run_dir / "checkpoint-100", ranks) as unfinished:
        ...    # every rank writes its own files into `unfinished`, which is there on all of them
        ...    # rank 0 writes STATE_FILE: a directory without one is not taken for a checkpoint

The directory gets its name when no rank's block has raised, and every rank raises when one has. What a rank does alone
in the block before the ranks talk to one another again goes through `ranks.on_each`, or they would wait for one that
has given up. Ranks of several machines need a file system that they share, and each flushes what it wrote (`flush`;
torch.distributed.checkpoint does). In a thread beside the training, give it `ranks.apart()`; `saving.Saver` does all of
that, and takes a function that writes.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forerun.engines.ranks import RankGroup
from forerun.report.atomic import failures

STATE_FILE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def checkpoints(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first. A directory being written has another name and is not listed."""
    if not run_dir.is_dir():
        return []
    found = [(int(match[1]), path) for path in run_dir.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest whole checkpoint by step number, or None."""
    found = checkpoints(run_dir)
    return found[-1] if found else None


def put_back_replaced(run_dir: Path) -> None:
    """Give the checkpoints their names back that a kill left without, amid the save of others in their place."""
    for replaced in run_dir.glob(".checkpoint-*.replaced"):
        _put_back(replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced")))


def prune_checkpoints(run_dir: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints (at least one stays; 0 keeps all). For one rank."""
    if keep < 1:
        return
    for leftover in run_dir.glob(".checkpoint-*.deleted"):  # of a run that was killed while it deleted
        _delete(leftover)
    for path in checkpoints(run_dir)[:-keep]:
        # Renamed first, so that a kill in the middle leaves nothing that looks like a checkpoint.
        doomed = path.with_name(f".{path.name}.deleted")
        path.rename(doomed)
        _delete(doomed)


@contextmanager
def whole_directory(directory: Path, ranks: RankGroup | None = None) -> Iterator[Path]:
    """A directory to write into that takes the name `directory` only when the block ends well and all is on the disk.

    Until then it has a dotted name beside it, which an interrupted run leaves behind and the next save clears away. A
    directory already there is replaced.

    Args:
        directory: the name, the same on every rank.
        ranks: those that write into it, each within such a block; None is this process alone.

    Raises:
        ForerunError: disk full, permission denied and the like, here or on another rank; what was there before stays.
    """
    ranks = RankGroup() if ranks is None else ranks
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    ranks.on_first(lambda: _open(directory, unfinished))
    failure: Exception | None = None
    try:
        with failures(directory):
            yield unfinished
    except Exception as error:
        failure = error
    except BaseException:  # ends this process: nothing is said to the others
        if ranks.rank == 0:
            _give_up(directory, unfinished)
        raise
    try:
        ranks.fail_together(failure)
    except BaseException:
        if ranks.rank == 0:
            _give_up(directory, unfinished)
        raise
    ranks.on_first(lambda: _take_name(directory, unfinished))


def flush(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open(directory: Path, unfinished: Path) -> None:
    replaced = _replaced(directory)
    with failures(directory):
        _put_back(directory)  # of a save that was killed between its two renames
        # The last are `checkpoint.writer.scratch_directory`'s, of a save killed while it wrote the model.
        inner = directory.parent.glob(f".{glob.escape(unfinished.name)}.*.partial")
        for leftover in (unfinished, replaced, *inner):
            _delete(leftover)
        unfinished.mkdir(parents=True)


def _take_name(directory: Path, unfinished: Path) -> None:
    try:
        with failures(directory):
            for path in [*unfinished.rglob("*"), unfinished]:
                flush(path)
            if os.path.lexists(directory):
                directory.rename(_replaced(directory))
            unfinished.rename(directory)
            flush(directory.parent)
    except BaseException:
        _give_up(directory, unfinished)
        raise
    _delete(_replaced(directory))


def _give_up(directory: Path, unfinished: Path) -> None:
    _put_back(directory)
    _delete(unfinished)


def _replaced(directory: Path) -> Path:
    """Where a directory stands between the two renames that replace it."""
    return directory.with_name(f".{directory.name}.replaced")


def _put_back(directory: Path) -> None:
    if os.path.lexists(_replaced(directory)) and not os.path.lexists(directory):
        _replaced(directory).rename(directory)


def _delete(path: Path) -> None:
    """What may be a link or a file, too: somebody keeps checkpoints on another disk, for instance."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
