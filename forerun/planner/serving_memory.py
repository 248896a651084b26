"""Bytes that a rollout engine needs on each device: weights, drafter, and the cache of the rows that run together."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.planner.hardware import BYTES, Hardware, Precision
from forerun.planner.shape import LayerShape, ModelShape

# Of a device's memory: what is left beside CUDA's context, libraries' workspaces and gaps between blocks.
USABLE = 0.92
# Engines keep recurrent states in float32.
_STATE_BYTES = 4


@dataclass(frozen=True)
class Serving:
    """What an engine holds on one device, in bytes.

    Attributes:
        weights: trunk, embedding, LM head, and the MTP layer that drafts.
        row: cache and state of one row at its longest.
        rows: rows that run together.
    """

    weights: float
    row: float
    rows: int

    @property
    def total(self) -> float:
        """Bytes."""
        return self.weights + self.rows * self.row

    def fits(self, hardware: Hardware) -> bool:
        """Whether the device has room for it."""
        return self.total <= USABLE * hardware.memory

    def most_rows(self, hardware: Hardware) -> int:
        """Rows that it has room for; 0 where the weights alone do not fit."""
        return max(0, int((USABLE * hardware.memory - self.weights) // max(self.row, 1)))


def serving(
    shape: ModelShape, rows: int, context: float, cache: Precision = "bfloat16", devices: int = 1, depths: int = 1
) -> Serving:
    """The memory of one device out of `devices` that share every layer.

    Args:
        shape: the model, in the precision of its weights; the LM head and the embedding stay in bfloat16 under fp8.
        rows: rows that run together.
        context: tokens of a row at its longest.
        cache: precision of the key-value cache.
        depths: MTP layers loaded for drafting; 0 is none.
    """
    wide = BYTES["bfloat16" if shape.precision == "fp8" else shape.precision]
    layers = shape.parameters - shape.head + depths * shape.drafter.parameters
    weights = layers * BYTES[shape.precision] + shape.head * (1 if shape.tied else 2) * wide
    row = sum(_row_bytes(layer, context, cache, devices) for layer in (*shape.layers, *[shape.drafter] * depths))
    return Serving(weights / devices, row, rows)


def _row_bytes(layer: LayerShape, context: float, cache: Precision, devices: int) -> float:
    seen = min(context, layer.window) if layer.window else context
    held = seen * layer.cached * BYTES[cache] / min(devices, layer.split_cache)
    return held + layer.state * _STATE_BYTES / devices
