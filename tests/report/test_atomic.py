"""Files are whole or not there, and a failed write is one line that leaves the old file alone."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from forerun.errors import ForerunError
from forerun.report.atomic import failures, write_bytes, write_text


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "first")
    write_text(path, "zweite Fassung: ä")
    assert path.read_text(encoding="utf-8") == "zweite Fassung: ä"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "file", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "mend"), [(errno.ENOSPC, "free some space"), (errno.EACCES, "choose a directory"), (errno.EIO, "")]
)
def test_a_failure_at_any_step_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int, mend: str
) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(ForerunError) as caught:
        write_text(path, "new")
    monkeypatch.undo()
    assert caught.value.exit_code == 1
    assert str(path) in str(caught.value) and mend in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.txt"]


def test_an_interrupt_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "file.txt", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ForerunError, match="cannot write"):
        write_text(tmp_path / "taken" / "file.txt", "x")
    assert (tmp_path / "taken").read_text() == "a file"


def test_a_really_full_disk() -> None:
    """/dev/full refuses every write as a full disk does."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    with (
        pytest.raises(ForerunError, match="no space left on device; free some space"),
        failures("/dev/full"),
        open("/dev/full", "w") as file,
    ):
        file.write("x")
