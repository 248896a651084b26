"""What lets megatron-core run on a CPU with gloo: stand-ins for CUDA calls that it makes whatever the device is.

Test equipment: nothing of the package uses it. Each entry says which call of megatron-core it answers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")


class _Nothing:
    """A stream or event on which nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _Nothing]:
        return lambda *_, **__: _Nothing()

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> bool:
        return False


def _on_cpu(function: Any) -> Any:
    """A tensor maker for which "cuda" is the CPU."""

    def made(*args: Any, **named: Any) -> Any:
        if str(named.get("device")).startswith("cuda"):
            named["device"] = CPU
        if named.get("pin_memory"):
            named["pin_memory"] = False
        return function(*args, **named)

    return made


def install() -> None:
    """Once for each process, before a model is built."""
    _without_triton()
    torch.cuda.current_device = lambda: CPU  # device=torch.cuda.current_device()
    # `with torch.device(...)` knows makers by what they are when it is first used. Of ours it would know nothing, and
    # transformers, which loads models so, would leave buffers that no file holds without values.
    _device_constructors()
    for name in ("zeros", "ones", "tensor", "empty", "full", "arange"):  # device="cuda"
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.empty_cache = lambda: None
    _streams()
    _types()
    _random_numbers()
    _mixture_of_experts()


def _without_triton() -> None:
    """0.19 imports kernels for paging experts' activations, whatever is used, and they need triton."""
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if importlib.util.find_spec("triton") is None:
        kernels: Any = types.ModuleType(name)
        kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
        sys.modules[name] = kernels


def _streams() -> None:
    torch.cuda.Stream = torch.cuda.Event = _Nothing
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: _Nothing()
    torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_, **__: None


def _types() -> None:
    """Optimizers sort parameters by `tensor.type() == "torch.cuda.FloatTensor"`."""
    real = torch.Tensor.type
    kinds = ("FloatTensor", "HalfTensor", "BFloat16Tensor")
    names = {f"torch.{kind}": f"torch.cuda.{kind}" for kind in kinds}

    def kind_of(self: torch.Tensor, *args: Any, **named: Any) -> Any:
        found = real(self, *args, **named)
        return names.get(found, found) if isinstance(found, str) else found

    torch.Tensor.type = kind_of


def _random_numbers() -> None:
    """The tracker of CUDA generators keeps states of the CPU's."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed


def _mixture_of_experts() -> None:
    """Without Transformer Engine 0.16 names a kernel that is not there, and sizes of all-to-alls stay on the device."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    real = token_dispatcher.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return real(tensor, as_numpy=as_numpy, record_stream=record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = moved


def gloo_average() -> None:
    """gloo cannot average: it sums, and the division is ours."""
    real = dist.all_reduce

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op != dist.ReduceOp.AVG:
            return real(tensor, op=op, group=group, async_op=async_op)
        done = real(tensor, op=dist.ReduceOp.SUM, group=group, async_op=False)
        tensor.div_(dist.get_world_size(group))
        return done

    dist.all_reduce = all_reduce
