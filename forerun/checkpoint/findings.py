"""What an inspection of a checkpoint finds: a row for each MTP tensor, problems with their mends, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a checkpoint.

    Attributes:
        kind: a stable word for programs, see docs/doctor.md.
        message: one line, what is wrong.
        mend: one line, what to do about it.
        tensors: the tensors that it is about.
    """

    kind: str
    message: str
    mend: str
    tensors: tuple[str, ...] = ()


@dataclass
class TensorRow:
    """One MTP tensor that is in the checkpoint or should be.

    Attributes:
        name: as the files have it, or as they should.
        file: the shard that holds it; None if none does.
        shape, dtype: as its header says, the dtype by safetensors' name; None if it is missing.
        expected_shape: what config.json and the trunk imply; None if they do not tell.
        states: all that is wrong with it: "missing", "duplicated", "wrong_shape", "unknown", "prefixed", "all_zero",
            "non_finite", "untouched", "differs".
    """

    name: str
    file: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    expected_shape: tuple[int, ...] | None = None
    states: list[str] = field(default_factory=list)

    def mark(self, state: str) -> None:
        """Add to what is wrong with it."""
        if state not in self.states:
            self.states.append(state)


@dataclass
class Inspection:
    """Everything that was found out about a checkpoint.

    Attributes:
        path: the directory.
        family: name of the family record that reads it.
        model_type: of config.json.
        declared_depth, present_depth: MTP layers that config.json declares, and of which the files hold any tensor.
        tensors: one row for each MTP tensor, by name.
        problems: what is wrong; empty for a healthy checkpoint.
        notes: what is worth knowing and not wrong.
        checked: which of "headers", "values", "deep" was looked at.
        deep: figures of the run model, see `forerun.doctor.deep`; None without --deep.
    """

    path: str
    family: str
    model_type: str | None
    declared_depth: int
    present_depth: int
    tensors: dict[str, TensorRow] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: list[str] = field(default_factory=lambda: ["headers"])
    deep: dict[str, Any] | None = None

    @property
    def healthy(self) -> bool:
        return not self.problems

    def report(self, kind: str, message: str, mend: str, tensors: Sequence[str] = ()) -> None:
        """Add a problem."""
        self.problems.append(Problem(kind, message, mend, tuple(tensors)))

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it; docs/doctor.md describes it."""
        rows = []
        for row in self.tensors.values():
            rows.append(asdict(row) | {"states": row.states or ["present"]})
        return {
            "path": self.path,
            "readable": True,
            "healthy": self.healthy,
            "family": self.family,
            "model_type": self.model_type,
            "depth": {"declared": self.declared_depth, "present": self.present_depth},
            "checked": self.checked,
            "problems": [asdict(problem) for problem in self.problems],
            "notes": self.notes,
            "tensors": rows,
            "deep": self.deep,
        }
