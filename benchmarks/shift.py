"""Shifting packed documents against shifting one long row of as many tokens: the time must not grow with documents.

    python benchmarks/shift.py [--documents 4096] [--longest 100] [--repeats 30]

Times `document_ids` and the targets of depths 1..3 on both layouts, alternating, and prints one JSON line with the
median times and their ratio, and one for a loop over the documents, for scale.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import Tensor

from forerun.mtp.shift import depth_targets, document_ids

DEPTHS = (1, 2, 3)


def shift_all(input_ids: Tensor, position_ids: Tensor) -> None:
    documents = document_ids(position_ids)
    mask = torch.ones_like(input_ids, dtype=torch.bool)
    for depth in DEPTHS:
        depth_targets(input_ids, documents, mask, depth)


def shift_in_a_loop(input_ids: Tensor, lengths: list[int]) -> None:
    for part in input_ids.split(lengths, dim=1):
        shift_all(part, torch.arange(part.shape[1]).unsqueeze(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=4096)
    parser.add_argument("--longest", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    lengths = torch.randint(1, args.longest + 1, (args.documents,)).tolist()
    total = sum(lengths)
    ids = torch.randint(50_000, (1, total))
    packed = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    one_row = torch.arange(total).unsqueeze(0)
    cases = {
        "packed": lambda: shift_all(ids, packed),
        "one_row": lambda: shift_all(ids, one_row),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()
    for _ in range(args.repeats):
        for name, run in cases.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    started = time.perf_counter()
    shift_in_a_loop(ids, lengths)
    loop = time.perf_counter() - started
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    size = {"documents": args.documents, "tokens": total, "depths": len(DEPTHS)}
    print(json.dumps({"case": "packed", **size, "ratio_to_one_row": round(median["packed"] / median["one_row"], 3)}))
    print(json.dumps({"case": "loop_over_documents", **size, "ratio_to_one_row": round(loop / median["one_row"], 1)}))


if __name__ == "__main__":
    main()
