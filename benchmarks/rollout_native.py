"""Decode speed of the native engine against transformers' generate, in one run, as JSON lines.

    python benchmarks/rollout_native.py MODEL_DIR [--threads 2] [--new-tokens 64] [--depths 1,2,3] [--batches 1,8]

Arms per batch size: transformers' `generate`, the native engine plain, the native engine with k drafts. They are
interleaved over the repeats and the best repeat of each counts, so that no arm is
hit alone by a busy moment.
A model without an MTP block gets one attached: its acceptance is that of an untrained head, so `step_cost` (time of a
speculative step over that of a plain one) is what to read then. Exits with 1 if the native arms' greedy texts differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import AutoTokenizer

from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier
from forerun.models.loading import load
from forerun.mtp.config import MTPConfig
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Completion, Request, SamplingParams

PROMPTS = [
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell in all?",
    "Write a short poem about the sea.",
    "What is the capital of France, and what is it known for?",
    "A train runs 60 km in 45 minutes. How fast is it in km/h? Explain step by step.",
    "List five uses of a paper clip.",
    "Explain photosynthesis to a child.",
    "If x + 3 = 11, what is 2x - 5?",
    "Describe how to make a cup of tea.",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--depths", default="1,2,3")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--draft-words", type=int, default=8192, help="draft on the first N token ids; 0 is all")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = load(args.model, dtype=getattr(torch, args.dtype)).eval()
    if not isinstance(model, MTPCarrier):
        model = attach(model, MTPConfig(enable=True)).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts: list[list[int]] = []
    for prompt in PROMPTS:
        chat: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )
        prompts.append(list(chat["input_ids"]))
    vocabulary = torch.arange(args.draft_words) if args.draft_words else None
    engine = NativeEngine.from_model(model, draft_vocabulary=vocabulary)
    depths = [int(k) for k in args.depths.split(",")]
    failed = False
    for batch in (int(b) for b in args.batches.split(",")):
        rows = [prompts[i % len(prompts)] for i in range(batch)]
        failed |= not run(model, engine, tokenizer.pad_token_id, rows, depths, args.new_tokens, args.repeats)
    return int(failed)


def run(
    model: MTPCarrier, engine: NativeEngine, pad: int, rows: list[list[int]], depths: list[int], new: int, repeats: int
) -> bool:
    """One batch size; prints a line per arm. Returns whether all greedy texts agree."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    requests = [Request(str(i), row, SamplingParams(max_tokens=new, temperature=0)) for i, row in enumerate(rows)]

    def transformers_generate() -> tuple[list[list[int]], list[Completion]]:
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": pad}
        out = cast(Any, model).generate(ids, attention_mask=mask, **settings)
        return out[:, width:].tolist(), []

    def native(k: int) -> Callable[[], tuple[list[list[int]], list[Completion]]]:
        def call() -> tuple[list[list[int]], list[Completion]]:
            engine.num_speculative_tokens = k
            completions = engine.generate(requests)
            return [c.token_ids for c in completions], completions

        return call

    arms = {"transformers": transformers_generate, "native": native(0)} | {f"native k={k}": native(k) for k in depths}
    for k in depths:  # measures the matrix products before the clock runs
        native(k)()
    best = dict.fromkeys(arms, float("inf"))
    texts: dict[str, list[list[int]]] = {}
    completed: dict[str, list[Completion]] = {}
    for _ in range(repeats):
        for name, arm in arms.items():
            start = time.perf_counter()
            texts[name], completed[name] = arm()
            best[name] = min(best[name], time.perf_counter() - start)
    for name in arms:
        tokens = sum(map(len, texts[name]))
        line: dict[str, object] = {
            "arm": name,
            "batch": len(rows),
            "tokens_per_s": round(tokens / best[name], 2),
            "seconds": round(best[name], 3),
            "over_transformers": round(best["transformers"] / best[name], 3),
            "over_native": round(best["native"] / best[name], 3),
            # transformers' min_new_tokens bans the stop token that the native arms may say: compare up to there.
            "same_text_as_native": texts[name] == texts["native"],
        }
        steps = sum(c.spec_num_verify_steps or 0 for c in completed[name])
        if steps:
            accepted = sum(c.spec_num_accepted_tokens or 0 for c in completed[name])
            ideal = 1 + accepted / steps
            line["acceptance_length"] = round(ideal, 3)
            line["step_cost"] = round(best[name] / best["native"] * ideal, 3)
        print(json.dumps(line), flush=True)
    return all(texts[name] == texts["native"] for name in arms if name != "transformers")


if __name__ == "__main__":
    sys.exit(main())
