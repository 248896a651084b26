"""How a head's held-out acceptance grows with the text it is trained on: the demo's recipe at several sizes.

    python benchmarks/acceptance_by_tokens.py OUT_DIR [--tokens 25000 50000 100000] [--epochs 3]

Every size is a run of its own with its own schedule to zero, on SmolLM2-135M-Instruct and the packaged text, scored on
the same held-out responses. One JSON line per size.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from forerun.demo.head import train_head
from forerun.demo.options import FULL, DemoOptions
from forerun.demo.workspace import Workspace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[25_000, 50_000, 100_000])
    parser.add_argument("--epochs", type=int, default=FULL.epochs)
    args = parser.parse_args()
    for tokens in args.tokens:
        workspace = Workspace(DemoOptions(out=args.out / str(tokens)))
        workspace.sizes = replace(FULL, train_tokens=tokens, epochs=args.epochs)
        started = time.perf_counter()
        figures = train_head(workspace)
        stages = figures["held_out_acceptance"]
        line = {
            "train_tokens": figures["train_tokens"],
            "epochs": args.epochs,
            "held_out_tokens": figures["held_out_tokens"],
            "fitted": stages["fitted"]["all"],
            "trained": {source: found["top1_agreement"] for source, found in stages["trained"].items()},
            "seconds": round(time.perf_counter() - started, 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
