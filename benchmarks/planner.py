"""The planner against engines on this machine, in one run: calibrate, predict, measure. JSON lines.

    python benchmarks/planner.py MODEL_DIR [--threads 2] [--batches 1,8,32] [--max-depth 2] [--new-tokens 64]
                                 [--vllm-python INTERPRETER] [--no-native]

Native: one calibrating rollout (steps of 32, 16, ... 1 rows at every depth), then every batch size and depth is
predicted and measured. vLLM (its environment's interpreter): one process per depth; steps are calibrated at other batch
sizes than those predicted. MODEL_DIR needs an attached head, which is exported for vLLM as mimo.

What is compared is decoding: seconds of `generate` less those for one token per request, over all prompts (at small
batches in groups). Rows that accept more end earlier; the prediction replays that with the calibrated acceptance.
Exits with 1 if a prediction is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from forerun.models.carrier import MTPCarrier
from forerun.models.loading import load
from forerun.models.serving import export
from forerun.planner.calibrate import Calibration, calibrate_by_calls, calibrate_native
from forerun.planner.cost import StepCost
from forerun.planner.plan import survival
from forerun.planner.prompts import PROMPTS
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Request, RolloutEngine, SamplingParams
from forerun.rollout.vllm.engine import VLLMEngine
from forerun.rollout.vllm.launch import LaunchSettings

ALLOWED = 0.15
REPLAYS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--max-depth", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--draft-words", type=int, default=0, help="native: draft on the first N token ids; 0 is all")
    parser.add_argument("--vllm-python", help="interpreter of vLLM's environment")
    parser.add_argument("--vllm-eager", action="store_true", help="do not let vLLM compile")
    parser.add_argument("--no-native", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batches = [int(batch) for batch in args.batches.split(",")]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sampling = SamplingParams(max_tokens=args.new_tokens, temperature=0)
    requests = [Request(f"{i}", tokenizer(text)["input_ids"], sampling) for i, text in enumerate(PROMPTS)]
    errors: list[float] = []

    if not args.no_native:
        model = load(args.model).eval()
        if not isinstance(model, MTPCarrier):
            print(f"{args.model} carries no MTP block", file=sys.stderr)
            return 2
        vocabulary = torch.arange(args.draft_words) if args.draft_words else None
        engine = NativeEngine(model, draft_vocabulary=vocabulary, max_num_seqs=max(batches))
        found = calibrate_native(engine, requests, max(batches), args.max_depth)
        measured: dict[tuple[int, int], float] = {}
        for _ in range(args.repeats):
            for depth in range(args.max_depth + 1):
                engine.num_speculative_tokens = depth
                for batch in batches:
                    seconds = decode_seconds(engine, requests, batch, args.new_tokens)
                    measured[batch, depth] = min(seconds, measured.get((batch, depth), seconds))
        engine.close()
        costs = dict.fromkeys(range(args.max_depth + 1), found)
        errors += compare("native", costs, found.acceptance, measured, requests, args.new_tokens)

    if args.vllm_python:
        with tempfile.TemporaryDirectory() as folder:
            export(args.model, Path(folder) / "mimo", "mimo", fold_norm=True)
            errors += measure_vllm(args, Path(folder) / "mimo", requests, batches)
    print(json.dumps({"largest_error": round(max(map(abs, errors)), 3), "allowed": ALLOWED}))
    return int(max(map(abs, errors)) > ALLOWED)


def measure_vllm(
    args: argparse.Namespace, model_dir: Path, requests: Sequence[Request], batches: Sequence[int]
) -> list[float]:
    """Calibrate, predict and measure vLLM, one process per depth."""
    # Between the predicted sizes and beyond the largest, so that nothing is extrapolated; 1 has no other on its side.
    others = sorted({1, max(batches) * 5 // 4, *(max(1, batch * 2 // 3) for batch in batches)} - (set(batches) - {1}))
    costs: dict[int, Calibration] = {}
    measured: dict[tuple[int, int], float] = {}
    for depth in range(args.max_depth + 1):
        settings = LaunchSettings(
            python=args.vllm_python,
            num_speculative_tokens=depth,
            max_num_seqs=max(others),
            max_model_len=512,
            kv_cache_bytes=1 << 30,
            enforce_eager=args.vllm_eager,
            environment={"OMP_NUM_THREADS": str(args.threads)},
        )
        engine = VLLMEngine.launch(model_dir, settings)
        try:
            costs[depth] = calibrate_by_calls(engine, depth, requests, others)
            for _ in range(args.repeats):
                for batch in batches:
                    seconds = decode_seconds(engine, requests, batch, args.new_tokens)
                    measured[batch, depth] = min(seconds, measured.get((batch, depth), seconds))
        finally:
            engine.close()
    return compare("vllm", costs, costs[args.max_depth].acceptance, measured, requests, args.new_tokens)


def decode_seconds(engine: RolloutEngine, requests: Sequence[Request], batch: int, tokens: int) -> float:
    """Seconds of decoding `tokens - 1` tokens for each of `batch` requests: the mean over groups of all prompts."""
    groups = -(-len(requests) // batch)
    total = 0.0
    for group in range(groups):
        for length, sign in ((1, -1), (tokens, 1)):
            sampling = SamplingParams(max_tokens=length, temperature=0)
            prompts = [requests[(group * batch + i) % len(requests)].prompt_token_ids for i in range(batch)]
            asked = [Request(f"{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
            started = time.perf_counter()
            engine.generate(asked)
            total += sign * (time.perf_counter() - started)
    return total / groups


def compare(
    name: str,
    costs: dict[int, Calibration],
    acceptance: Sequence[float],
    measured: dict[tuple[int, int], float],
    requests: Sequence[Request],
    tokens: int,
) -> list[float]:
    """Print a line per batch and depth; returns the relative errors of the predicted rates."""
    prompt = sum(len(request.prompt_token_ids) for request in requests) / len(requests)
    predicted = {
        (batch, depth): replay(costs[depth], batch, tokens - 1, survival(acceptance, depth) if depth else [], prompt)
        for batch, depth in measured
    }
    errors = []
    for (batch, depth), seconds in sorted(measured.items()):
        count = batch * (tokens - 1)
        errors.append(seconds / predicted[batch, depth] - 1)
        line = {
            "engine": name,
            "batch": batch,
            "k": depth,
            "predicted_tokens_per_s": round(count / predicted[batch, depth], 2),
            "measured_tokens_per_s": round(count / seconds, 2),
            "error": round(errors[-1], 3),
            "predicted_speedup": round(predicted[batch, 0] / predicted[batch, depth], 3),
            "measured_speedup": round(measured[batch, 0] / seconds, 3),
        }
        print(json.dumps(line), flush=True)
    print(json.dumps({"engine": name, "acceptance": [round(share, 3) for share in acceptance]}), flush=True)
    return errors


def replay(cost: StepCost, rows: int, tokens: int, shares: Sequence[float], prompt: float) -> float:
    """Expected seconds until `rows` rows have `tokens` tokens each, rows leaving as they finish."""
    if not shares:
        return sum(cost.seconds(rows, 0, prompt + token) for token in range(tokens))
    luck = random.Random(0)
    total = 0.0
    for _ in range(REPLAYS):
        left = [tokens] * rows
        while left:
            total += cost.seconds(len(left), len(shares), prompt + tokens - sum(left) / len(left)) / REPLAYS
            gained = []
            for missing in left:
                draw = luck.random()
                gained.append(missing - 1 - sum(draw < share for share in shares))
            left = [missing for missing in gained if missing > 0]
    return total


if __name__ == "__main__":
    sys.exit(main())
