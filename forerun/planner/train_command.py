"""`forerun plan train`: from a configuration to its plan, in print or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.planner.from_config import job_of, read_config
from forerun.planner.hardware import find
from forerun.planner.memory import Peak
from forerun.planner.train_plan import GIB, TrainPlan, describe, make_train_plan


def run(path: Path | None, overrides: Sequence[str], model: str | None, hardware: str | None, as_json: bool) -> int:
    """Print the plan; returns 0, the exit code.

    Raises:
        UsageError: a configuration, a model or a device that cannot be used.
    """
    config = read_config(path, overrides, model)
    found = None if hardware is None else find(hardware)
    plan = make_train_plan(job_of(config, found), found)
    if as_json:
        print(json.dumps(_as_json(plan)))
    else:
        _print(plan)
    return 0


def _as_json(plan: TrainPlan) -> dict[str, Any]:
    return {
        "model": plan.job.run.shape.name,
        "hardware": plan.hardware.name if plan.hardware else None,
        "layout": str(plan.job.run.layout),
        "peaks": [{"phase": peak.phase, "bytes": peak.total, "parts": peak.parts} for peak in plan.peaks],
        "peaks_without_mtp": [{"phase": peak.phase, "bytes": peak.total, "parts": peak.parts} for peak in plan.without],
        "traffic": [{"what": kind.what, "bytes": kind.bytes, "group": kind.group} for kind in plan.traffic],
        "loading_bytes": plan.loading,
        "compute_seconds": plan.compute_seconds(),
        "compute_seconds_without_mtp": plan.compute_seconds(mtp=False),
        "fits": plan.fits,
        "sentence": plan.sentence(),
    }


def _print(plan: TrainPlan) -> None:
    run = plan.job.run
    print(f"{run.shape.name}: {describe(run)}")
    print(f"\nGiB on the fullest rank{'':>15}" + "".join(f"{name:>14}" for name, _ in _columns(plan)))
    for index, peak in enumerate(plan.peaks):
        shown = [peaks[index] for _, peaks in _columns(plan)]
        print(f"{peak.phase:<38}" + "".join(f"{other.total / GIB:>14.2f}" for other in shown))
        for name in peak.parts:
            if any(other.parts.get(name) for other in shown):
                print(f"    {name:<34}" + "".join(f"{other.parts.get(name, 0) / GIB:>14.2f}" for other in shown))
    if plan.without:
        print(
            "    (without: the same run with mtp.enable=false. Each column is of its own fullest moment, which MTP can "
            "move:\n    totals compare, single parts need not.)"
        )
    if plan.traffic:
        print("\nGiB that a rank sends in an optimizer step")
        for kind in plan.traffic:
            print(f"    {f'{kind.what}, over {kind.group} ranks':<34}{kind.bytes / GIB:>14.2f}" + _seconds(plan, kind))
    if (seconds := plan.compute_seconds()) is not None:
        line = f"\narithmetic of an optimizer step: {seconds:.3g} s"
        if run.train_mtp:
            line += f", of which MTP {seconds - (plan.compute_seconds(mtp=False) or 0):.2g} s"
        print(line)
    if plan.loading:
        print(f"host memory of rank 0's machine while the model loads: {plan.loading / GIB:,.0f} GiB")
    print(f"\n{plan.sentence()}")


def _columns(plan: TrainPlan) -> list[tuple[str, list[Peak]]]:
    if not plan.without:
        return [("", plan.peaks)]
    return [("with MTP", plan.peaks), ("without", plan.without)]


def _seconds(plan: TrainPlan, kind: Any) -> str:
    if plan.hardware is None or not plan.hardware.link:
        return ""
    return f"   {kind.seconds(plan.hardware):.3g} s"
