"""How a head starts: repeating its trunk, or from a closed form that is checked against torch's least squares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from forerun import MTPConfig, attach
from forerun.errors import UsageError
from forerun.families import ATTACHED, FamilyRecord
from forerun.models.carrier import MTPCarrier
from forerun.models.init import fit_projection, norm_scale, set_norm_scale
from forerun.models.trunk import base_model, decoder_inputs, embed
from tests.families.tiny import tiny_trunk
from tests.models.tiny import tiny_model, token_rows


def gemma() -> PreTrainedModel:
    """Its norms keep their scale minus 1."""
    return tiny_trunk("Gemma2ForCausalLM", dtype=torch.float64, head_dim=4).train()


ZERO_CENTRED = replace(ATTACHED, zero_centred_norm=True)


@torch.no_grad()
@pytest.mark.parametrize(
    "family",
    [
        ATTACHED,
        replace(ATTACHED, concat_order="embed_hidden"),
        replace(ATTACHED, trunk_hidden="post_norm", recurrence="post_norm"),
        replace(ATTACHED, recurrence="post_norm"),
        replace(ATTACHED, final_norm=False),
        ZERO_CENTRED,
    ],
    ids=["hidden_embed", "embed_hidden", "post_norm", "pre_then_post", "no_final_norm", "zero_centred"],
)
def test_a_new_head_repeats_its_trunk_half_as_sure(family: FamilyRecord) -> None:
    """h^k is half the trunk's hidden, whatever tokens follow; through a norm more, of the mean length."""
    trunk = gemma() if family is ZERO_CENTRED else tiny_model()
    norm = base_model(trunk).norm
    set_norm_scale(norm, torch.linspace(0.5, 2.0, 16, dtype=torch.float64))
    model = attach(trunk, MTPConfig(enable=True, num_layers=2), family=family)
    ids = token_rows(2, 9)
    hidden = base_model(model)(input_ids=ids, use_cache=False).last_hidden_state
    inputs = decoder_inputs(model, hidden, torch.arange(9).expand(2, -1))
    outputs = model.mtp(hidden, lambda depth: embed(model, token_rows(2, 9, seed=depth)), **inputs)
    from_after = 0.5 * norm_scale(norm).pow(2).mean().sqrt() * hidden / hidden.pow(2).mean(-1, keepdim=True).sqrt()
    for output, taken in zip(outputs, (family.trunk_hidden, family.recurrence), strict=True):
        expected = 0.5 * hidden if taken == "pre_norm" else from_after
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)  # every norm on the way adds its epsilon
        if not family.final_norm:
            break  # then half of a half


