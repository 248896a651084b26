"""`python -m tests.faults`: inject every known kind of MTP fault and show which test catches it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.faults.bench import Verdict, run
from tests.faults.catalogue import MUTATIONS
from tests.faults.mutation import KINDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--kind", type=int, choices=KINDS, nargs="+", help="these kinds only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts here, too")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if arguments.kind is None or m.kind in arguments.kind]
    console = Console(width=160 if not sys.stdout.isatty() else None)
    start = time.monotonic()
    with console.status("importing") as status:
        verdicts: list[Verdict] = []
        for verdict in run(chosen):
            verdicts.append(verdict)
            status.update(f"{len(verdicts)} of {len(chosen)} faults")
    console.print(_table(verdicts))
    missed = [verdict for verdict in verdicts if verdict.problem is not None]
    console.print(
        f"{len(verdicts) - len(missed)} of {len(verdicts)} faults caught, of {len({m.kind for m in chosen})} kinds, "
        f"in {time.monotonic() - start:.0f} s"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([dataclasses.asdict(v) for v in verdicts], indent=2), encoding="utf-8")
    return 1 if missed else 0


def _table(verdicts: list[Verdict]) -> Table:
    table = Table(show_lines=True)
    table.add_column("kind", ratio=3)
    table.add_column("fault", ratio=4)
    table.add_column("injected into", ratio=2, overflow="fold")
    table.add_column("caught by", ratio=5, overflow="fold")
    last = 0
    for verdict in verdicts:
        mutation = verdict.mutation
        if verdict.problem is not None:
            caught = f"[bold red]not caught[/]: {escape(verdict.problem)}"
        else:
            caught = "\n".join(f"{escape(f.node_id)} [dim]({f.exception})[/]" for f in verdict.caught_by)
        kind = f"{mutation.kind} {KINDS[mutation.kind]}" if mutation.kind != last else ""
        last = mutation.kind
        table.add_row(kind, f"[bold]{mutation.name}[/]\n{escape(mutation.story)}", mutation.module, caught)
    return table


if __name__ == "__main__":
    sys.exit(main())
