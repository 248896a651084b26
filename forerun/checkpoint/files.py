"""Files of a checkpoint directory that nobody vouches for: where they really lie, what they really are, their JSON.

A name in a directory may be a symbolic link. It is followed only to a file inside the same directory, or, where the
directory is a snapshot of a Hugging Face hub cache (`models--*/snapshots/<revision>`), inside the same repository's
folder `models--*`, where the hub keeps its blobs. A checkpoint that somebody else made can so never have a file of the
reader's own machine read as if it were its own. Links that this process has made itself are another matter (`linked`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forerun.errors import UsageError, one_line

# A 61-layer mixture of experts has an index of 9 MB; safetensors itself refuses headers above 100 MB.
MAX_JSON_BYTES = 100_000_000
# config.json nests four deep or so. What is nested further than Python recurses would fail wherever it is used.
MAX_JSON_DEPTH = 100

# Where `forerun demo` leaves its model, from which recipes and examples start.
DEMO_MODEL = Path("forerun-demo/model")

# Directories of links that this process has made -> the checkpoint whose files they lead to; see `linked`.
_LINKED: dict[Path, Path] = {}

# How files begin that are often found where safetensors should be. None is ever opened as what it is.
_BEGINNINGS = (
    (b"PK\x03\x04", "a pickle in a zip archive, as torch.save writes it: convert it to safetensors where you trust it"),
    (b"\x80", "a pickle: convert it to safetensors where you trust it"),
    (b"GGUF", "a GGUF file, which llama.cpp reads: give the safetensors checkpoint that it was made from"),
    (b"version https://git-lfs", "a Git LFS pointer and not the file itself: run `git lfs pull` in the directory"),
)


def shown(text: object) -> str:
    """A name out of a file as it may be printed: without control characters, line breaks or endless length."""
    plain = str(text)
    plain = plain if plain.isprintable() else ascii(plain)[1:-1]
    return plain if len(plain) <= 200 else plain[:200] + "..."


def where_from(path: str | Path) -> str:
    """What to do about a checkpoint directory that is not there, for the end of an error."""
    if Path(path) == DEMO_MODEL:
        return "run `forerun demo`, which makes it, or give another Hugging Face checkpoint directory"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not Path(path).parent.exists():
        return f"give a directory; a model of the Hub is fetched with `hf download {path} --local-dir DIR`"
    return "give a Hugging Face checkpoint directory"


def locate(directory: Path, name: str) -> Path:
    """The regular file `name` of `directory`.

    Raises:
        UsageError: the name is a path, there is no such file, or it is a link that leads elsewhere.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise UsageError(
            f"{directory} names the file '{shown(name)}', which is no file of the directory: restore the index"
        )
    path = directory / name
    if not os.path.isfile(path):
        if os.path.lexists(path):
            raise UsageError(f"{directory}: {shown(name)} is no regular file: copy the file there")
        raise UsageError(f"{directory} lacks {shown(name)}: copy the missing file there")
    home, found = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    if not any(found.is_relative_to(_whole_of(place)) for place in (home, _LINKED.get(home, home))):
        raise UsageError(
            f"{directory}: {shown(name)} is a symbolic link that leads out of the directory: copy the file there"
        )
    return path


def _whole_of(home: Path) -> Path:
    """The repository's folder, where a directory is a snapshot of it; else the directory."""
    snapshot = home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--")
    return home.parent.parent if snapshot else home


@contextmanager
def linked(directory: Path, source: Path) -> Iterator[None]:
    """Within it, links in `directory`, which this run makes and nobody else writes to, may lead where those in the
    checkpoint directory `source` may.
    """
    made = Path(os.path.realpath(directory))
    _LINKED[made] = Path(os.path.realpath(source))
    try:
        yield
    finally:
        del _LINKED[made]


def read_json_object(directory: Path, name: str) -> dict[str, Any]:
    """A JSON file that holds one object.

    Raises:
        UsageError: it is not there, or not UTF-8, JSON, an object; it names a key twice, or is too large or too deeply
            nested to be one that a checkpoint needs.
    """
    file = locate(directory, name)
    try:
        if (size := file.stat().st_size) > MAX_JSON_BYTES:
            raise UsageError(f"{file} has {size:,} bytes, too many for a checkpoint's JSON: restore the file")
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_once)
        if not _nests_at_most(content, MAX_JSON_DEPTH):
            raise ValueError("it is nested too deeply")
    except RecursionError:
        raise UsageError(f"cannot read {file}: it is nested too deeply: restore the file") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file}: {_reason(error)}: restore the file") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file} does not hold a JSON object: restore the file")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has the key '{shown(key)}' twice")
        found[key] = value
    return found


def _nests_at_most(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_nests_at_most(item, depth - 1) for item in inner)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return shown(one_line(error))


def why_not_safetensors(file: Path, error: Exception) -> str:
    """One line for a file that the safetensors library refused with `error`: what it is instead, where that shows."""
    try:
        with file.open("rb") as stream:
            beginning = stream.read(32)
    except OSError as problem:
        return f"cannot read {file}: {_reason(problem)}"
    if not beginning:
        return f"{file} is empty: copy it again"
    if isinstance(error, RuntimeError):  # torch's, where the file does not fit into the address space that it may have
        return f"cannot map {file}: {_reason(error)}: use a machine with more memory"
    # Behind its length a safetensors file has a JSON object, and the length may begin as another format does.
    for start, meaning in _BEGINNINGS if beginning[8:9] != b"{" else ():
        if beginning.startswith(start):
            return f"{file} is {meaning}"
    return f"cannot read {file}: {_reason(error)}: the file is damaged or cut short, copy it again"
