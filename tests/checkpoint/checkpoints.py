"""Small real checkpoints, and ways to change their files by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import MTPConfig, attach
from forerun.checkpoint.findings import Inspection, Problem
from forerun.checkpoint.inspect import examine
from forerun.checkpoint.reader import INDEX, SINGLE
from forerun.checkpoint.values import look_at_values
from tests.models.tiny import tiny_model

PROJ = "model.mtp_layers.0.input_proj.weight"


def make(path: Path, *, depth: int = 1, sharded: bool = False, kind: str = "llama") -> Path:
    """A tiny model with a head that looks trained: every tensor apart from its first values."""
    model = attach(tiny_model(kind, dtype=torch.float32), MTPConfig(enable=True, num_layers=depth), init="plain")
    with torch.no_grad():
        for parameter in model.mtp.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path, **({"max_shard_size": "8KB"} if sharded else {}))
    return path


def shards(path: Path) -> dict[str, dict[str, Tensor]]:
    """File -> its tensors."""
    return {file.name: load_file(file) for file in sorted(path.glob("*.safetensors"))}


def write(path: Path, files: Mapping[str, Mapping[str, Tensor]], *, index: bool | None = None) -> None:
    """Write shards, and an index that fits them if there is more than one."""
    for file in path.glob("*.safetensors"):
        file.unlink()
    (path / INDEX).unlink(missing_ok=True)
    for name, tensors in files.items():
        save_file({n: t.contiguous() for n, t in tensors.items()}, path / name, {"format": "pt"})
    if index or (index is None and len(files) > 1):
        size = sum(t.numel() * t.element_size() for tensors in files.values() for t in tensors.values())
        weight_map = {n: name for name, tensors in files.items() for n in tensors}
        write_index(path, {"metadata": {"total_size": size}, "weight_map": weight_map})


def write_index(path: Path, content: Any) -> None:
    (path / INDEX).write_text(json.dumps(content))


def index_of(path: Path) -> dict[str, Any]:
    return json.loads((path / INDEX).read_text())


def edit_config(path: Path, **values: Any) -> None:
    """Set keys of config.json; None removes one."""
    config = json.loads((path / "config.json").read_text()) | values
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Rewrite model.safetensors with what `change` makes of its tensors."""
    write(path, {SINGLE: change(load_file(path / SINGLE))})


def look(path: Path, *, values: bool = True) -> Inspection:
    found = examine(path)
    if values:
        look_at_values(found)
    return found.inspection


def only_problem(path: Path, *, values: bool = True) -> Problem:
    """The one problem that is found; its message and mend are one line each."""
    problems = look(path, values=values).problems
    assert len(problems) == 1, [problem.message for problem in problems]
    for line in (problems[0].message, problems[0].mend):
        assert line and "\n" not in line
    return problems[0]
