"""New weights that arrive in parts and go to their places at once: holding all of them first would cost a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.rollout.protocol import NamedTensors


class WeightUpdate:
    """The parts of one update.

    Args:
        own: the engine's weights by name, which are written into.
    """

    def __init__(self, own: Mapping[str, Tensor]) -> None:
        self._own = own
        self._missing = set(own)

    @torch.no_grad()
    def add(self, named_tensors: NamedTensors) -> None:
        """Put these in their places.

        Raises:
            ForerunError: one is unknown, came before, or is of another shape or not of a floating dtype.
        """
        for name, tensor in named_tensors:
            if name not in self._own:
                raise _broken(f"{name} has no place in the model")
            if name not in self._missing:
                raise _broken(f"{name} was sent twice")
            own = self._own[name]
            if tensor.shape != own.shape:
                raise _broken(f"{name} has shape {tuple(tensor.shape)}, the model's is {tuple(own.shape)}")
            if not tensor.is_floating_point():
                raise _broken(f"{name} is {tensor.dtype}, not a floating dtype")
            own.copy_(tensor)
            self._missing.remove(name)
            del tensor  # or it would be there while the next one is made

    def check(self) -> None:
        """See that all have arrived.

        Raises:
            ForerunError: one has not.
        """
        if self._missing:
            raise _broken(f"{len(self._missing)} weights are missing, first {min(self._missing)}")


def _broken(reason: str) -> ForerunError:
    return ForerunError(f"weight update: {reason}; the engine holds a part of it, and generates after a whole one only")
