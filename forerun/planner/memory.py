"""Bytes that one rank of the torch engine holds at its peak: a sweep over the layers of a forward and backward pass.

Layers are units (trunk layers, MTP layers) that FSDP2 gathers and frees one by one; embedding, LM head and norms are
the root, which stays gathered through a micro-batch. What is alive at the start and the end of each unit's backward
pass is added up, and the largest sum is the peak. tests/planner/test_training_memory.py compares it with live tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forerun.planner.shape import LayerShape
from forerun.planner.training import TrainingRun

Parts = dict[str, float]
# How many float32 tensors of a chunk's logits exist at once: in the main loss while entropies are made, or their
# gradient, and while the LM head's gradient is; in the MTP loss, and one more where the trunk's distribution is asked
# for.
_ENTROPY_LOGITS, _BACKWARD_LOGITS, _MTP_LOGITS, _TEACHER_LOGITS = 3, 2, 2, 1
_FLOAT32 = 4


@dataclass(frozen=True)
class Peak:
    """One phase of a step at its largest.

    Attributes:
        phase: "forward and backward", "optimizer step", "rollout".
        parts: bytes by what they are.
    """

    phase: str
    parts: Parts

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Unit:
    """A layer, in bytes: what its backward pass needs (`full`; with recompute `inputs` are kept, `again` made then)."""

    parameters: float
    trained: bool
    is_mtp: bool
    inputs: float
    full: float
    again: float
    working: float


def activation_bytes(run: TrainingRun, layer: LayerShape) -> float:
    """Bytes that a layer's backward pass needs of one micro-batch, on one rank, without recompute."""
    wide, narrow = run.compute_bytes, run.compute_bytes
    casts = 0.0
    if run.autocast:  # norms compute and hand on in the weights' precision; every product casts its input for itself
        wide, casts = run.weight_bytes, 2.5 * narrow - run.weight_bytes
    # Of a norm: its input in float32, what it multiplies by its weight, and its result.
    normed = layer.normed * (max(_FLOAT32, wide) + 2 * wide + casts)
    values = normed + layer.saved * narrow + layer.heads * _FLOAT32
    shared = run.layout.context if run.layout.engine == "torch" else 1
    if not run.packed and shared == 1:
        return run.tokens * values
    # Of a row that ranks share each keeps all keys and values, and its own rows of a mask.
    values += (shared - 1) * (layer.keys_values + layer.saved_packed) * narrow
    mask = run.rows * run.row_length**2 / run.layout.context * narrow if layer.heads else 0.0
    return run.tokens * (values + layer.saved_packed * narrow) + mask


def static_parts(run: TrainingRun) -> Parts:
    """Weights and optimizer state: what a rank holds all the time."""
    shards = run.layout.shards
    on_device = 0.0 if run.layout.offload else 1.0
    weights = run.parameters * run.weight_bytes / shards
    return {
        "weights": on_device * weights,
        "optimizer": on_device * 2 * run.trained_parameters * run.weight_bytes / shards,
        "reference policy": on_device * weights if run.reference else 0.0,
    }


def torch_peaks(run: TrainingRun) -> list[Peak]:
    """The peaks of a step's phases on the fullest rank."""
    static = static_parts(run)
    backward = max(({**static, **moment} for moment in _moments(run)), key=lambda parts: sum(parts.values()))
    gradients = run.trained_parameters * run.weight_bytes / run.layout.shards
    step = {**static, "gradients": 0.0 if run.layout.offload else gradients}
    if run.device == "cpu":  # one kernel does it all on CUDA
        step["optimizer step"] = 2 * _largest(run) * run.weight_bytes
    return [Peak("forward and backward", backward), Peak("optimizer step", step)]