@torch.no_grad()
@pytest.mark.parametrize("model", [tiny_model(), gemma()], ids=["llama", "gemma"])
def test_a_norms_scale_is_what_it_multiplies_by(model: PreTrainedModel) -> None:
    norm = base_model(model).norm
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 16, dtype=torch.float64)
    torch.testing.assert_close(norm(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm_scale(norm))
    wanted = torch.randn(16, dtype=torch.float64)
    set_norm_scale(norm, wanted)
    torch.testing.assert_close(norm_scale(norm), wanted)


def test_the_layer_learns_at_once() -> None:
    """Silent is not dead: from the second batch on every weight gets a gradient."""
    model = attach(tiny_model(), MTPConfig(enable=True, enable_train=True, detach_encoder=True)).train()
    optimizer = torch.optim.SGD(model.mtp.parameters(), lr=1.0)
    ids = token_rows(2, 9)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    for name, parameter in model.mtp.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_an_unknown_start_is_named() -> None:
    with pytest.raises(UsageError, match="init='copy' is not one of carry, plain"):
        attach(tiny_model(), init="copy")  # type: ignore[arg-type]


def test_carry_needs_output_projections_it_knows() -> None:
    model = tiny_model()
    mlp = base_model(model).layers[-1].mlp
    mlp.last = mlp.down_proj
    del mlp.down_proj
    with pytest.raises(UsageError, match="no output projections"):
        attach(model)


def rows(model: MTPCarrier, count: int = 6) -> tuple[list, list]:
    ids = [token_rows(2, 14, seed=i) for i in range(count)]
    documents = [torch.tensor([[0] * 6 + [1] * 8, [0] * 10 + [-1] * 4])] * count
    hiddens = [base_model(model)(input_ids=x, use_cache=False).last_hidden_state.detach() for x in ids]
    return list(zip(ids, documents, strict=True)), hiddens


@torch.no_grad()
@pytest.mark.parametrize(
    ("order", "trunk_hidden", "recurrence"),
    [
        ("hidden_embed", "pre_norm", "pre_norm"),
        ("embed_hidden", "pre_norm", "pre_norm"),
        ("hidden_embed", "pre_norm", "post_norm"),
        ("hidden_embed", "post_norm", "post_norm"),
    ],
)
def test_the_fit_is_the_least_squares_solution(order: str, trunk_hidden: str, recurrence: str) -> None:
    family = replace(ATTACHED, concat_order=order, trunk_hidden=trunk_hidden, recurrence=recurrence)
    model = attach(tiny_model(), MTPConfig(enable=True, num_layers=2), family=family)
    layer = model.mtp.layer(1)
    g = base_model(model).norm.weight.uniform_(0.5, 2.0)
    data, hiddens = rows(model, 12)
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
    # Depth 2 is the same map, of a hidden that may come from after a norm where the first layer's comes from before.
    deeper = model.mtp.layer(2)
    before = torch.randn(3, 16, dtype=torch.float64)
    after = before * g * (prediction.pow(2).mean().sqrt() if trunk_hidden == "pre_norm" else 1)
    entering = before if trunk_hidden == "pre_norm" else after
    embedded = torch.randn(3, 16, dtype=torch.float64)
    if trunk_hidden == recurrence == "pre_norm":
        torch.testing.assert_close(deeper.combine(before, embedded), layer.combine(before, embedded))
    elif trunk_hidden == "pre_norm":
        # Up to its length, which depends on how g falls on it.
        found, wanted = deeper.hidden_norm(after), layer.hidden_norm(entering)
        torch.testing.assert_close(F.normalize(found, dim=-1), F.normalize(wanted, dim=-1), rtol=1e-5, atol=1e-6)
        assert 0.7 < float(found.norm() / wanted.norm()) < 1.4
    else:
        torch.testing.assert_close(deeper.combine(after, embedded), layer.combine(entering, embedded))
    assert torch.equal(deeper.proj.weight, layer.proj.weight)


def test_it_helps_from_the_first_step() -> None:
    """On text it was fitted to, the fitted head is nearer to the trunk than the one it started from."""
    model = attach(tiny_model(), MTPConfig(enable=True, enable_train=True)).double()
    data, hiddens = rows(model)

    @torch.no_grad()
    def error() -> float:
        total = 0.0
        for (ids, _), hidden in zip(data, hiddens, strict=True):
            out = model.mtp.layer(1).final_norm(model.mtp.layer(1).combine(hidden, embed(model, ids.roll(-1, 1))))
            total += float((out[:, :-1] - hidden[:, 1:]).pow(2).mean())
        return total

    before = error()
    fit_projection(model, data, hiddens.__getitem__)
    assert error() < 0.8 * before


def test_the_fit_of_a_head_without_a_final_norm() -> None:
    plain, normed = (
        attach(tiny_model(), MTPConfig(enable=True), family=replace(ATTACHED, final_norm=found))
        for found in (False, True)
    )
    data, hiddens = rows(plain)
    for model in (plain, normed):
        torch.nn.init.constant_(base_model(model).norm.weight, 1.5)
        fit_projection(model, data, hiddens.__getitem__)
    torch.testing.assert_close(plain.mtp.layer(1).proj.weight, 1.5 * normed.mtp.layer(1).proj.weight)


def test_text_given_to_attach_is_fitted() -> None:
    text = [token_rows(2, 14, seed=i) for i in range(6)]
    ours = attach(tiny_model(), MTPConfig(enable=True), fit_to=text)
    assert base_model(ours).training  # as it was
    theirs = attach(tiny_model(), MTPConfig(enable=True))
    hiddens = [base_model(theirs)(input_ids=x, use_cache=False).last_hidden_state.detach() for x in text]
    fit_projection(theirs, [(x, torch.zeros_like(x)) for x in text], hiddens.__getitem__)
    for (name, parameter), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
    with pytest.raises(UsageError, match="init='carry'"):
        attach(tiny_model(), init="plain", fit_to=text)


def test_nothing_to_fit_is_an_error() -> None:
    model = attach(tiny_model(), MTPConfig(enable=True)).double()
    ids = token_rows(1, 3)
    with pytest.raises(UsageError, match="two tokens"):
        fit_projection(model, [(ids, torch.tensor([[0, 1, -1]]))], lambda _: torch.zeros(1, 3, 16).double())
