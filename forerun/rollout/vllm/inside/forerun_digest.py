"""The digest of a drafter's weights as vLLM holds them, put together from all workers that share it.

Each worker reads its parts, and the workers of vLLM's tensor parallelism meet weight by weight. All of them go through
all weights, whatever one of them fails at: who stopped early would leave the others waiting.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from forerun_packing import Unreadable
from forerun_reading import NOT_HELD, HeldWeights
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group


def drafter_digest(model: Any, layout: list[Any], dtype: torch.dtype, parallel: Any) -> dict[str, str | None]:
    """`forerun.rollout.sync.digest` of weights in `dtype`.

    Args:
        layout: [name, shape, pieces] per weight; pieces are the (name, shape) under which a checkpoint holds its equal
            parts, in order.
        parallel: vLLM's configuration of that.

    Returns:
        {"digest": that, on the first worker, "unreadable": None}; or {"digest": None, "unreadable": why, in one line}.
        Where workers differ in what they should all hold the same of, it is the digest of no weights at all.
    """
    if parallel.world_size * parallel.data_parallel_size != parallel.tensor_parallel_size or parallel.enable_eplb:
        limit = "only tensor parallelism is read back, not pipelines, contexts, data parallelism or moved experts"
        return {"digest": None, "unreadable": limit}
    group = get_tp_group()
    first = group.rank_in_group == 0
    held = _Held(model, {name: shape for *_, pieces in layout for name, shape in pieces}, dtype)
    parts, missing = [], ""
    for name, shape, pieces in layout:
        part = hashlib.sha256(f"{name}\0{dtype}\0{tuple(shape)}\0".encode())
        for piece, _ in pieces:
            highest, lowest = _extremes(held.part(piece), group)
            if not first:
                continue
            if not missing and bool((highest == NOT_HELD).any()):
                missing = f"vLLM does not hold {piece} as it is in the checkpoint"
            part.update(_bytes(highest))
            if not torch.equal(highest, lowest):
                part.update(_bytes(lowest))
        parts.append((name, part.digest()))
    failures: list[str] = [""] * group.world_size
    dist.all_gather_object(failures, held.failure, group=group.cpu_group)
    if reason := next(filter(None, [*failures, missing]), None):
        return {"digest": None, "unreadable": reason}
    return {"digest": hashlib.sha256(b"".join(digest for _, digest in sorted(parts))).hexdigest(), "unreadable": None}


class _Held:
    """What this worker holds; after a failure, nothing, and `failure` is that."""

    def __init__(self, model: Any, shapes: dict[str, Any], dtype: torch.dtype) -> None:
        self.failure = ""
        self._shapes, self._dtype = shapes, dtype
        self._device = next(model.parameters()).device
        try:
            self._weights = HeldWeights(model, shapes)
        except Exception as error:
            self._fail(error)

    def part(self, name: str) -> Tensor:
        if not self.failure:
            try:
                return self._weights.part(name, self._dtype)
            except Exception as error:
                self._fail(error)
        return torch.full(tuple(self._shapes[name]), NOT_HELD, dtype=self._dtype, device=self._device)

    def _fail(self, error: Exception) -> None:
        kind = "" if isinstance(error, Unreadable) else f"{type(error).__name__}: "
        self.failure = kind + " ".join(str(error).split())


def _extremes(part: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """The highest and the lowest value that any worker holds at each place: the same if those who hold it agree."""
    if group.world_size == 1:
        return part, part
    both = torch.stack([part, torch.where(part == NOT_HELD, part, -part)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group.device_group)
    return both[0], -both[1]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data
