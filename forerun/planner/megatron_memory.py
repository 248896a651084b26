"""Bytes that a rank of the Megatron engine holds at its peak, on the pipeline stage that holds most.

Stages run one forward, one backward in turn (1F1B), so stage s of p keeps the activations of p - s micro-batches. The
last one bears the LM head and the MTP layers. Gradients are summed in float32 beside the weights; the distributed
optimizer cuts its state (and float32 weights, where the model's are bfloat16) over the data-parallel ranks.
"""

from __future__ import annotations

from forerun.engines.megatron.layout import stage_sizes
from forerun.planner.memory import Parts, Peak, activation_bytes
from forerun.planner.shape import LayerShape
from forerun.planner.training import TrainingRun

_FLOAT32 = 4


def megatron_peaks(run: TrainingRun) -> list[Peak]:
    """The peaks of a step's phases on the fullest stage."""
    stages = [_stage(run, stage) for stage in range(run.layout.pipeline)]
    backward = max(stages, key=lambda parts: sum(parts.values()))
    activations = ("activations, trunk", "activations, MTP", "logits", "gathered")
    steps = [{name: value for name, value in parts.items() if name not in activations} for parts in stages]
    return [
        Peak("forward and backward", backward),
        Peak("optimizer step", max(steps, key=lambda parts: sum(parts.values()))),
    ]


def layer_parameters(run: TrainingRun, layer: LayerShape) -> tuple[float, float]:
    """Weights of a layer that one rank holds: (dense ones, experts)."""
    layout = run.layout
    return layer.weights / layout.tensor, layer.experts * layer.expert_weights / layout.tensor / layout.expert


def _stage(run: TrainingRun, stage: int) -> Parts:
    layout, shape = run.layout, run.shape
    sizes = stage_sizes(len(shape.layers), layout.pipeline)
    start = sum(sizes[:stage])
    layers = shape.layers[start : start + sizes[stage]]
    last = stage == layout.pipeline - 1
    mtp_layers = [shape.drafter] * run.depths if last else []
    dense = experts = mtp_dense = mtp_experts = 0.0
    for layer in layers:
        own = layer_parameters(run, layer)
        dense, experts = dense + own[0], experts + own[1]
    for layer in mtp_layers:
        own = layer_parameters(run, layer)
        mtp_dense, mtp_experts = mtp_dense + own[0], mtp_experts + own[1]
    # Embedding on the first stage and, for the MTP layers, on the last; LM head on the last.
    ends = (stage == 0) + (last and not (shape.tied and layout.pipeline == 1))
    if last and run.depths and layout.pipeline > 1 and not shape.tied:
        ends += 1
    dense += ends * shape.head / layout.tensor

    trained_dense = run.train_trunk * dense + run.train_mtp * mtp_dense
    trained_experts = run.train_trunk * experts + run.train_mtp * mtp_experts
    state = 2 * _FLOAT32 + (_FLOAT32 if run.weight_bytes < _FLOAT32 else 0)
    replicas = layout.data * layout.context if layout.state_cut else 1
    expert_replicas = max(1, replicas // layout.expert)
    weights = (dense + experts + mtp_dense + mtp_experts) * run.weight_bytes

    in_flight: float = min(layout.pipeline - stage, run.rounds)
    if layout.chunks > 1:  # of the interleaved schedule, on the first stage (Narayanan et al. 2021, section 2.2)
        in_flight *= 1 + (layout.pipeline - 1) / (layout.pipeline * layout.chunks)
    hidden = run.tokens * shape.hidden * run.compute_bytes
    kept = sum(_kept(run, layer) for layer in layers) * run.train_trunk
    again = max((_activations(run, layer) for layer in layers), default=0.0) if run.recompute else 0.0
    mtp = 0.0
    if last and run.train_mtp:
        norm = _FLOAT32 + run.compute_bytes
        per_depth = hidden / (layout.tensor if layout.sequence else 1) * (3 * norm / run.compute_bytes + 3)
        mtp = run.chained * (per_depth + _kept(run, shape.drafter))
    targets = run.rows * run.row_length
    logits = 4 * min(run.chunk, targets) * shape.vocabulary * _FLOAT32 / layout.tensor if last else 0.0
    gathered = 0.0
    if layout.context > 1:  # every rank gathers the row's keys and values for its layer
        values = max((layer.keys_values for layer in layers), default=0)
        gathered = run.rows * run.row_length * values * run.compute_bytes / layout.tensor
    return {
        "weights": weights,
        "optimizer": state * (trained_dense / replicas + trained_experts / expert_replicas),
        "reference policy": weights if run.reference else 0.0,
        "gradients": _FLOAT32 * (trained_dense + trained_experts),
        "activations, trunk": in_flight * kept + again + 2 * hidden,
        "activations, MTP": mtp,
        "logits": logits,
        "gathered": gathered,
    }


def _activations(run: TrainingRun, layer: LayerShape) -> float:
    """Bytes that a layer keeps of one micro-batch without recompute."""
    layout = run.layout
    whole = activation_bytes(run, layer)
    if layout.tensor == 1 or layout.sequence:
        return whole / layout.tensor
    normed = run.tokens * layer.normed * (_FLOAT32 + 2 * run.compute_bytes)  # on every tensor-parallel rank alike
    return normed + (whole - normed) / layout.tensor


def _kept(run: TrainingRun, layer: LayerShape) -> float:
    if not run.recompute:
        return _activations(run, layer)
    return run.tokens * run.shape.hidden * run.compute_bytes / (run.layout.tensor if run.layout.sequence else 1)
