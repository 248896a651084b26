"""A model's weights in FSDP2 shards over the ranks that train it.

Every rank is handed *all* micro-batches of a step and runs its own. So each knows every count that a loss divides by
without asking the others, and the step's gradient is the whole batch's whatever the number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from forerun.data.batch import Batch
from forerun.engines.context_parallel import gather_in_attention
from forerun.engines.division import rows_for
from forerun.engines.handing_out import agree_on_weights, hand_out
from forerun.engines.ranks import RankGroup
from forerun.engines.shared_rows import RowParts, Rows
from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier
from forerun.models.trunk import base_model

Result = TypeVar("Result")


@dataclass(frozen=True)
class ShardingConfig:
    """How `fully_shard` lays weights, gradients and optimizer state over ranks.

    Attributes:
        param_dtype: precision that weights are gathered and computed in; None is their own.
        reduce_dtype: precision that gradients are summed in; None is the gradients' own.
        reshard_after_forward: free a layer's gathered weights after its forward and gather them again in backward.
        context_parallel_size: consecutive ranks that share each row's tokens, see `engines.context_parallel`.
        cpu_offload: keep shards, gradients and optimizer state in host memory, and update them there.
    """

    param_dtype: Literal["bfloat16", "float16"] | None = None
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    context_parallel_size: int = 1


class _Runner(nn.Module):
    """The root that FSDP2 hooks: embedding, LM head and norms are gathered while it runs a function.

    An engine calls trunk, MTP block and LM head apart from each other, so no forward of the model itself would do.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


