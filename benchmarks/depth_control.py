"""Depth control of the native engine on a long-tail batch, against off and fixed depths, in one run, as JSON lines.

    python benchmarks/depth_control.py MODEL_DIR [--threads 2] [--rows 32] [--longest 256] [--max-depth 2] [--repeats 2]

One batch of `--rows` requests whose lengths thin out as rollouts do, so that the batch shrinks from all rows to one.
Arms: off, each fixed depth, auto. They are interleaved over the repeats. `over_best` is an arm's time over the best of
off and fixed depths: auto is to stay below 1.05 from its first batch on ("first"), all it learns included; "best" takes
each arm's best repeat. Exits with 1 if greedy texts differ, or auto's best repeat is more than 5 % behind.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch
from transformers import AutoTokenizer

from forerun.models.carrier import MTPCarrier
from forerun.models.loading import load
from forerun.planner.prompts import PROMPTS
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Request, SamplingParams
from forerun.speculative.depth_control import AdaptiveDepth, DepthControl, FixedDepth


class Watched:
    """A controller, and how often it chose each depth at each number of rows."""

    def __init__(self, control: DepthControl) -> None:
        self.control = control
        self.chosen: dict[int, Counter[int]] = {}

    def depth(self, rows: int) -> int:
        return self.control.depth(rows)

    def observe(self, rows: int, depth: int, seconds: float, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        self.chosen.setdefault(rows, Counter())[depth] += 1
        self.control.observe(rows, depth, seconds, drafted, accepted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--max-depth", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--draft-words", type=int, default=8192, help="draft on the first N token ids; 0 is all")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = load(args.model).eval()
    if not isinstance(model, MTPCarrier):
        print(f"{args.model} carries no MTP block", file=sys.stderr)
        return 2
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    vocabulary = torch.arange(args.draft_words) if args.draft_words else None
    engine = NativeEngine(
        model, num_speculative_tokens=args.max_depth, draft_vocabulary=vocabulary, max_num_seqs=args.rows
    )
    requests = []
    for i in range(args.rows):
        length = max(2, round(args.longest * ((i + 1) / args.rows) ** 3))
        prompt = tokenizer(PROMPTS[i % len(PROMPTS)])["input_ids"]
        requests.append(Request(f"{i}", prompt, SamplingParams(max_tokens=length, temperature=0)))

    arms = {"off": 0} | {f"k={k}": k for k in range(1, args.max_depth + 1)} | {"auto": args.max_depth}
    for k in range(args.max_depth + 1):  # what a shape's first step builds is built before the clock runs
        engine.num_speculative_tokens, engine.depth_control = k, None
        engine.generate(
            [
                Request(f"{i}", r.prompt_token_ids, SamplingParams(max_tokens=4, temperature=0))
                for i, r in enumerate(requests)
            ]
        )
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    texts: dict[str, list[list[int]]] = {}
    adaptive = AdaptiveDepth(args.max_depth)
    watched = Watched(adaptive)
    for repeat in range(args.repeats):
        for name, depth in arms.items():
            watched = Watched(adaptive if name == "auto" else FixedDepth(depth))
            engine.num_speculative_tokens, engine.depth_control = depth, watched
            started = time.perf_counter()
            completions = engine.generate(requests)
            seconds[name].append(time.perf_counter() - started)
            texts[name] = [completion.token_ids for completion in completions]
            line = {"repeat": repeat, "arm": name, "seconds": round(seconds[name][-1], 3)}
            if name == "auto":
                line["depths"] = {rows: dict(sorted(c.items())) for rows, c in sorted(watched.chosen.items())}
            print(json.dumps(line), flush=True)
    fixed = [name for name in arms if name != "auto"]
    tokens = sum(map(len, texts["off"]))
    best = min(min(seconds[name]) for name in fixed)
    first = min(seconds[name][0] for name in fixed)
    for name in arms:
        print(
            json.dumps(
                {
                    "arm": name,
                    "tokens_per_s": round(tokens / min(seconds[name]), 2),
                    "over_best": round(min(seconds[name]) / best, 3),
                    "over_best_first": round(seconds[name][0] / first, 3),
                    "same_text": texts[name] == texts["off"],
                }
            )
        )
    same = all(texts[name] == texts["off"] for name in arms)
    return int(not same or min(seconds["auto"]) > 1.05 * best)


if __name__ == "__main__":
    sys.exit(main())
