"""The ranks that share a training step: who runs which micro-batch, weights in FSDP2 shards, sums over all of them.

Every rank is handed *all* micro-batches of a step and runs its own. So each knows every count that a loss divides by
without asking the others, and the step's gradient is the whole batch's whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from forerun.engines.protocol import merge_metrics
from forerun.errors import ForerunError, one_line
from forerun.models.carrier import MTPCarrier
from forerun.models.trunk import base_model
from forerun.mtp.stats import MTPStats

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ShardingConfig:
    """How `fully_shard` lays weights, gradients and optimizer state over ranks.

    Attributes:
        param_dtype: precision that weights are gathered and computed in; None is their own.
        reduce_dtype: precision that gradients are summed in; None is the gradients' own.
        reshard_after_forward: free a layer's gathered weights after its forward and gather them again in backward.
        cpu_offload: keep shards and optimizer state in host memory (CUDA only).
    """

    param_dtype: Literal["bfloat16", "float16"] | None = None
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    reshard_after_forward: bool = True
    cpu_offload: bool = False


class _Runner(nn.Module):
    """The root that FSDP2 hooks: embedding, LM head and norms are gathered while it runs a function.

    An engine calls trunk, MTP block and LM head apart from each other, so no forward of the model itself would do.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


class DataParallel:
    """A model on the ranks of a device mesh; without a mesh, on this process alone.

    Args:
        model: the same weights on every rank; its parameters become shards, in place.
        mesh: one dimension shards over all its ranks; two are (replicas, shards), HSDP. None: one process.
        sharding: precision, what is gathered when.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh | None, sharding: ShardingConfig) -> None:
        self.rank, self.size = (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())
        self.sharded = mesh is not None
        self._runner = _Runner(model)
        self._group: dist.ProcessGroup | None = None
        if mesh is None:
            return
        self._group = mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
        _shard(self._runner, model, mesh, sharding)

    def run(self, function: Callable[[], Result]) -> Result:
        """Call `function`, in which embedding, LM head and norms may be used. Every rank calls it as often.

        A loss must be among what it returns as it is or in a tuple: its backward pass is hooked there.
        """
        result = self._runner(function)
        if not torch.is_grad_enabled() and isinstance(self._runner, FSDPModule):
            self._runner.reshard()  # as backward would: a rollout that follows wants the memory
        return result

    def deal(self, items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
        """This rank's items, each with whether it counts.

        Ranks must gather and reduce equally often, so where the last ones are too few for all, the ranks that get none
        run one of the others' for nothing.
        """
        source = iter(items)
        while turn := list(islice(source, self.size)):
            yield (turn[self.rank], True) if self.rank < len(turn) else (turn[0], False)

    def collect(self, count: int, own: Sequence[Result]) -> list[Result]:
        """What every rank made of its `deal` of `count` items, in the items' order."""
        if self._group is None:
            return list(own)
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, list(own), group=self._group)
        return [parts[place % self.size][place // self.size] for place in range(count)]

    def merge(self, values: dict[str, float]) -> dict[str, float]:
        """Metrics of all ranks, by `merge_metrics`."""
        total: dict[str, float] = {}
        for part in self.collect(self.size, [values]):
            merge_metrics(total, part)
        return total

    def reduce(self, stats: MTPStats) -> MTPStats:
        """The sums over all ranks."""
        return stats if self._group is None else stats.reduce(self._group)

    def any(self, flag: Tensor) -> bool:
        """Whether a 0-dim flag is up on any rank."""
        if self._group is None:
            return bool(flag)
        raised = flag.to(torch.int32)
        dist.all_reduce(raised, dist.ReduceOp.MAX, group=self._group)
        return bool(raised)

    def on_first(self, write: Callable[[], None]) -> None:
        """Call `write` on rank 0 alone; the others wait for it.

        Raises:
            ForerunError: on every rank, if it failed there.
        """
        failure: Exception | None = None
        if self.rank == 0:
            try:
                write()
            except Exception as error:
                failure = error
        if self._group is not None:
            said = [None if failure is None else one_line(failure)]
            dist.broadcast_object_list(said, group=self._group, group_src=0)
            if said[0] is not None and failure is None:
                raise ForerunError(f"rank 0: {said[0]}")
        if failure is not None:
            raise failure


def _shard(root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, config: ShardingConfig) -> None:
    """`fully_shard` over trunk layers, MTP layers and, as one unit, the rest: embedding, LM head, norms."""
    trunk: Any = base_model(model)
    units = [*trunk.layers, *(model.mtp.layers if isinstance(model, MTPCarrier) else ())]
    dtypes = [None if name is None else getattr(torch, name) for name in (config.param_dtype, config.reduce_dtype)]
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1]),
        "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
    }
    for unit in units:
        fully_shard(unit, reshard_after_forward=config.reshard_after_forward, **settings)
    fully_shard(root, reshard_after_forward=False, **settings)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are divided by counts of the whole step


def whole(tensor: Tensor) -> Tensor:
    """A tensor in full. For a shard every rank has to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, own: Tensor) -> Tensor:
    """A full tensor, the same on every rank, as `own` is laid over ranks and devices."""
    tensor = tensor.to(own.device, own.dtype)
    return distribute_tensor(tensor, own.device_mesh, own.placements) if isinstance(own, DTensor) else tensor
