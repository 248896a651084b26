"""Seconds of a decode step, with and without drafts: a roofline over each part of the model, plus what software adds.

A part (attention's projections, experts, LM head, cache, ...) takes the longer of moving its bytes and of its
arithmetic, at fixed fractions of what the spec sheet promises (Williams et al. 2009). Verifying k drafts is a step over
k + 1 tokens per row: weights and cache are read once, arithmetic grows. A mixture of experts reads the distinct experts
that all tokens together choose. A draft is one pass of the MTP layer and the LM head over one token per row.

The constants below are one set for every model and device; docs/planner.md says where each is from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from forerun.errors import UsageError
from forerun.planner.hardware import BYTES, Hardware, Precision
from forerun.planner.shape import LayerShape, ModelShape

Launch = Literal["graph", "eager"]

# Fractions of the spec sheet that kernels reach.
BANDWIDTH_SHARE = 0.80
ARITHMETIC_SHARE = 0.65
# Seconds: what a kernel takes however little it does; what Python takes to launch one without a graph.
KERNEL = 4e-6
EAGER_LAUNCH = 50e-6
# Seconds around each forward pass (trunk or drafter) that nothing overlaps: inputs, attention metadata.
FORWARD: dict[Launch, float] = {"graph": 0.5e-3, "eager": 4e-3}
# Seconds that judging drafts adds to a step: rejection sampler, bookkeeping, waiting for the accepted counts.
JUDGE: dict[Launch, float] = {"graph": 1e-3, "eager": 3e-3}
# Seconds of the scheduler and sampler per row, in a plain step and what drafts add to it.
ROW = 10e-6
JUDGED_ROW = 30e-6
# Seconds of one all-reduce or all-to-all; a layer has two. What it moves is small at decode sizes.
COLLECTIVE = 12e-6
# Engines keep recurrent states in float32.
STATE_BYTES = 4
_MOST_DEVICES = 1 << 16


class StepCost(Protocol):
    """Seconds of one decode step."""

    def seconds(self, rows: int, depth: int, context: float) -> float:
        """One step of `rows` rows with `depth` drafts each, `context` tokens in each row's cache."""
        ...


@dataclass(frozen=True)
class Deployment:
    """How an engine runs a model.

    Attributes:
        tensor_parallel: devices that share every layer (with experts, also the experts: expert or tensor parallel
            read the same bytes).
        launch: whether kernels are replayed from a graph, or launched one by one (`enforce_eager`).
        cache: precision of the key-value cache.
        expands_batch: verifies k drafts as k + 1 rows of their own, each reading the cache (vLLM V0's batch expansion).
        max_tokens: most tokens over all rows that the engine runs in one step; None is any number.
    """

    tensor_parallel: int = 1
    launch: Launch = "graph"
    cache: Precision = "bfloat16"
    expands_batch: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.tensor_parallel <= _MOST_DEVICES:
            raise UsageError(f"tensor_parallel={self.tensor_parallel} must lie between 1 and {_MOST_DEVICES}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens={self.max_tokens} must be at least 1")


def distinct_experts(experts: int, per_token: int, tokens: float) -> float:
    """Expected number of experts that `tokens` tokens use, each choosing `per_token` of them evenly and on its own."""
    if experts == 0:
        return 0.0
    return experts * (1 - (1 - per_token / experts) ** tokens)


@dataclass(frozen=True)
class Roofline:
    """Costs from a spec sheet (a `StepCost`)."""

    shape: ModelShape
    hardware: Hardware
    deployment: Deployment = Deployment()

    def seconds(self, rows: int, depth: int, context: float) -> float:
        """See `StepCost.seconds`. More tokens than the engine takes at once run in as many steps as it needs."""
        limit, per_row = self.deployment.max_tokens, depth + 1
        if limit is not None and rows * per_row > limit:
            at_once = max(limit // per_row, 1)
            return self._step(at_once, depth, context) * rows / at_once
        return self._step(rows, depth, context)

    def _step(self, rows: int, depth: int, context: float) -> float:
        launch = self.deployment.launch
        verify = self._forward(self.shape.layers, rows, depth + 1, context)
        seconds = verify + rows * ROW
        if depth:
            seconds += depth * self._forward((self.shape.drafter,), rows, 1, context)
            seconds += JUDGE[launch] + rows * JUDGED_ROW
        return seconds

    def _forward(self, layers: tuple[LayerShape, ...], rows: int, per_row: int, context: float) -> float:
        """The layers and the LM head over `per_row` new tokens of each row."""
        kernels = 4 + sum(layer.kernels for layer in layers)
        busy = kernels * KERNEL + self._product(self.shape.head, rows * per_row, _compute(self.shape.precision))
        for layer in layers:
            busy += self._layer(layer, rows, per_row, context)
        if self.deployment.launch == "eager":
            busy = max(busy, kernels * EAGER_LAUNCH)
        return busy + FORWARD[self.deployment.launch]

    def _layer(self, layer: LayerShape, rows: int, per_row: int, context: float) -> float:
        devices, tokens = self.deployment.tensor_parallel, rows * per_row
        seconds = self._product(layer.weights, tokens, self.shape.precision)
        if layer.experts:
            read = distinct_experts(layer.experts, layer.experts_per_token, tokens) * layer.expert_weights
            used = tokens * layer.experts_per_token * layer.expert_weights
            seconds += self._roofline(read * BYTES[self.shape.precision], 2 * used, self.shape.precision, devices)
        if layer.cached:
            seen = min(context, layer.window) if layer.window else context
            readers = tokens if self.deployment.expands_batch else rows
            cache = readers * seen * layer.cached * BYTES[self.deployment.cache]
            operations = tokens * seen * layer.attention_flops
            split = min(devices, layer.split_cache)
            seconds += max(
                cache / split / (self.hardware.bandwidth * BANDWIDTH_SHARE),
                operations / devices / (self.hardware.peak(_compute(self.shape.precision)) * ARITHMETIC_SHARE),
            )
        if layer.state:
            # Read once, and written after every token so that rejected ones can be taken back.
            moved = rows * layer.state * STATE_BYTES * (1 + per_row)
            seconds += self._roofline(moved, tokens * layer.state_flops, _compute(self.shape.precision), devices)
        return seconds + (2 * COLLECTIVE if devices > 1 else 0.0)

    def _product(self, weights: int, tokens: int, precision: Precision) -> float:
        """A weight matrix over so many tokens."""
        operations = 2 * weights * tokens
        return self._roofline(weights * BYTES[precision], operations, precision, self.deployment.tensor_parallel)

    def _roofline(self, moved: float, operations: float, precision: Precision, devices: int) -> float:
        hardware = self.hardware
        return (
            max(
                moved / (hardware.bandwidth * BANDWIDTH_SHARE),
                operations / (hardware.peak(precision) * ARITHMETIC_SHARE),
            )
            / devices
        )


def _compute(weights: Precision) -> Precision:
    """What everything but the quantised weights is computed and kept in."""
    return "float32" if weights == "float32" else "bfloat16"
