"""A vLLM model's parameters under the names of its checkpoint, read back from where they are used.

vLLM's loaders are run on tensors without memory, which shows what of which parameter each name fills. Nothing is
written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from forerun_packing import plain
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

NOT_HELD = float("-inf")  # which is no weight's value


class _Slice(NamedTuple):
    """Where a loader copied to and from: (shape, stride, offset) in the parameter and in the tensor that was loaded."""

    layer: nn.Module
    parameter: str
    target: tuple[Any, ...]
    source: tuple[Any, ...]
    numel: int


class HeldWeights:
    """What a model holds.

    Args:
        model: stays as it is.
        shapes: name -> shape in the checkpoint, of those that are to be read.
    """

    def __init__(self, model: Any, shapes: Mapping[str, Sequence[int]]) -> None:
        self._shapes, self._device = shapes, next(model.parameters()).device
        self._slices: dict[str, list[_Slice]] = {name: [] for name in shapes}
        self._as_loaded: dict[tuple[nn.Module, str], Tensor] = {}
        self._last: tuple[tuple[nn.Module, str] | None, Tensor] = (None, torch.empty(0))
        self._loading: tuple[str, Tensor] | None = None
        parameters = {layer: dict(layer._parameters) for layer in model.modules()}
        try:
            for layer, own in parameters.items():
                for name, parameter in own.items():
                    if parameter is not None:
                        layer._parameters[name] = self._shadow(layer, name, parameter)
            with disable_mtp_completeness_check():
                model.load_weights(self._without_memory())
        finally:
            for layer, own in parameters.items():
                layer._parameters.update(own)

    def part(self, name: str, dtype: torch.dtype) -> Tensor:
        """A weight, with NOT_HELD wherever this model does not hold it.

        Raises:
            Unreadable: vLLM holds it in an unknown form.
        """
        parts = [(place, self._parameter(place).as_strided(*place.target)) for place in self._slices[name]]
        tensor = torch.full(tuple(self._shapes[name]), NOT_HELD, dtype=dtype, device=self._device)
        for place, part in parts:
            tensor.as_strided(*place.source).copy_(part)
        return tensor

    def _parameter(self, place: _Slice) -> Tensor:
        key = place.layer, place.parameter
        if self._last[0] != key:  # several names fill one parameter, and it may take work to read
            self._last = key, plain(*key, self._as_loaded[key])
        return self._last[1]

    def _without_memory(self) -> Iterator[tuple[str, Tensor]]:
        for name, shape in self._shapes.items():
            self._loading = name, torch.empty(tuple(shape), device="meta")
            yield self._loading

    def _shadow(self, layer: nn.Module, name: str, parameter: Tensor) -> Any:
        """The parameter as it was before anything was packed, without memory; its loader notes where it copies."""
        recorded = get_layerwise_info(layer).restore_metadata[0].get(name)
        as_loaded: Any = to_meta_tensor(parameter) if recorded is None else restore_layer_refs(recorded, layer)
        self._as_loaded[layer, name] = as_loaded
        loader = _get_original_loader(as_loaded)

        def noting(*args: Any, **kwargs: Any) -> Any:
            with _Copies() as copies:
                result = loader(*args, **kwargs)
            assert self._loading is not None
            given, whole = self._loading
            for target, source in copies.found:
                if source.untyped_storage()._cdata == whole.untyped_storage()._cdata:
                    place = _Slice(layer, name, _geometry(target), _geometry(source), target.numel())
                    self._slices[given].append(place)
            return result

        shadow: Any = to_meta_tensor(as_loaded)
        shadow.weight_loader = noting
        return shadow


class _Copies(TorchDispatchMode):
    """Notes (target, source) of every `copy_`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.found.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