def _moments(run: TrainingRun) -> Iterator[Parts]:
    """What is alive besides `static_parts` at the moments that can be the fullest."""
    shards = run.layout.shards
    units = _units(run)
    gathered = run.compute_bytes if shards > 1 else 0.0
    head = run.shape.head
    root_parameters = head * (1 if run.shape.tied else 2)
    root = root_parameters * gathered
    # Gradients of a finished unit, in shards; with several rounds those of the rounds before are there already.
    shard = run.weight_bytes / shards if not run.layout.offload else 0.0
    trained = [unit.parameters * shard if unit.trained else 0.0 for unit in units]
    root_gradient = root_parameters * shard if run.train_trunk else 0.0
    before = sum(trained) + root_gradient if run.rounds > 1 else 0.0
    whole = run.compute_bytes if shards > 1 else run.weight_bytes
    # The root's own gradients stay whole until its turn comes: the LM head's, and where the MTP loss reaches it the
    # embedding's, too.
    joint = run.train_mtp and not run.isolated and run.train_trunk
    own = head * whole if run.train_trunk and (shards > 1 or run.rounds == 1 or (joint and run.shape.tied)) else 0.0
    if joint and not run.shape.tied:
        own += head * whole
    kept = [unit.inputs if run.recompute else unit.full for unit in units]
    casts = run.parameters * run.compute_bytes if run.autocast else 0.0
    hiddens = run.tokens * run.shape.hidden * run.compute_bytes
    logits = _logits(run, hiddens, joint, whole)

    def moment(done: int, working: float, gradients: float, gathering: float, chunk: float = 0.0) -> Parts:
        """`done` units' activations are still needed; the backward pass has come that far."""
        return {
            "gradients": max(before, gradients) if run.rounds > 1 else gradients,
            "activations, trunk": sum(k for k, u in zip(kept[:done], units[:done], strict=True) if not u.is_mtp)
            + working
            + casts
            + hiddens,
            "activations, MTP": sum(k for k, u in zip(kept[:done], units[:done], strict=True) if u.is_mtp),
            "logits": chunk,
            "gathered": root + gathering,
        }

    layer = max((unit.parameters for unit in units), default=0.0)
    yield moment(len(units), 0.0, 0.0, 2 * layer * gathered, logits)
    reduced = layer * run.reduce_bytes if shards > 1 else 0.0
    for index in reversed(range(len(units))):
        unit = units[index]
        later = sum(trained[index + 1 :])
        held = unit.parameters * gathered
        ahead = units[index - 1].parameters * gathered if index else 0.0
        if not run.layout.reshard:
            held, ahead = sum(u.parameters for u in units) * gathered, 0.0
        reducing = reduced if index + 1 < len(units) and units[index + 1].trained else 0.0
        again = unit.again if run.recompute else 0.0
        yield moment(index + 1, unit.working + again, later + own, held + ahead + reducing)
        own_whole = unit.parameters * run.compute_bytes if shards > 1 and unit.trained else 0.0
        yield moment(index, 0.0, later + own + (own_whole if shards > 1 else trained[index]), held + ahead + reduced)
    if shards > 1 and run.train_trunk:
        reducing = root_parameters * run.reduce_bytes
        yield moment(0, 0.0, sum(trained) + root_parameters * run.compute_bytes, reducing)
    yield moment(0, 0.0, sum(trained) + root_gradient + (head * whole if joint else 0.0), 0.0)


def _units(run: TrainingRun) -> list[_Unit]:
    """Trunk and MTP layers in the order of the forward pass."""
    hidden = run.tokens * run.shape.hidden
    units = []
    for layer in run.shape.layers:
        full = activation_bytes(run, layer) if run.train_trunk else 0.0
        inputs = hidden * run.compute_bytes if run.train_trunk else 0.0
        working = run.tokens * layer.working * run.compute_bytes
        units.append(_Unit(layer.parameters, run.train_trunk, False, inputs, full, full, working))
    if not run.train_mtp:
        return units
    drafter = run.shape.drafter
    norm = max(_FLOAT32, run.compute_bytes) + run.compute_bytes
    for depth in range(run.chained):
        # Both norms (the hidden's own input is the trunk's), their concatenation, the final norm, and the gradient of
        # the hidden, which the chunks have left.
        around = hidden * (3 * norm + 3 * run.compute_bytes)
        if not run.isolated and run.train_trunk:
            around += run.shape.head * run.weight_bytes  # and that of the LM head
        parameters = drafter.parameters if depth < run.depths else 0
        again = activation_bytes(run, drafter)
        inputs = around + hidden * run.compute_bytes
        working = run.tokens * drafter.working * run.compute_bytes
        units.append(_Unit(parameters, True, True, inputs, again + around, again, working))
    return units


def _logits(run: TrainingRun, hiddens: float, joint: bool, whole: float) -> float:
    """A chunk's logits and what the losses hold besides: the hiddens of the targets, the LM head's gradients."""
    targets = run.rows * run.row_length
    one = min(run.chunk, targets) * run.shape.vocabulary * _FLOAT32
    mtp = main = 0.0
    if run.train_mtp:
        mtp = (_MTP_LOGITS + (_TEACHER_LOGITS if run.soft else 0)) * one + 2 * hiddens
    if run.train_trunk:
        # Each chunk's gradient of the LM head is added to the sum of those before.
        head, several = run.shape.head * whole, targets > run.chunk
        main = 2 * hiddens + max(_ENTROPY_LOGITS * one + several * head, _BACKWARD_LOGITS * one + (1 + several) * head)
    return max(mtp, main)


def _largest(run: TrainingRun) -> float:
    """Values of the largest weight, of a rank: LM head, stacked experts or one of a layer's about four large ones."""
    layers = (*run.shape.layers, run.shape.drafter)
    inner = max(max(layer.weights / 4, layer.experts * layer.expert_weights * 2 / 3) for layer in layers)
    return max(run.shape.head, inner) / run.layout.shards
