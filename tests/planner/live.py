"""Bytes of the tensors alive, after every operation: a peak that no allocator, cache or kernel workspace blurs."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within it, storages are noted as operations return them.

    Attributes:
        phase: what is going on, set by the test.
        peaks: phase -> most bytes alive at once.
        moved: collective of torch.distributed on whole tensors -> bytes that a ring sends through one rank.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.phase = ""
        self.peaks: dict[str, int] = defaultdict(int)
        self.moved: dict[str, float] = defaultdict(float)
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._note(value)
        self.peaks[self.phase] = max(self.peaks[self.phase], self._bytes())
        for name in ("allgather_base", "reduce_scatter_base"):
            if name in str(func):
                first, second = args[0], args[1]
                self.moved[name] += abs(first.nbytes - second.nbytes)  # (n - 1) / n of the whole
        return result

    def _note(self, tensor: Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.is_meta:
            return
        storage = local.untyped_storage()
        self._alive[storage._cdata] = weakref.ref(storage)  # an address may serve again

    def _bytes(self) -> int:
        total = 0
        for address, reference in list(self._alive.items()):
            storage = reference()
            if storage is None:
                del self._alive[address]
            else:
                total += storage.nbytes()
        return total
