"""Megatron-core's process groups, which it keeps in module state: made once for a process, from a layout."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from forerun.engines.megatron.layout import ParallelLayout
from forerun.errors import UsageError

_layout: ParallelLayout | None = None  # of the groups that there are


def initialise(layout: ParallelLayout, seed: int, timeout_s: float = 1800.0) -> None:
    """Divide the ranks of the default process group; one process without such a group is a group of its own.

    Every rank calls it, before a model is built. Groups of an earlier call stay, unless they are of another layout.

    Args:
        seed: of the random numbers of dropout, which differ between tensor-parallel ranks where they must.

    Raises:
        UsageError: the ranks do not divide so.
    """
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout_s)
        )
    global _layout
    layout.data_parallel_size(dist.get_world_size())
    if parallel_state.model_parallel_is_initialized() and _layout == layout:
        return
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
            context_parallel_size=layout.context_parallel_size,
            expert_model_parallel_size=layout.expert_model_parallel_size,
            distributed_timeout_minutes=max(1, int(timeout_s // 60)),
            create_gloo_process_groups=False,
        )
    except RuntimeError as error:
        raise UsageError(f"megatron-core refuses this layout: {error}") from error
    _layout = layout
    model_parallel_cuda_manual_seed(seed % 2**31)
