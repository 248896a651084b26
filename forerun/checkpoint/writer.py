"""Files that appear whole or not at all: written beside, then renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.families import FamilyRecord


@contextmanager
def scratch_directory(target: str | Path) -> Iterator[Path]:
    """A directory on the target's file system to write into; removed at the end, whatever happens."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    os.chmod(scratch, 0o755)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def replace_files(scratch: Path, target: str | Path) -> None:
    """Move what was written in `scratch` to `target`.

    A target that does not exist appears in one rename. In one that does, each file is replaced by a rename, weights
    before the index and configuration that name them; files that `scratch` does not have stay.
    """
    target = Path(target)
    if not target.exists():
        os.rename(scratch, target)
        return
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(scratch.iterdir(), key=lambda f: (f.suffix == ".json", f.name)):
        os.replace(file, target / file.name)


def restore_family_config(directory: Path, family: FamilyRecord, source: Path | None) -> None:
    """Give config.json the family's own names, where another model's code ran the trunk; carry its remote code over."""
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {"model_type": family.model_types[0], "architectures": [family.architecture]}
    if source is not None:
        original = json.loads((source / "config.json").read_text(encoding="utf-8"))
        if "auto_map" in original:
            config["auto_map"] = original["auto_map"]
            for code in source.glob("*.py"):
                shutil.copy(code, directory / code.name)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
