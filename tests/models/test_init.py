"""The closed-form start against torch's least squares, and against a trunk that is exactly linear."""

from __future__ import annotations

import pytest
import torch

from forerun import MTPConfig, attach
from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier
from forerun.models.init import fit_projection
from forerun.models.trunk import base_model, embed
from tests.models.tiny import tiny_model, token_rows


def rows(model: MTPCarrier, count: int = 6) -> tuple[list, list]:
    ids = [token_rows(2, 14, seed=i) for i in range(count)]
    documents = [torch.tensor([[0] * 6 + [1] * 8, [0] * 10 + [-1] * 4])] * count
    hiddens = [base_model(model)(input_ids=x, use_cache=False).last_hidden_state.detach() for x in ids]
    return list(zip(ids, documents, strict=True)), hiddens


@torch.no_grad()
@pytest.mark.parametrize("order", ["hidden_embed", "embed_hidden"])
def test_the_fit_is_the_least_squares_solution(order: str) -> None:
    model = attach(tiny_model(), MTPConfig(enable=True), init="identity").double()
    layer = model.mtp.layer(1)
    layer.concat_order = order
    data, hiddens = rows(model, 12)
    g = layer.final_norm.weight.clone()
    explained = fit_projection(model, data, hiddens.__getitem__, ridge=0.0)
    x, y = [], []
    for (ids, documents), hidden in zip(data, hiddens, strict=True):
        for b in range(2):
            for i in range(13):
                if documents[b, i] >= 0 and documents[b, i] == documents[b, i + 1]:
                    entering = hidden[b, i] if model.mtp.undo_norm is None else model.mtp.undo_norm(hidden[b, i])
                    halves = [layer.hidden_norm(entering), layer.embed_norm(embed(model, ids[b, i + 1]))]
                    x.append(torch.cat(halves if order == "hidden_embed" else halves[::-1]))
                    y.append(hidden[b, i + 1] / g)
    stacked, target = torch.stack(x), torch.stack(y)
    solution = torch.linalg.lstsq(stacked, target).solution
    torch.testing.assert_close(layer.proj.weight, solution.T, rtol=1e-6, atol=1e-8)
    prediction = stacked @ solution
    assert explained == pytest.approx(float(1 - (target - prediction).pow(2).sum() / target.pow(2).sum()), rel=1e-6)
    torch.testing.assert_close(layer.final_norm.weight, g * prediction.pow(2).mean().sqrt())


def test_it_helps_from_the_first_step() -> None:
    """On text it was fitted to, the fitted head is nearer to the trunk than the one it started from."""
    model = attach(tiny_model(), MTPConfig(enable=True, enable_train=True), init="identity").double()
    data, hiddens = rows(model)

    def error() -> float:
        total = 0.0
        for (ids, _), hidden in zip(data, hiddens, strict=True):
            out = model.mtp.layer(1).final_norm(model.mtp.layer(1).combine(hidden, embed(model, ids.roll(-1, 1))))
            total += float((out[:, :-1] - hidden[:, 1:]).pow(2).mean())
        return total

    before = error()
    fit_projection(model, data, hiddens.__getitem__)
    assert error() < 0.6 * before


def test_nothing_to_fit_is_an_error() -> None:
    model = attach(tiny_model(), MTPConfig(enable=True), init="identity").double()
    ids = token_rows(1, 3)
    with pytest.raises(UsageError, match="two tokens"):
        fit_projection(model, [(ids, torch.tensor([[0, 1, -1]]))], lambda _: torch.zeros(1, 3, 16).double())
