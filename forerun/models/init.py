"""How a new MTP head starts: without data, or in closed form from a little text.

Without data ("carry"), the head repeats the trunk: its projection passes the trunk's hidden on, its decoder layer is
drawn with silent outputs, and its final norm makes the repeated distribution about half as sure. The loss then starts
below ln V, and the layer learns from there what the next token changes. A copy of the trunk's last layer in its place
learns more slowly.

In closed form: the depth-1 target is known exactly, the trunk's own hidden one position on, h⁰_{i+1}, whose LM-head
distribution the head is to reproduce. A head whose decoder layer adds nothing yet is its projection, and the best
linear one is ridge regression on [norm(h⁰_i), norm(E[t_{i+1}])]: seconds, against minutes of gradient steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from forerun.errors import UsageError
from forerun.families import FamilyRecord
from forerun.models.carrier import MTPCarrier
from forerun.models.trunk import base_model, embed, final_norm
from forerun.mtp.block import MTPLayer
from forerun.mtp.shift import depth_targets

Init = Literal["carry", "plain"]

# Share of the trunk's logit scale that a carried hidden keeps. It foresees one token too few, so at full scale it is
# sure of the wrong token; benchmarks/init_acceptance.py shows the loss by this share.
CARRIED_SCALE = 0.5
# Last matrices of the attention (or its linear kin) and of the MLP in transformers' decoder layers.
OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "down_proj")


@torch.no_grad()
def initialise(
    layer: MTPLayer,
    norm: nn.Module,
    init: Init,
    std: float,
    generator: torch.Generator,
    family: FamilyRecord,
    first: bool,
) -> None:
    """Start a layer whose decoder is a copy of one of the trunk's, in place.

    Args:
        norm: the trunk's final norm.
        init: see `forerun.attach`.
        std: of the drawn matrices.
        first: the layer is depth 1's, which takes the trunk's hidden; the others take that of the depth before.

    Raises:
        UsageError: an unknown init, or a decoder layer whose output projections are not known by name.
    """
    if init not in ("carry", "plain"):
        raise UsageError(f"init={init!r} is not one of carry, plain")
    scale = norm_scale(norm)
    for name, parameter in layer.named_parameters():
        if parameter.dim() >= 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        elif name.endswith("bias"):
            parameter.zero_()
    for module in layer.modules():
        if isinstance(module, type(norm)):
            set_norm_scale(module, torch.ones_like(norm_scale(module)))
    if init == "plain":
        if isinstance(layer.final_norm, type(norm)):
            set_norm_scale(layer.final_norm, scale)
        return
    silent = [
        parameter
        for name, parameter in layer.decoder.named_parameters()
        if any(part in OUTPUT_PROJECTIONS for part in name.split("."))
    ]
    if len(silent) < 2:
        raise UsageError(
            f"init='carry' finds no output projections ({', '.join(OUTPUT_PROJECTIONS)}) in a "
            f"{type(layer.decoder).__name__}: use init='plain'"
        )
    for parameter in silent:
        parameter.zero_()
    layer.proj.weight.zero_()
    size = layer.proj.out_features
    start = 0 if layer.concat_order == "hidden_embed" else size
    carried = layer.proj.weight[:, start : start + size]
    # A hidden from after a norm has that norm's weight in it already: what is missing is the length alone.
    taken = family.trunk_hidden if first else family.recurrence
    whole = scale if taken == "pre_norm" else scale.pow(2).mean().sqrt().expand_as(scale)
    if isinstance(layer.final_norm, type(norm)):
        carried.copy_(torch.eye(size))
        set_norm_scale(layer.final_norm, CARRIED_SCALE * whole)
    else:
        carried.copy_(torch.diag(CARRIED_SCALE * whole))


def norm_scale(norm: nn.Module) -> Tensor:
    """What a norm multiplies each feature by, [d], however its weight is kept (Gemma keeps the scale minus 1)."""
    probe = torch.full_like(next(norm.parameters()), 1024.0)  # so large that the norm's epsilon is nothing
    probe[1::2] = -1024.0
    return norm(probe) * probe.sign()


def set_norm_scale(norm: nn.Module, scale: Tensor) -> None:
    """Make a norm multiply each feature by `scale`, [d]."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    weight.zero_()
    weight.copy_(scale - norm_scale(norm))


