"""Environments are built whole or not at all, once, and say why they could not be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracles import environments
from tests.oracles.environments import OracleUnavailable, environment


def test_built_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "HERE", tmp_path)
    monkeypatch.setenv("FORERUN_ORACLE_CACHE", str(tmp_path / "cache"))
    said: list[str] = []

    # Pinned in a second file, so that what it needs can change under one key.
    (tmp_path / "nothing.txt").write_text("-r pins\n")
    (tmp_path / "pins").write_text("./not-there.whl\n")
    with pytest.raises(OracleUnavailable, match=r"pip install` failed: ERROR: .*not-there\.whl"):
        environment("nothing", said.append)
    (place,) = (tmp_path / "cache").glob("nothing-*/")
    (place / "leftover").touch()

    (tmp_path / "pins").write_text("# nothing\n")
    interpreter = environment("nothing", said.append)
    assert interpreter == place / "bin" / "python" and interpreter.exists()
    assert not (place / "leftover").exists()  # what was not whole was not built upon
    assert environment("nothing", said.append) == interpreter
    assert [line.split(" ", 1)[0] for line in said] == ["building", "building", "built"]
