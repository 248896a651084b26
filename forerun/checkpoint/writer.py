"""Files that appear whole or not at all: written beside, then renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from forerun.checkpoint.files import locate, read_json_object
from forerun.checkpoint.reader import CONFIG, INDEX, SINGLE, WEIGHTS, CheckpointReader
from forerun.errors import ForerunError
from forerun.families import FamilyRecord

# What belongs to a checkpoint and not to its model.
_CARRIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
)


@contextmanager
def scratch_directory(target: str | Path) -> Iterator[Path]:
    """A directory on the target's file system to write into; removed at the end, whatever happens.

    Raises:
        ForerunError: safetensors cannot write, for instance because the disk is full (its error is no OSError).
    """
    target = Path(os.path.realpath(target))  # a link may lead to another file system
    home = target if os.path.ismount(target) else target.parent
    home.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=home))
    os.chmod(scratch, 0o755)
    try:
        yield scratch
    except SafetensorError as error:
        raise ForerunError(
            f"cannot write {target}: {error}: free some space and run again (what was there before is kept)"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def replace_files(scratch: Path, target: str | Path) -> None:
    """Move what was written in `scratch` to `target`.

    A target that does not exist appears in one rename. In one that does, each file is replaced by a rename, weights
    before the index and configuration that name them; at any instant one save's weights are there, whole. Of the files
    that `scratch` does not have, weights of an earlier save in another number of shards go, and everything else stays.
    """
    target = Path(os.path.realpath(target))
    mask = os.umask(0)
    os.umask(mask)
    for file in scratch.glob("*.safetensors"):
        os.chmod(file, 0o666 & ~mask)  # safetensors' own are for their owner alone, and a server may be another user
    if not target.exists():
        os.rename(scratch, target)
        return
    written = sorted(scratch.iterdir(), key=lambda f: (f.suffix == ".json", f.name))
    names = {file.name for file in written}
    weights = any(WEIGHTS.fullmatch(name) for name in names)
    if weights:
        _make_way(scratch, target, names)
    for file in written:
        os.replace(file, target / file.name)
    if weights:
        for file in sorted(target.iterdir(), key=lambda f: f.name != INDEX):
            if file.name not in names and (file.name == INDEX or WEIGHTS.fullmatch(file.name)):
                file.unlink()


def _make_way(scratch: Path, target: Path, names: set[str]) -> None:
    """Before several weight files come or go one by one, have an index, which changes at once, name those that count.

    Meanwhile they go by names of their own, which look like shards', so that a later save clears away what a kill left.
    """
    # A target that nobody can read has nothing to lose, and a file system without hard links no remedy.
    with suppress(ForerunError, OSError):
        if INDEX in names:  # until all of its shards are there, the old ones count
            old = CheckpointReader(target)
            files = {name: old.file_of(name) for name in old.tensor_names}
            moved = {file: _aside(file) for file in sorted({*names, SINGLE} & set(files.values()))}
            for file, aside in moved.items():
                os.link(target / file, scratch / aside)
                os.replace(scratch / aside, target / aside)
            _set_index(scratch, target, {name: moved.get(file, file) for name, file in files.items()})
            (target / SINGLE).unlink(missing_ok=True)
        elif (target / INDEX).exists():  # the new file counts as soon as it is there
            CheckpointReader(target)
            tensors, aside = CheckpointReader(scratch).tensor_names, _aside(SINGLE)
            os.link(scratch / SINGLE, scratch / aside)
            (target / SINGLE).unlink(missing_ok=True)  # a kill left it; some read it first, and some the index
            os.replace(scratch / aside, target / aside)  # over what counts, if a kill left that too
            _set_index(scratch, target, dict.fromkeys(tensors, aside))


def _aside(file: str) -> str:
    return "model-900001-of-900001.safetensors" if file == SINGLE else file.replace("model-", "model-9", 1)


def _set_index(scratch: Path, target: Path, weight_map: Mapping[str, str]) -> None:
    beside = scratch / f".{INDEX}.part"
    beside.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    os.replace(beside, target / INDEX)


def restore_family_config(directory: Path, family: FamilyRecord) -> None:
    """Give config.json the family's own names, where another model's code ran the trunk."""
    _change_config(directory, {"model_type": family.model_types[0], "architectures": [family.architecture]})


def carry_over(source: Path, directory: Path, target: Path) -> None:
    """Copy the checkpoint's tokenizer, processor and generation files and its own Python code from where it came.

    What `directory` or the target has already is left as it is.

    Raises:
        UsageError: one of the source's files is a link that leads elsewhere.
    """
    auto_map = read_json_object(source, CONFIG).get("auto_map")
    patterns = (*_CARRIED, "*.py") if auto_map else _CARRIED
    for name in sorted(file.name for file in source.iterdir()):
        there = (directory / name).exists() or (target / name).exists()
        if not there and any(fnmatch(name, pattern) for pattern in patterns):
            shutil.copyfile(locate(source, name), directory / name)  # not its mode, which may be read-only
    if auto_map:
        _change_config(directory, {"auto_map": auto_map})


def _change_config(directory: Path, changes: dict[str, Any]) -> None:
    config = read_json_object(directory, CONFIG) | changes
    (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
