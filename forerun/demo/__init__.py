"""`forerun demo`: the whole loop on a real small model, phase by phase, each resumable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from forerun.demo.options import DemoOptions

__all__ = ["DemoOptions", "run"]


def run(options: DemoOptions) -> int:
    """Run every phase that `options.out` does not hold yet, and print the report.

    Returns:
        0, the exit code.

    Raises:
        ForerunError: a phase failed; the phases before it stay, and the same command goes on from there.
    """
    from forerun.demo.exporting import export_model
    from forerun.demo.head import load_and_attach, train_head
    from forerun.demo.rl import train_policy
    from forerun.demo.rollouts import compare_decoding
    from forerun.demo.tables import print_report
    from forerun.demo.workspace import Workspace

    phases: Mapping[str, tuple[str, Callable[[Workspace], dict[str, Any]]]] = {
        "load": ("load the trunk and attach an MTP layer", load_and_attach),
        "sft": ("train the head on the trunk's own text", train_head),
        "rollout": ("decode plainly and speculatively", compare_decoding),
        "rl": ("GRPO with speculative rollouts", train_policy),
        "export": ("export, and reload in a new process", export_model),
    }
    workspace = Workspace(options)
    for index, (name, (title, phase)) in enumerate(phases.items(), start=1):
        state = "done earlier" if workspace.is_done(name) else "..."
        print(f"[{index}/{len(phases)}] {name}: {title} {state}", file=sys.stderr, flush=True)
        if workspace.is_done(name):
            continue
        with workspace.summary.phase(name):
            workspace.summary.add(name, **phase(workspace))
        workspace.mark_done(name)
        workspace.tidy(name)
    workspace.summary.write()
    print_report(workspace.summary)
    return 0
