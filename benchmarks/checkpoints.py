"""How long a save holds a training step up, waiting or beside it, and what host memory it takes, as JSON lines.

    python benchmarks/checkpoints.py [--ranks 1 2] [--parameters 30e6] [--steps 8] [--directory DIR]

A Llama with random weights and an MTP head is trained for `--steps` steps three times by each number of ranks (gloo, in
processes of one thread each; several share the weights by FSDP2): without saves, with a checkpoint after every second
step that it waits for, and with one written beside the steps. One line for each:

- `step_s`: median seconds of a step without its save (beside: partly while a checkpoint is being written);
- `held_up_s`: median and largest seconds of the call that saves, which the next step has to wait for. The first is
  apart (`first_held_up_s`): it allocates the copy and connects the ranks once more;
- `checkpoint_bytes`, and `memcpy_s`: the time in which rank 0 copies its part of them once;
- `peak_bytes`: the largest resident memory of each rank, and `peak_over_none_bytes`: how much more that is than without
  saves, at most of all ranks.

The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from forerun import MTPConfig, attach
from forerun.data.batch import Batch
from forerun.data.packing import Document
from forerun.engines.checkpoint_directory import prune_checkpoints
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.trainers.batching import Rows, micro_batches

VOCABULARY = 8192
ROW_TOKENS = 128


def engine_of(parameters: float, mesh: DeviceMesh | None) -> TorchEngine:
    """A model of about that many parameters; its width follows."""
    width = 64
    while 2 * VOCABULARY * width + 7 * 12 * width**2 < parameters:
        width += 64
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=6,
        num_attention_heads=width // 64,
        max_position_embeddings=ROW_TOKENS,
        tie_word_embeddings=False,
    )
    model = attach(LlamaForCausalLM(config), MTPConfig(enable=True, enable_train=True), init="plain", seed=1)
    return TorchEngine(model, TorchEngineConfig(optimizer=OptimizerConfig(lr=1e-4)), mesh=mesh)


def batches_of(step: int) -> list[Batch]:
    """Four rows, a micro-batch each."""
    draw = torch.Generator().manual_seed(step)
    documents = []
    for _ in range(4):
        ids = torch.randint(0, VOCABULARY, (ROW_TOKENS,), generator=draw).tolist()
        documents.append(Document(ids, [True] * ROW_TOKENS))
    return micro_batches(Rows(documents, ROW_TOKENS, packing=False), 1)


class MeanLoss:
    def __init__(self, batches: list[Batch]) -> None:
        self.targets = sum(batch.num_targets for batch in batches)

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return -log_probs.sum() / self.targets, {}


def part(engine: TorchEngine) -> Tensor:
    """As many float32 as this rank writes: its weights and two moments."""
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in engine.model.parameters()]
    return torch.ones(3 * sum(shard.numel() for shard in shards))


def measure(mode: str, steps: int, parameters: float, directory: Path, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Train on this rank; every rank does the same."""
    engine = engine_of(parameters, mesh)
    plain, held_up = [], []
    for step in range(steps + 1):
        started = time.perf_counter()
        batches = batches_of(step)
        engine.forward_backward(batches, MeanLoss(batches))
        engine.step()
        if step:  # the first makes the optimizer's state
            plain.append(time.perf_counter() - started)
        if mode != "none" and step % 2:
            started = time.perf_counter()
            engine.save(directory / f"checkpoint-{engine.global_step}", wait=mode == "waiting")
            held_up.append(time.perf_counter() - started)
    engine.finish_saves()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found: dict[str, Any] = {"step_s": statistics.median(plain), "held_up": held_up, "peak_bytes": peak}
    data = part(engine)
    started = time.perf_counter()
    data.clone()
    return found | {"part_bytes": data.nbytes, "memcpy_s": time.perf_counter() - started}


def be_rank(rank: int, size: int, mode: str, arguments: argparse.Namespace, directory: Path, results: Any) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    mesh = None
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory}.store", rank=rank, world_size=size)
        mesh = DeviceMesh("cpu", list(range(size)))
    results.put((rank, measure(mode, arguments.steps, arguments.parameters, directory, mesh)))
    if size > 1:
        dist.destroy_process_group()


def run(size: int, mode: str, arguments: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], int]:
    """(what each rank found, bytes of the newest checkpoint)"""
    context = multiprocessing.get_context("spawn")
    results, directory = context.SimpleQueue(), folder / f"{mode}-{size}"
    directory.mkdir()
    processes = [
        context.Process(target=be_rank, args=(rank, size, mode, arguments, directory, results)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"a rank of {size} failed")
    found = dict(results.get() for _ in range(size))
    prune_checkpoints(directory, 1)
    size_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    shutil.rmtree(directory)
    return [found[rank] for rank in range(size)], size_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parameters", type=float, default=30e6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--directory", help="on the disk to measure; default: a temporary one")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        for size in arguments.ranks:
            without = 0
            for mode in ("none", "waiting", "beside"):
                found, size_bytes = run(size, mode, arguments, Path(folder))
                peaks = [rank["peak_bytes"] for rank in found]
                line = {"benchmark": "checkpoints", "ranks": size, "save": mode, "step_s": found[0]["step_s"]}
                if mode == "none":
                    without = max(peaks)
                else:
                    first, *later = (max(calls) for calls in zip(*(rank["held_up"] for rank in found), strict=True))
                    line |= {
                        "held_up_s": statistics.median(later),
                        "held_up_max_s": max(later),
                        "first_held_up_s": first,
                        "checkpoint_bytes": size_bytes,
                        "memcpy_s": found[0]["memcpy_s"],
                        "part_bytes": found[0]["part_bytes"],
                        "peak_over_none_bytes": max(peaks) - without,
                    }
                print(json.dumps(line | {"peak_bytes": peaks}), flush=True)


if __name__ == "__main__":
    main()
