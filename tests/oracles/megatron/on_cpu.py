"""Let megatron-core 0.16.1 run on a CPU with gloo, without editing it. Import this before anything of Megatron's.

Megatron asks CUDA for the current device and for its random state: here the CPU answers. No arithmetic is touched.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

CPU = torch.device("cpu")
torch.cuda.current_device = lambda: CPU
torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
torch.cuda.manual_seed = torch.manual_seed

warnings.filterwarnings("ignore")  # about Transformer Engine and Apex, which are not there
import megatron.core.tensor_parallel.random as megatron_random  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

Work = Callable[[Any, dict[str, Tensor]], dict[str, Tensor]]


def _rank(rank: int, size: int, folder: Path, work: Work) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    megatron_random.model_parallel_cuda_manual_seed(1)
    answer = work(json.loads((folder / "settings.json").read_text()), load_file(folder / "given.safetensors"))
    save_file(
        {name: tensor.contiguous() for name, tensor in answer.items()}, folder / f"answer{size}.{rank}.safetensors"
    )
    dist.destroy_process_group()


def run(folder: Path, work: Work, context_parallel: int = 1) -> None:
    """Do `work` in as many processes as the context-parallel group has ranks, and write each one's answer."""
    # Forked, so that Megatron is imported once.
    mp.start_processes(_rank, (context_parallel, folder, work), nprocs=context_parallel, start_method="fork")
