"""What ranks tell one another for an optimizer step, in bytes that one rank sends, and the arithmetic beside it.

Rings: a gather or a scatter over n ranks moves (n - 1) / n of the whole through each rank, a sum twice that (Patarasu
and Yuan 2009). Of FSDP2 the figures are those of the calls that it makes (tests/planner/test_training_memory.py counts
them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.engines.megatron.layout import stage_sizes
from forerun.planner.hardware import Hardware
from forerun.planner.megatron_memory import layer_parameters
from forerun.planner.shape import LayerShape
from forerun.planner.training import TrainingRun

_FLOAT32 = 4
# Shares of the published figures: large matrix products, attention and everything around them in one step
# ("model FLOPs utilisation"; docs/scaling.md compares), and collectives of some megabytes.
ARITHMETIC_SHARE = 0.40
LINK_SHARE = 0.80


@dataclass(frozen=True)
class Traffic:
    """One kind of exchange.

    Attributes:
        what: for people.
        bytes: sent by one rank in an optimizer step.
        group: ranks that take part.
        span: ranks from the first to the last of a group, counted as they are numbered: within a machine or not.
    """

    what: str
    bytes: float
    group: int
    span: int

    def seconds(self, hardware: Hardware) -> float:
        """At the speed of the slowest link that it crosses; infinite on a device without links."""
        speed = hardware.link if self.span <= hardware.per_machine else hardware.network
        return self.bytes / (speed * LINK_SHARE) if speed else math.inf


def traffic(run: TrainingRun) -> list[Traffic]:
    """The exchanges of an optimizer step, of the busiest rank; kinds that move nothing are left out."""
    found = _fsdp(run) if run.layout.engine == "torch" else _megatron(run)
    return [kind for kind in found if kind.bytes]


def flops(run: TrainingRun, mtp: bool = True) -> float:
    """Operations of an optimizer step over all ranks: forward once, backward twice, recompute once more."""
    tokens = run.rows * run.row_length * run.micro_batches
    passes = (3.0 if run.train_trunk else 1.0) + (1.0 if run.recompute and run.train_trunk else 0.0)
    total = passes * tokens * sum(_forward(layer, run.row_length) for layer in run.shape.layers)
    if run.train_trunk:
        total += 4.0 * tokens * 2 * run.shape.head  # its logits are made twice
    if mtp and run.train_mtp:
        depth_passes = 4.0 if run.recompute else 3.0
        head = (3.0 + run.soft) * 2 * run.shape.head
        total += run.chained * tokens * (depth_passes * _forward(run.shape.drafter, run.row_length) + head)
    return total


def arithmetic_seconds(run: TrainingRun, hardware: Hardware, mtp: bool = True) -> float:
    """Of an optimizer step, at `ARITHMETIC_SHARE` of the device's; a pipeline's filling and emptying included."""
    layout = run.layout
    of_one = flops(run, mtp=mtp) / run.micro_batches / (layout.tensor * layout.pipeline * layout.context)
    speed = hardware.peak("bfloat16" if run.compute_bytes < _FLOAT32 else "float32") * ARITHMETIC_SHARE
    return (run.rounds + (layout.pipeline - 1) / layout.chunks) * of_one / speed


def _forward(layer: LayerShape, row_length: int) -> float:
    """Operations of a layer for one token, of a causal row."""
    seen = min(row_length / 2, layer.window or row_length)
    return 2 * layer.active + seen * layer.expanded_flops + layer.state_flops


def _fsdp(run: TrainingRun) -> list[Traffic]:
    layout, shape = run.layout, run.shape
    shards = layout.shards
    replicas = layout.ranks // shards
    share = (shards - 1) / shards
    layers = sum(layer.parameters for layer in shape.layers)
    root = shape.head * (1 if shape.tied else 2)
    mtp = run.mtp_parameters if run.train_mtp else 0
    # A layer is gathered for its forward pass and again for its backward pass; the root once for both.
    backward = 2 if layout.reshard else 1
    gathers = layers * (backward if run.train_trunk else 1) + mtp * backward + root
    trained = run.trained_parameters
    rounds = run.rounds
    found = [
        Traffic("gather weights", rounds * share * gathers * run.compute_bytes, shards, shards),
        Traffic("scatter gradients", rounds * share * trained * run.reduce_bytes, shards, shards),
    ]
    if layout.context > 1:
        found.append(_context(run, run.shape.layers + (run.shape.drafter,) * (run.chained * run.train_mtp), 1))
    if replicas > 1:
        each = trained / shards * run.reduce_bytes
        found.append(
            Traffic("sum over replicas", rounds * 2 * (replicas - 1) / replicas * each, replicas, layout.ranks)
        )
    return found


def _context(run: TrainingRun, layers: Sequence[LayerShape], tensor: int) -> Traffic:
    """Keys and values gathered forward (and for recompute), their gradients scattered."""
    context = run.layout.context
    row = sum(layer.keys_values for layer in layers) * run.rows * run.row_length * run.compute_bytes / tensor
    passes = 2 + (1 if run.recompute else 0)
    moved = run.rounds * (context - 1) / context * row * passes
    return Traffic("context parallel", moved, context, tensor * context)


def _megatron(run: TrainingRun) -> list[Traffic]:
    layout, shape = run.layout, run.shape
    rounds, hidden = run.rounds, run.tokens * shape.hidden * run.compute_bytes
    stages, start = [], 0
    for size in stage_sizes(len(shape.layers), layout.pipeline):
        stages.append(list(shape.layers[start : start + size]))
        start += size
    stages[-1] += [shape.drafter] * (run.chained if run.train_mtp else 0)
    layers = max(stages, key=lambda stage: sum(layer.parameters for layer in stage))
    found = []
    tensor, context, expert = layout.tensor, layout.context, layout.expert
    if tensor > 1:
        # Two sums forward and two backward for each layer; with sequence parallelism a gather and a scatter each, and
        # inputs gathered once more for the weights' gradients.
        share = (tensor - 1) / tensor
        sums = (2 * 2 + 2 * 2) + (2 if layout.sequence else 0) + (4 if run.recompute else 0)
        found.append(Traffic("tensor parallel", rounds * len(layers) * sums * share * hidden, tensor, tensor))
    if context > 1:
        found.append(_context(run, layers, tensor))
    if expert > 1:
        # Tokens to their experts and back, forward and backward; a token goes to each rank that it needs.
        used = sum(layer.experts_per_token for layer in layers if layer.experts)
        trips = 4 + (2 if run.recompute else 0)
        moved = rounds * trips * used * hidden / (tensor if layout.sequence else 1)
        found.append(Traffic("experts", moved * (expert - 1) / expert, expert, expert * tensor))
        # An expert's own tensor-parallel ranks each take all of its tokens.
        found.append(Traffic("experts' inputs", moved * (tensor - 1), tensor, tensor))
    if layout.pipeline > 1:
        found.append(
            Traffic(
                "pipeline", rounds * 2 * layout.chunks * hidden / (tensor if layout.sequence else 1), 2, layout.ranks
            )
        )
    dense = experts = 0.0
    for layer in layers:
        own = layer_parameters(run, layer)
        dense, experts = dense + own[0], experts + own[1]
    dense += shape.head / tensor
    replicas = layout.data * context
    expert_replicas = max(1, replicas // expert)
    # Gradients are scattered in float32 and weights gathered, once a step.
    shared = dense * (replicas - 1) / replicas + experts * (expert_replicas - 1) / expert_replicas
    found.append(Traffic("optimizer", (_FLOAT32 + run.weight_bytes) * shared, replicas, tensor * replicas))
    return found
