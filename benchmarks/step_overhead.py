"""What one MTP head adds to a training step, in time and in arithmetic, as one JSON line.

    python benchmarks/step_overhead.py [MODEL_DIR] [--rows 2] [--length 256] [--repeats 5] [--loss ce]

The same joint SFT step of the whole trunk (SmolLM2-135M-Instruct unless MODEL_DIR names another that has no block;
forward, backward, clipping, AdamW) with and without a head, in isolation "heads", on one model each, taking turns in
one process so that a busy moment hits both. `time_ratio` is the median over the turns of (with / without), `cpu_ratio`
the same of the process's own processor time, which other work disturbs less; `flops_ratio` that of the floating-point
operations of all matrix products, by torch's formulas. `time_over_flops` is what the aim is about: at most 1.10.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from forerun import MTPConfig, attach, load
from forerun.data.batch import Batch
from forerun.data.gguf import smollm2
from forerun.demo import self_text
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.trainers.batching import Rows, stack_rows


def batch_of(rows: int, length: int) -> Batch:
    """Rows of the packaged text, packed to about `length` tokens each."""
    responses = self_text.take(self_text.packaged(), "train", 8 * rows * length + 4096)
    responses = [response for response in responses if len(response) <= length]
    packed = Rows([response.document(prompt_too=True) for response in responses], length, packing=True)
    return stack_rows(sorted(packed, key=lambda row: row.num_targets, reverse=True)[:rows])


def next_token_loss(log_probs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    return -log_probs.sum() / batch.num_targets, {}


def engine_of(model: PreTrainedModel) -> TorchEngine:
    return TorchEngine(model, TorchEngineConfig(optimizer=OptimizerConfig(lr=1e-5)))


def step(engine: TorchEngine, batch: Batch) -> tuple[float, float]:
    """One training step; its seconds by the clock and of the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    engine.forward_backward([batch], next_token_loss)
    engine.step()
    return time.perf_counter() - clock, time.process_time() - processor


class FlopCounter(TorchDispatchMode):
    """Floating-point operations by torch's own formulas.

    Its FlopCounterMode follows modules too, which it cannot do through the gradients that the MTP loss takes inside
    forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def flops(engine: TorchEngine, batch: Batch) -> int:
    with FlopCounter() as counter:
        step(engine, batch)
    return counter.total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--loss", default="ce", choices=["ce", "soft_ce", "tv"])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model_dir = args.model or smollm2(report=print)
    mtp = MTPConfig(enable=True, enable_train=True, detach_encoder=True, loss=args.loss)
    without, with_head = engine_of(load(model_dir)), engine_of(attach(load(model_dir), mtp))
    batch = batch_of(args.rows, args.length)
    arithmetic = [flops(engine, batch) for engine in (without, with_head)]  # warms both up too
    turns = [(step(without, batch), step(with_head, batch)) for _ in range(args.repeats)]
    time_ratios = [b[0] / a[0] for a, b in turns]
    cpu_ratios = [b[1] / a[1] for a, b in turns]
    time_ratio, flops_ratio = statistics.median(time_ratios), arithmetic[1] / arithmetic[0]
    line = {
        "loss": args.loss,
        "tokens": batch.input_ids.numel(),
        "threads": args.threads,
        "seconds_without": round(statistics.median(a[0] for a, _ in turns), 3),
        "seconds_with": round(statistics.median(b[0] for _, b in turns), 3),
        "time_ratio": round(time_ratio, 4),
        "time_ratio_range": [round(min(time_ratios), 3), round(max(time_ratios), 3)],
        "cpu_ratio": round(statistics.median(cpu_ratios), 4),
        "tflop_without": round(arithmetic[0] / 1e12, 4),
        "tflop_with": round(arithmetic[1] / 1e12, 4),
        "flops_ratio": round(flops_ratio, 4),
        "time_over_flops": round(time_ratio / flops_ratio, 4),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
