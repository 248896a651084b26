"""Weights arrive whole or not at all, drafter included; the digest tells."""

from __future__ import annotations

import pytest
import torch

from forerun.errors import ForerunError
from forerun.models.carrier import MTPCarrier, mtp_weight_names, named_weights
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Completion
from forerun.rollout.sync import digest
from tests.rollout import tiny


def engine_of(model: MTPCarrier, **settings: object) -> NativeEngine:
    return NativeEngine(model, products="linear", num_speculative_tokens=2, **settings)  # type: ignore[arg-type]


def run(engine: NativeEngine) -> list[Completion]:
    return engine.generate(tiny.requests(tiny.prompts(4), max_tokens=12, temperature=0))


def drafter_digest(model: MTPCarrier) -> str:
    names = set(mtp_weight_names(model).values())
    return digest((name, weight) for name, weight in named_weights(model) if name in names)


def changed(model: MTPCarrier, seed: int = 1) -> MTPCarrier:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def test_digest_sees_names_dtypes_shapes_and_values_but_not_the_order() -> None:
    a, b = ("a", torch.arange(6.0)), ("b", torch.ones(2, 2))
    base = digest([a, b])
    assert digest([b, a]) == base
    assert digest([("a", torch.arange(12.0)[::2] / 2), b]) == base  # same values in another memory layout
    for other in (
        [("c", a[1]), b],
        [("a", a[1].double()), b],
        [("a", a[1].view(2, 3)), b],
        [("a", a[1] + 1e-6), b],
        [a],
    ):
        assert digest(other) != base
    assert digest([("a", a[1].double()), b], torch.float32) == base


@pytest.mark.parametrize("kind", list(tiny.KINDS))
@pytest.mark.parametrize("tied", [True, False])
def test_an_updated_engine_equals_one_made_from_the_new_model(kind: str, tied: bool) -> None:
    model = tiny.carrier(kind, tied=tied)
    vocabulary = torch.arange(0, 61, 2)
    engine = engine_of(model, draft_vocabulary=vocabulary)
    before = run(engine)
    old_digest = engine.drafter_digest()
    assert old_digest == drafter_digest(model)
    changed(model)
    assert engine.drafter_digest() == old_digest  # its own copy
    engine.update_weights(named_weights(model), version=7)
    assert engine.drafter_digest() == drafter_digest(model) != old_digest
    fresh = engine_of(model, draft_vocabulary=vocabulary)
    after = run(engine)
    assert [c.weight_versions for c in after] == [[7] * len(c.token_ids) for c in after]
    for mine, theirs, old in zip(after, run(fresh), before, strict=True):
        assert mine.token_ids == theirs.token_ids != old.token_ids
        assert mine.accepted_per_depth == theirs.accepted_per_depth
        assert mine.raw_log_probs == theirs.raw_log_probs


def test_a_bfloat16_engine_has_the_digest_of_the_cast_weights() -> None:
    model = tiny.carrier(dtype=torch.float32)
    engine = engine_of(model, dtype=torch.bfloat16)
    names = set(mtp_weight_names(model).values())
    mtp = [(name, weight) for name, weight in named_weights(model) if name in names]
    assert engine.drafter_digest() == digest(mtp, torch.bfloat16)


def broken(model: MTPCarrier, fault: str) -> tuple[list[tuple[str, torch.Tensor]], str]:
    named = [(name, weight.clone()) for name, weight in named_weights(model)]
    mtp = set(mtp_weight_names(model).values())
    match fault:
        case "trunk only":
            return [
                (n, w) for n, w in named if n not in mtp
            ], r"drafter's \d+ weights are missing, first model\.mtp_layers"
        case "one MTP tensor missing":
            return [(n, w) for n, w in named if not n.endswith("input_proj.weight")], "input_proj.weight"
        case "one trunk tensor missing":
            return [(n, w) for n, w in named if n != "model.layers.1.mlp.up_proj.weight"], r"layers\.1\.mlp\.up_proj"
        case "unknown":
            return [*named, ("model.layers.9.x", torch.zeros(2))], r"no place in the model, first model\.layers\.9\.x"
        case "shape":
            return [*named[:-1], (named[-1][0], named[-1][1][:1])], "has shape"
        case "twice":
            return [*named, named[3]], "sent twice"
        case _:
            return [*named[:-1], (named[-1][0], named[-1][1].long())], "not a floating dtype"


@pytest.mark.parametrize(
    "fault",
    ["trunk only", "one MTP tensor missing", "one trunk tensor missing", "unknown", "shape", "twice", "integers"],
)
def test_a_faulty_update_changes_nothing(fault: str) -> None:
    model = tiny.carrier()
    engine = engine_of(model)
    before, held = run(engine), {name: weight.clone() for name, weight in engine.runner.weights.items()}
    named, message = broken(changed(model), fault)
    with pytest.raises(ForerunError, match=message):
        engine.update_weights(iter(named), version=3)
    assert engine.weight_version == 0
    assert all(torch.equal(weight, held[name]) for name, weight in engine.runner.weights.items())
    assert [c.token_ids for c in run(engine)] == [c.token_ids for c in before]


def test_a_stale_drafter_shows_in_the_digest() -> None:
    model = tiny.carrier()
    engine = engine_of(model)
    with torch.no_grad():
        model.mtp.layers[0].proj.weight[0, 0] += 1e-3
    assert engine.drafter_digest() != drafter_digest(model)


def test_sleep_frees_the_caches_and_keeps_acceptance() -> None:
    model = tiny.perfect_carrier()
    engine = engine_of(model)
    before = run(engine)
    assert engine.runner.cache is not None
    engine.sleep()
    assert engine.runner.cache is None
    with pytest.raises(ForerunError, match="wake"):
        run(engine)
    engine.update_weights(named_weights(model), version=1)  # may come while it sleeps
    engine.wake()
    after = run(engine)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    assert [c.accepted_per_depth for c in after] == [c.accepted_per_depth for c in before]
    assert all(c.accepted_per_depth == c.drafted_per_depth for c in after)
    assert set(after[0].weight_versions) == {1}
