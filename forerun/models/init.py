"""A closed-form start for an MTP head: least squares from what the head reads to the trunk hidden it should foresee.

The depth-1 target is known exactly: the trunk's own hidden one position on, h⁰_{i+1}, whose LM-head distribution the
head is to reproduce. A head whose decoder layer adds nothing yet (`attach(init="identity")`) is its projection, and the
best linear one is ridge regression on [norm(h⁰_i), norm(E[t_{i+1}])]: seconds, against minutes of gradient steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier
from forerun.models.trunk import embed
from forerun.mtp.shift import depth_targets


@torch.no_grad()
def fit_projection(
    model: MTPCarrier,
    rows: Sequence[tuple[Tensor, Tensor]],
    trunk_hidden: Callable[[int], Tensor],
    *,
    ridge: float = 1e-4,
) -> float:
    """Fit the first layer's projection and the scale of its final norm, in place.

    With x = [norm(h), norm(e)] and the target y = h⁰_{i+1} / g (g: the trunk's final norm weight, so y has unit mean
    square), W minimises sum |W x - y|² + ridge · n · mean(x²) · |W|². The final norm undoes the shrinkage of the fit,
    which would make the head far too sure of itself; its weight is therefore g times the fit's own root mean square.

    Args:
        model: freshly attached with init="identity".
        rows: (input_ids, document_ids) pairs, long [B, S] each.
        trunk_hidden: index into `rows` -> trunk hiddens [B, S, d].
        ridge: relative strength of the penalty.

    Returns:
        share of the target's variance that the fit explains, on the rows it was fitted to.

    Raises:
        UsageError: no position to fit on.
    """
    layer = model.mtp.layer(1)
    norm_weight = layer.final_norm.weight
    assert isinstance(norm_weight, Tensor)
    scale = norm_weight.double()
    size = layer.proj.in_features
    xx = torch.zeros(size, size, dtype=torch.float64, device=scale.device)
    xy = torch.zeros(size, layer.proj.out_features, dtype=torch.float64, device=scale.device)
    yy, count = 0.0, 0
    for index, (input_ids, documents) in enumerate(rows):
        hidden = trunk_hidden(index)
        input_ids, documents = input_ids.to(hidden.device), documents.to(hidden.device)
        target = depth_targets(input_ids, documents, torch.ones_like(documents, dtype=torch.bool), 0)
        # Depth 0's validity: the next token is in the same document, so h⁰_{i+1} follows from what the head reads.
        entering = hidden if model.mtp.undo_norm is None else model.mtp.undo_norm(hidden)
        halves = [layer.hidden_norm(entering), layer.embed_norm(embed(model, target.labels))]
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
    layer.proj.weight.copy_(weight)
    norm_weight.mul_((fitted / count / layer.proj.out_features) ** 0.5)
    return 1.0 - residual / yy
