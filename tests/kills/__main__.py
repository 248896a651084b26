"""Kill training runs at random instants and see that nothing is lost:

    python -m tests.kills [--kind sft rl async] [--kills 50] [--steps 40] [--seed 0]

One JSON line for each kind of run; the first checkpoint that is lost or damaged, or a result that differs, ends it with
exit code 1.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from tests.kills.runs import Kind, kill_and_compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=get_args(Kind), default=list(get_args(Kind)))
    parser.add_argument("--kills", type=int, default=50, help="to try: some runs end before theirs")
    parser.add_argument("--steps", type=int, default=40, help="of a run, which is saved after every one")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for kind in args.kind:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="forerun-kills-") as place:
            tally = kill_and_compare(kind, Path(place), args.kills, args.steps, args.seed)
        print(json.dumps({"kind": kind, **asdict(tally), "seconds": round(time.monotonic() - started)}), flush=True)


if __name__ == "__main__":
    main()
