"""A second device that computes on the CPU, so that a tensor left on the wrong one is found on a machine without a GPU.

Its tensors say that they are on `lazy`, a device that every build of torch can differentiate on. They hold their values
on the CPU, and refuse to meet tensors of the CPU where tensors of a GPU would: what a GPU allows is allowed, 0-dim
tensors of the CPU in a computation and indices from there. What the host would wait for is counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy")
_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_INDEXING = {
    _aten.index.Tensor,
    _aten._unsafe_index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
# Values that the host asks for, and shapes that depend on values.
_WAITING = {
    _aten._local_scalar_dense.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
    _aten.repeat_interleave.Tensor,
    _aten._unique2.default,
}
_SOURCES = str(Path(__file__).parents[2] / "forerun") + "/"


class MixedDevicesError(RuntimeError):
    """What torch would raise on a GPU."""


class OnDevice(Tensor):
    """A tensor of the second device; `held` are its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=held.requires_grad,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Counting(TorchDispatchMode):
    """Makes tensors where `device=` says, and counts where the host waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _waits(func, args, kwargs):
            self.waits[_place()] += 1
        return _run(func, args, kwargs)


class _Python(TorchFunctionMode):
    """What torch makes of Python's values, and makes Python's values of, without asking a dispatch mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            if torch.device(kwargs["device"]) == DEVICE and not isinstance(args[0], OnDevice):
                return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        elif args and isinstance(args[0], OnDevice):
            if func is Tensor.tolist:
                return args[0].cpu().tolist()
            if func in (Tensor.__getitem__, Tensor.__setitem__):
                args = (args[0], _on_device(args[1]), *args[2:])
            if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
                args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))
        return func(*args, **kwargs)


def _on_device(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_on_device, index))
    return torch.tensor(index, dtype=torch.long).to(DEVICE) if isinstance(index, list) else index


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the values of its tensors. Its result is on the device if they are, or if it says so itself."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    own = any(isinstance(x, OnDevice) for x in tensors)
    if own and func not in _COPIES:
        # An index may lie on the CPU.
        meeting = args[:1] if func in _INDEXING else tensors
        changed = args[:1] if func._schema.is_mutable else ()
        if any(_of_cpu(x) and x.dim() > 0 for x in meeting) or any(_of_cpu(x) for x in changed):
            raise MixedDevicesError(f"{func} on {', '.join(f'{x.device.type} {tuple(x.shape)}' for x in tensors)}")
    target = kwargs.get("device")
    onto = own if target is None else torch.device(target) == DEVICE
    held_args, held_kwargs = tree_map(lambda x: x.held if isinstance(x, OnDevice) else x, (args, kwargs))
    if target is not None and onto:
        held_kwargs["device"] = torch.device("cpu")
    out = func(*held_args, **held_kwargs)
    if held_args and out is held_args[0]:  # changed in place
        return args[0]
    return tree_map(lambda x: OnDevice(x) if onto and isinstance(x, Tensor) else x, out)


def _of_cpu(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, OnDevice)


def _waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    own = [isinstance(x, OnDevice) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if func in _COPIES:
        target = kwargs.get("device")
        return len({*own, *([] if target is None else [torch.device(target) == DEVICE])}) > 1
    if not any(own):
        return False
    if func in _INDEXING:
        return any(x.dtype == torch.bool or _of_cpu(x) for x in args[1] if x is not None)
    return func in _WAITING


def _place() -> str:
    """The line of Forerun's that runs."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_SOURCES):
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere" if frame is None else f"{frame.f_code.co_filename.removeprefix(_SOURCES)}:{frame.f_lineno}"


@contextmanager
def second_device() -> Iterator[Counter[str]]:
    """Within it there is a device "lazy". Yields the lines of Forerun's where the host waited for it, and how often."""
    asked = torch.is_autocast_enabled

    def is_autocast_enabled(device_type: str | None = None) -> bool:
        """torch's own knows no autocast of this device."""
        return device_type != DEVICE.type and (asked() if device_type is None else asked(device_type))

    counting = _Counting()
    # Random numbers are drawn on the CPU: there is no generator to look after.
    module = SimpleNamespace(_initialized=False)
    with (
        patch.object(torch, DEVICE.type, module, create=True),
        patch.object(torch, "is_autocast_enabled", is_autocast_enabled),
        _Python(),
        counting,
    ):
        yield counting.waits


def moved(model: nn.Module) -> None:
    """`model.to("lazy")`, which replaces parameters where CUDA's keeps them: what is tied stays tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    new = OnDevice(tensor.detach().clone())
                    parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if parameter else new
                tensors[name] = made[id(tensor)]  # type: ignore[assignment]
