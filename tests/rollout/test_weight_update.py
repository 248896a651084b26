"""A weight update that arrives in parts: whole in the end, or refused with a reason, and no mixture ever generates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.models.carrier import named_weights
from forerun.rollout.native.engine import NativeEngine
from tests.rollout.tiny import carrier, prompts, requests

ROWS = prompts(4)


def made() -> NativeEngine:
    return NativeEngine(carrier(), num_speculative_tokens=1, products="linear")


def changed(engine: NativeEngine) -> dict[str, Tensor]:
    return {name: tensor.detach() * 1.25 for name, tensor in named_weights(carrier())}


def texts(engine: NativeEngine) -> list[list[int]]:
    return [c.token_ids for c in engine.generate(requests(ROWS, max_tokens=8, temperature=0.0))]


def test_parts_do_what_a_whole_update_does() -> None:
    whole, parts = made(), made()
    weights = changed(whole)
    whole.update_weights(weights.items(), 3)
    update = parts.begin_update()
    for name, tensor in weights.items():
        update.add([(name, tensor)])
    parts.end_update(3)
    assert parts.weight_version == 3 and parts.drafter_digest() == whole.drafter_digest()
    assert all(torch.equal(parts.runner.weights[name], whole.runner.weights[name]) for name in weights)
    assert texts(parts) == texts(whole)


def test_a_part_of_an_update_does_not_generate_and_a_whole_one_mends_it() -> None:
    engine = made()
    weights = changed(engine)
    first, *_ = weights
    engine.begin_update().add([(first, weights[first])])
    with pytest.raises(ForerunError, match="part of a weight update: send the update whole"):
        texts(engine)
    with pytest.raises(ForerunError, match=rf"{len(weights) - 1} weights are missing, first "):
        engine.end_update(1)
    with pytest.raises(ForerunError, match="part of a weight update"):
        texts(engine)
    assert engine.weight_version == 0
    engine.update_weights(weights.items(), 2)
    other = made()
    other.update_weights(weights.items(), 2)
    assert texts(engine) == texts(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, tensor: [(name, tensor), (name, tensor)], "was sent twice"),
        (lambda name, tensor: [("other.weight", tensor)], "other.weight has no place in the model"),
        (lambda name, tensor: [(name, tensor[..., :1])], "the model's is"),
        (lambda name, tensor: [(name, tensor.to(torch.int32))], "not a floating dtype"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message: str) -> None:  # type: ignore[no-untyped-def]
    engine = made()
    name, tensor = next(iter(changed(engine).items()))
    with pytest.raises(ForerunError, match=message) as refused:
        engine.begin_update().add(change(name, tensor))
    assert "\n" not in str(refused.value) and "after a whole one only" in str(refused.value)
    with pytest.raises(ForerunError, match="part of a weight update"):
        texts(engine)


def test_it_waits_until_nothing_runs() -> None:
    engine = made()

    def begin(completion: object) -> None:
        with pytest.raises(ForerunError, match="waits until that has ended"):
            engine.begin_update()

    engine.generate(requests(ROWS[:1], max_tokens=2, temperature=0.0), on_finish=begin)
    with pytest.raises(ForerunError, match="no weight update was begun"):
        engine.end_update(1)
