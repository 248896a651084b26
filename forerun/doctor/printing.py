"""An inspection for people: where it stands, a table of the MTP tensors, a line for each problem with its mend."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forerun.checkpoint.files import shown
from forerun.checkpoint.findings import Inspection, TensorRow

_EXPERT = re.compile(r"\bexperts\.\d+\.")


def print_inspection(inspection: Inspection) -> None:
    """Print it; one line each for the problems, however wide the terminal is."""
    console = Console()

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    line(
        f"{shown(inspection.path)}: family {inspection.family} (model_type {shown(inspection.model_type)}), MTP layers "
        f"declared {inspection.declared_depth}, present {inspection.present_depth}; looked at: "
        f"{', '.join(inspection.checked)}"
    )
    if inspection.tensors:
        console.print(_tensors(inspection.tensors.values()))
    if inspection.deep is not None:
        for table in _deep(inspection.deep):
            console.print(table)
    for note in inspection.notes:
        line(f"note: {shown_line(note)}")
    for problem in inspection.problems:
        line(f"problem ({problem.kind}): {shown_line(problem.message)}; mend: {shown_line(problem.mend)}")
    count = len(inspection.problems)
    line("healthy" if count == 0 else f"{count} problem{'s' if count > 1 else ''}")


def shown_line(text: str) -> str:
    """A message on one line."""
    return " ".join(text.split())


def _tensors(rows: Iterable[TensorRow]) -> Table:
    """One line for each tensor, and one for all experts that are alike."""
    table = Table(title="MTP tensors", title_justify="left", title_style="bold")
    for column in ("tensor", "shape", "dtype", "state"):
        table.add_column(column, overflow="fold")
    groups: dict[tuple[str, ...], int] = {}
    for row in rows:
        cells = (
            escape(shown(_EXPERT.sub("experts.*.", row.name))),
            _shape(row),
            row.dtype or "-",
            ", ".join(state.replace("_", " ") for state in row.states) or "present",
        )
        groups[cells] = groups.get(cells, 0) + 1
    for (name, *rest), count in groups.items():
        table.add_row(f"{name} ({count} times)" if count > 1 else name, *rest)
    return table


def _shape(row: TensorRow) -> str:
    found = "-" if row.shape is None else " x ".join(map(str, row.shape)) or "scalar"
    if row.expected_shape is None or row.shape == row.expected_shape:
        return found
    return f"{found} (implied: {' x '.join(map(str, row.expected_shape))})"


def _deep(deep: dict[str, Any]) -> Iterable[Table]:
    table = Table(
        title=f"Teacher-forced on {deep['tokens']} tokens of text ({escape(shown(deep['text']))})",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("depth")
    for column in ("acceptance", "loss", "token before", "token after", "shuffled head", "one token always"):
        table.add_column(column, justify="right")
    for depth in deep["depths"]:
        controls = depth["controls"]
        table.add_row(
            str(depth["depth"]),
            f"{depth['acceptance']:.3f}",
            f"{depth['loss']:.2f}",
            *(f"{controls[name]:.3f}" for name in ("target_before", "target_after", "shuffled_head")),
            f"{deep['constant_guess']:.3f}",
        )
    yield table
    table = Table(title="Choices of the family's record, tried both ways", title_justify="left", title_style="bold")
    table.add_column("choice")
    for column in ("acceptance", "the other way"):
        table.add_column(column, justify="right")
    for choice, label in (("concat_order", "halves in order {}"), ("trunk_hidden", "depth 1 takes the {} hidden")):
        tried = deep[choice]
        other = "-" if tried["other_acceptance"] is None else f"{tried['other_acceptance']:.3f}"
        table.add_row(label.format(tried["record"]), f"{tried['acceptance']:.3f}", other)
    recurrence = deep["recurrence"]
    own = recurrence["record"]
    others = (f"{value:.3f} {way}" for way, value in recurrence["acceptance"].items() if way != own)
    table.add_row(f"depth 2 takes the {own} hidden", f"{recurrence['acceptance'][own]:.3f}", ", ".join(others))
    yield table
