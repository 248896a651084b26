"""The layout is the architecture: imports point downwards only, and `mtp/` imports torch alone."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "forerun"
# From the bottom up; packages on one line must not import each other in a circle, which Python itself would refuse.
LAYERS: list[set[str]] = [
    {"errors", "signals"},
    {"cluster"},
    {"mtp"},
    {"families"},
    {"checkpoint"},
    {"models"},
    {"speculative"},
    {"report", "algorithms", "data", "rewards"},
    {"rollout", "engines"},
    {"config_check"},
    {"config_algorithm", "config_rollout", "config_async", "config_megatron"},
    {"config"},
    {"config_file"},
    {"trainers", "planner"},
    {"launch"},
    {"generation", "demo", "doctor"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module


def package_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def test_imports_point_downwards() -> None:
    wrong = [
        f"{file.relative_to(ROOT.parent)} imports {module}"
        for file in ROOT.rglob("*.py")
        if package_of(file) != "__init__"
        for module in imports(file)
        if module.startswith("forerun.") and RANK[module.split(".")[1]] > RANK[package_of(file)]
    ]
    assert not wrong, wrong


def test_every_module_has_a_layer() -> None:
    assert {package_of(file) for file in ROOT.rglob("*.py")} - {"__init__"} == set(RANK)


def test_mtp_imports_torch_only() -> None:
    allowed = {"torch", "forerun", *sys.stdlib_module_names}
    wrong = [
        f"{file.name} imports {module}"
        for file in (ROOT / "mtp").glob("*.py")
        for module in imports(file)
        if module.split(".")[0] not in allowed
        or (module.startswith("forerun.") and not module.startswith("forerun.mtp"))
    ]
    assert not wrong, wrong


def test_families_are_data() -> None:
    """A decision on a checkpoint's kind belongs into a family record."""
    wrong = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in ROOT.rglob("*.py")
        if package_of(file) != "families"
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if "model_type ==" in line or "model_type in" in line
    ]
    assert not wrong, wrong
