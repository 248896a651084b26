"""`forerun inspect`: look as deep as asked, print what was found, say by the exit code whether all is well."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from forerun.checkpoint.findings import Inspection
from forerun.checkpoint.inspect import examine
from forerun.checkpoint.values import look_at_values
from forerun.doctor.printing import print_inspection
from forerun.errors import ForerunError, UsageError, one_line


def inspect(
    path: Path, *, values: bool = False, deep: bool = False, text: Path | None = None, as_json: bool = False
) -> int:
    """Print what is found about a checkpoint on stdout.

    Args:
        path: the directory.
        values: also read the MTP tensors.
        deep: also run the model, which reads the tensors as well.
        text: what to run it on; None is the built-in text.
        as_json: print one JSON object and nothing else, also for a checkpoint that cannot be read.

    Returns:
        0 for a healthy checkpoint, 1 for one with problems.

    Raises:
        UsageError: it cannot be read, or `text` without `deep`.
    """
    if text is not None and not deep:
        raise UsageError("--text is what --deep runs the model on: give --deep as well")
    try:
        inspection = _look(path, values or deep, deep, text)
    except ForerunError as error:
        if as_json:
            _print_json({"path": str(path), "readable": False, "error": one_line(error)})
        raise
    if as_json:
        _print_json(inspection.as_dict())
    else:
        print_inspection(inspection)
    return 0 if inspection.healthy else 1


def _look(path: Path, values: bool, deep: bool, text: Path | None) -> Inspection:
    found = examine(path)
    if values:
        look_at_values(found)
    if deep:
        # Only here: the other two need no transformers, whose import takes longer than they do.
        from forerun.doctor.deep import look_deep

        look_deep(path, found.inspection, text)
    return found.inspection


def _print_json(content: object) -> None:
    sys.stdout.write(json.dumps(content, indent=2) + "\n")  # ASCII: any name in a file can be printed anywhere