@torch.no_grad()
def fit_projection(
    model: MTPCarrier,
    rows: Sequence[tuple[Tensor, Tensor]],
    trunk_hidden: Callable[[int], Tensor],
    *,
    ridge: float = 1e-4,
) -> float:
    """Fit the first layer's projection and final norm, in place. Deeper layers get a copy of the first.

    With x = [norm(h), norm(e)] and the target y = h⁰_{i+1} / g (g: the trunk's final norm weight, so y has unit mean
    square), W minimises sum |W x - y|² + ridge · n · mean(x²) · |W|². The final norm undoes the shrinkage of the fit,
    which would make the head far too sure of itself; its scale is therefore g times the fit's own root mean square.
    Where depth k - 1 foresees the trunk's hidden at i + k - 1, depth k has the same map to learn: hence the copies.

    Args:
        model: freshly attached with init="carry".
        rows: (input_ids, document_ids) pairs, long [B, S] each.
        trunk_hidden: index into `rows` -> trunk hiddens [B, S, d].
        ridge: relative strength of the penalty.

    Returns:
        share of the target's variance that the fit explains, on the rows it was fitted to.

    Raises:
        UsageError: no position to fit on.
    """
    layer = model.mtp.layer(1)
    norm = final_norm(base_model(model))
    assert norm is not None  # `attach` asked for it
    scale = norm_scale(norm).double()
    size = layer.proj.in_features
    xx = torch.zeros(size, size, dtype=torch.float64, device=scale.device)
    xy = torch.zeros(size, layer.proj.out_features, dtype=torch.float64, device=scale.device)
    yy, count = 0.0, 0
    for index, (input_ids, documents) in enumerate(rows):
        hidden = trunk_hidden(index)
        input_ids, documents = input_ids.to(hidden.device), documents.to(hidden.device)
        target = depth_targets(input_ids, documents, torch.ones_like(documents, dtype=torch.bool), 0)
        # Depth 0's validity: the next token is in the same document, so h⁰_{i+1} follows from what the head reads.
        halves = [layer.hidden_norm(model.mtp.enter(hidden)), layer.embed_norm(embed(model, target.labels))]
        if layer.concat_order == "embed_hidden":
            halves.reverse()
        x = torch.cat(halves, dim=-1)[target.valid].double()
        places, positions = target.valid.nonzero(as_tuple=True)
        y = hidden[places, positions + 1].double() / scale
        xx += x.T @ x
        xy += x.T @ y
        yy += float(y.pow(2).sum())
        count += len(x)
    if count == 0:
        raise UsageError("no document has two tokens: nothing to fit the projection to")
    penalty = ridge * xx.diagonal().mean()
    weight = torch.linalg.solve(xx + penalty * torch.eye(size, dtype=torch.float64, device=xx.device), xy).T
    fitted = float((weight @ xx * weight).sum())
    residual = yy - 2 * float((weight * xy.T).sum()) + fitted
    if isinstance(layer.final_norm, nn.Identity):
        layer.proj.weight.copy_(scale.unsqueeze(1) * weight)
    else:
        layer.proj.weight.copy_(weight)
        set_norm_scale(layer.final_norm, scale * (fitted / count / layer.proj.out_features) ** 0.5)
    for depth in range(2, len(model.mtp.layers) + 1):
        other = model.mtp.layer(depth)
        for own, fitted_weight in zip(other.parameters(), layer.parameters(), strict=True):
            own.copy_(fitted_weight)
        if model.mtp.undo_norm is not None and model.mtp.recurrence == "post_norm":
            # The first layer took the hidden from before the trunk's norm; this one's comes from after the head's.
            set_norm_scale(other.hidden_norm, norm_scale(layer.hidden_norm) * scale.pow(2).mean().sqrt() / scale)
    return 1.0 - residual / yy


@torch.no_grad()
def fit_to_text(model: MTPCarrier, input_ids: Sequence[Tensor]) -> float:
    """`fit_projection` to the trunk's hiddens over token ids, long [B, S] each, every row one document.

    Returns:
        share of the target's variance that the fit explains.
    """
    trunk = base_model(model)
    training = trunk.training
    trunk.eval()  # no dropout in the targets
    device = next(trunk.parameters()).device
    rows = [(ids.to(device), torch.zeros_like(ids, device=device)) for ids in input_ids]
    explained = fit_projection(model, rows, lambda i: trunk(input_ids=rows[i][0], use_cache=False).last_hidden_state)
    trunk.train(training)
    return explained
