"""The torch engine beside megatron-core's on the same model, weights and threads, as JSON lines.

    python benchmarks/training_engines.py [--layers 8] [--hidden 256] [--rows 2] [--length 256] [--repeats 5]

One process, a random Llama-like model with an MTP block (one depth, isolation "heads"), the same batch: joint SFT steps
(forward, backward, clipping, AdamW) of four engines - torch and megatron, with and without the head - take turns, so
that a busy moment hits all. One line for each engine:

    tokens_per_second       of steps with the head, at the median
    step_overhead           median over the turns of (with / without head); `flops_overhead` the same of the
                            floating-point operations of all matrix products, `overhead_over_flops` their ratio
    sync_seconds            copying all `named_weights` into tensors of their own, as an engine in this process does;
                            `memcpy_seconds` a copy of the same bytes from plain tensors; `sync_over_memcpy`
    sync_extra_bytes        what is alive at the peak of that beyond both models; `largest_weight_bytes` beside it

and one that compares them (`torch_over_megatron`, the median over the turns). Megatron-core runs without Transformer
Engine; on a machine without CUDA by the stand-ins of the tests (tests/engines/megatron_cpu.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from loss_memory import LiveBytes
from step_overhead import FlopCounter
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from forerun import MTPConfig, attach, load
from forerun.data.batch import Batch
from forerun.data.packing import Document, pack
from forerun.engines.megatron.layout import ParallelLayout
from forerun.engines.megatron.settings import MegatronEngineConfig
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.protocol import TrainingEngine
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig

WITH, WITHOUT = MTPConfig(enable=True, enable_train=True, detach_encoder=True), MTPConfig()


def write_model(path: Path, args: argparse.Namespace) -> None:
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        max_position_embeddings=args.length,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    attach(LlamaForCausalLM(config), WITH, init="plain").save_pretrained(path)


def batch_of(args: argparse.Namespace) -> Batch:
    """Full rows of three documents each."""
    draw = torch.Generator().manual_seed(0)
    sizes = [args.length // 2, args.length // 4, args.length - args.length // 2 - args.length // 4] * args.rows
    ids = [torch.randint(0, args.vocabulary, (size,), generator=draw).tolist() for size in sizes]
    return pack([Document(tokens, [True] * len(tokens)) for tokens in ids], args.length, args.rows)[0]


def torch_engine(path: Path, mtp: MTPConfig, device: str) -> TorchEngine:
    model = load(path, mtp).to(device)
    return TorchEngine(model, TorchEngineConfig(optimizer=OptimizerConfig(lr=1e-5)))


def megatron_engine(path: Path, mtp: MTPConfig, device: str) -> Any:
    from forerun.engines.megatron.start import start_engine

    return start_engine(path, mtp, ParallelLayout(), MegatronEngineConfig(optimizer=OptimizerConfig(lr=1e-5)))


def next_token_loss(log_probs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    return -log_probs.sum() / batch.num_targets, {}


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def step(engine: TrainingEngine, batch: Batch) -> None:
    engine.forward_backward([batch], next_token_loss)
    engine.step()


def flops(engine: TrainingEngine, batch: Batch) -> int:
    with FlopCounter() as counter:
        step(engine, batch)
    return counter.total


def sync(engine: TrainingEngine, repeats: int) -> dict[str, float]:
    own = {name: tensor.detach().clone() for name, tensor in engine.named_weights()}
    plain = {name: tensor.clone() for name, tensor in own.items()}

    def update() -> None:
        for name, tensor in engine.named_weights():
            own[name].copy_(tensor)

    def memcpy() -> None:
        for name, tensor in own.items():
            plain[name].copy_(tensor)

    turns = [(seconds(update), seconds(memcpy)) for _ in range(repeats + 1)][1:]
    with LiveBytes() as live:
        update()
    return {
        "sync_seconds": round(statistics.median(a for a, _ in turns), 5),
        "memcpy_seconds": round(statistics.median(b for _, b in turns), 5),
        "sync_over_memcpy": round(statistics.median(a / b for a, b in turns), 3),
        "weight_bytes": sum(tensor.nbytes for tensor in own.values()),
        "sync_extra_bytes": live.peak,
        "largest_weight_bytes": max(tensor.nbytes for tensor in own.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 8), ("hidden", 256), ("vocabulary", 8192), ("rows", 2), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")  # about Transformer Engine and Apex, which are not there
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        sys.path.insert(0, str(Path(__file__).parent.parent))
        from tests.engines import megatron_cpu

        megatron_cpu.install()
    batch = batch_of(args)
    makers = {"torch": torch_engine, "megatron": megatron_engine}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", args)
        engines = {
            name: [make(Path(folder) / "model", mtp, device) for mtp in (WITHOUT, WITH)]
            for name, make in makers.items()
        }
    arithmetic = {name: [flops(engine, batch) for engine in pair] for name, pair in engines.items()}  # warms up too
    turns = [
        {name: [seconds(lambda e=engine: step(e, batch)) for engine in pair] for name, pair in engines.items()}
        for _ in range(args.repeats)
    ]
    for name, pair in engines.items():
        overhead = statistics.median(turn[name][1] / turn[name][0] for turn in turns)
        flops_overhead = arithmetic[name][1] / arithmetic[name][0]
        line = {
            "engine": name,
            "device": device,
            "threads": args.threads,
            "tokens": batch.input_ids.numel(),
            "tokens_per_second": round(batch.input_ids.numel() / statistics.median(turn[name][1] for turn in turns), 1),
            "step_overhead": round(overhead, 4),
            "flops_overhead": round(flops_overhead, 4),
            "overhead_over_flops": round(overhead / flops_overhead, 4),
            **sync(pair[1], args.repeats),
        }
        print(json.dumps(line), flush=True)
    ratios = {
        key: round(statistics.median(turn["megatron"][place] / turn["torch"][place] for turn in turns), 4)
        for key, place in (("torch_over_megatron", 1), ("torch_over_megatron_without_head", 0))
    }
    print(json.dumps(ratios), flush=True)


if __name__ == "__main__":
    main()