class DataParallel(RankGroup):
    """A model on the ranks of a device mesh; without a mesh, on this process alone.

    Args:
        model: the same weights on every rank, or on rank 0 alone (see `engines.handing_out`); its parameters become
            shards, in place.
        mesh: one dimension shards over all its ranks; two are (replicas, shards), HSDP. None: one process.
        sharding: precision, what is gathered when, and how many ranks share a row.

    Attributes:
        data: the ranks that share a step's micro-batches, seen from this one: all of them, or one of each
            context-parallel group.
        rows: makes of a micro-batch what runs here.
        speaks: whether what a context-parallel group has in common is this rank's to report.

    Raises:
        UsageError: a trunk that context parallelism does not cover; a model without weights, or another than rank 0's.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh | None, sharding: ShardingConfig) -> None:
        super().__init__(mesh)
        self.sharded = mesh is not None
        # Where it computes, which need not be where its shards lie; None without shards: where the weights are.
        self.device: torch.device | None = None
        if mesh is not None:
            cuda = mesh.device_type == "cuda"
            self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device(mesh.device_type)
        self.data: RankGroup = self
        self.rows: Callable[[Batch], Rows] = rows_for(model)
        self.speaks = True
        if sharding.context_parallel_size > 1:
            size = sharding.context_parallel_size
            if self.size % size:
                raise UsageError(f"context_parallel_size={size} must divide the number of ranks, {self.size}")
            context, self.data = self.split(size)
            assert context.group is not None
            gather_in_attention(model, context.group)
            self.rows, self.speaks = partial(RowParts, group=context.group), context.rank == 0
        self._running = False
        self._runner = _Runner(model)
        whole_on_first = agree_on_weights(model, self)
        if mesh is not None:
            self._shard(model, mesh, sharding, whole_on_first)

    def _shard(self, model: PreTrainedModel, mesh: DeviceMesh, config: ShardingConfig, whole_on_first: bool) -> None:
        """`fully_shard` over trunk layers, MTP layers and, as one unit, the rest: embedding, LM head, norms.

        Where rank 0 alone has the weights, the others get each unit just before it is cut.
        """
        trunk: Any = base_model(model)
        units = [*trunk.layers, *(model.mtp.layers if isinstance(model, MTPCarrier) else ()), self._runner]
        dtypes = [None if name is None else getattr(torch, name) for name in (config.param_dtype, config.reduce_dtype)]
        settings: dict[str, Any] = {
            "mesh": mesh,
            "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
            if config.cpu_offload
            else OffloadPolicy(),
        }
        mixed = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
        own = MixedPrecisionPolicy(reduce_dtype=dtypes[1])
        assert self.device is not None
        if whole_on_first:
            hand_out(model.buffers(), self, self.device)
        for unit in units:
            if whole_on_first:
                hand_out(unit.parameters(), self, self.device)
            for part in _parts_of_other_dtypes(unit):
                fully_shard(part, reshard_after_forward=config.reshard_after_forward, mp_policy=own, **settings)
            again = config.reshard_after_forward and unit is not units[-1]
            fully_shard(unit, reshard_after_forward=again, mp_policy=mixed, **settings)
        for module in self._runner.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # losses are divided by counts of the whole step
                # Below float64 a factor is NCCL's own kind of sum otherwise.
                module.set_force_sum_reduction_for_comms(True)

    def run(self, function: Callable[[], Result]) -> Result:
        """Call `function`, in which embedding, LM head and norms may be used. Every rank calls it as often.

        A loss must be among what it returns as it is or in a tuple: its backward pass is hooked there. A call within
        another is part of that one.
        """
        if self._running:
            return function()
        self._running = True
        try:
            result = self._runner(function)
        finally:
            self._running = False
        if not torch.is_grad_enabled() and isinstance(self._runner, FSDPModule):
            self._runner.reshard()  # as backward would: a rollout that follows wants the memory
        return result

    @torch.no_grad()
    def rewrite(self, layers: Iterable[nn.Module], function: Callable[[], Result]) -> Result:
        """`run` a function that writes to the weights of `layers`, which are whole in it; on every rank the same."""
        rewritten = nn.ModuleList(layers)
        shards = [module for module in rewritten.modules() if isinstance(module, FSDPModule)]

        def write() -> tuple[Result, list[Tensor]]:
            for module in shards:
                module.unshard()
            result = function()
            written = [weight.detach().clone() for weight in rewritten.parameters()] if shards else []
            for module in shards:
                module.reshard()
            return result, written

        result, written = self.run(write)
        if shards:
            for own, tensor in zip(rewritten.parameters(), written, strict=True):
                own.copy_(like(tensor, own))
        return result


def _parts_of_other_dtypes(unit: nn.Module) -> Iterator[nn.Module]:
    """Modules in a unit whose weights are of another dtype than most of it, as routers are: FSDP2's units have one.

    Raises:
        UsageError: a module holds both, next to each other.
    """
    sizes: Counter[torch.dtype] = Counter()
    for weight in _whole_weights(unit):
        sizes[weight.dtype] += weight.numel()
    usual = {dtype for dtype, _ in sizes.most_common(1)}

    def parts(module: nn.Module) -> Iterator[nn.Module]:
        dtypes = {weight.dtype for weight in _whole_weights(module)}
        if dtypes <= usual:
            return
        if len(dtypes) == 1:
            yield module
            return
        if not {weight.dtype for weight in module.parameters(recurse=False)} <= usual:
            raise UsageError(
                f"{type(module).__name__} holds weights of several dtypes, which several ranks cannot train: set "
                "model.dtype=float32 (and engine.param_dtype=bfloat16)"
            )
        for child in module.children():
            yield from parts(child)

    return parts(unit)


def _whole_weights(module: nn.Module) -> list[nn.Parameter]:
    """Those that do not lie in shards yet."""
    return [weight for weight in module.parameters() if not isinstance(weight, DTensor)]


def whole(tensor: Tensor) -> Tensor:
    """A tensor in full. For a shard every rank has to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, own: Tensor) -> Tensor:
    """A full tensor, the same on every rank, as `own` is laid over ranks and devices."""
    tensor = tensor.to(own.device, own.dtype)
    return distribute_tensor(tensor, own.device_mesh, own.placements) if isinstance(own, DTensor) else tensor
