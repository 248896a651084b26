"""Weights go to rollout engines as they are made: checked before the first one is, and never all of them at once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.errors import ForerunError
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.models.weight_stream import Named, WeightStream
from forerun.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams
from forerun.rollout.sglang.engine import SGLangEngine
from forerun.rollout.vllm.weights import ServedWeights
from tests.rollout import tiny
from tests.rollout.sglang_server import SGLangServer, serving


@functools.cache
def carrier() -> MTPCarrier:
    """Not to be changed."""
    return tiny.carrier()


@functools.cache
def scaled() -> dict[str, Tensor]:
    return {name: tensor * 1.25 for name, tensor in named_weights(carrier())}


def breaking(error: Exception, after: int) -> WeightStream:
    """A whole update of which weights can no longer be made on the way."""

    def made() -> Iterator[Named]:
        for number, pair in enumerate(scaled().items()):
            if number == after:
                raise error
            yield pair

    return WeightStream(scaled().items(), made())


def never() -> Iterator[Named]:
    raise AssertionError("a weight was made")
    yield


def texts(engine: RolloutEngine) -> list[list[int]]:
    asked = tiny.requests(tiny.prompts(3), max_tokens=8, temperature=0)
    return [completion.token_ids for completion in engine.generate(asked)]


@pytest.fixture(params=["native", "sglang"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RolloutEngine]:
    if request.param == "native":
        yield tiny.engine_of(carrier(), num_speculative_tokens=2)
        return
    model = copy.deepcopy(carrier())
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    with serving(SGLangServer(model, tmp_path)) as url:
        made = SGLangEngine(url, bucket_bytes=10_000, timeout_s=60)
        yield made
        made.close()


FAULTS: dict[str, Callable[[list[Named]], list[Named]]] = {
    "missing": lambda named: named[1:],
    "unknown": lambda named: [*named, ("other.weight", torch.zeros(1))],
    "another shape": lambda named: [(named[0][0], named[0][1][:1]), *named[1:]],
    "twice": lambda named: [*named, named[0]],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_update_that_does_not_fit_is_refused_before_a_weight_is_made(fault: str, engine: RolloutEngine) -> None:
    before = texts(engine)
    with pytest.raises(ForerunError, match="weight update: "):
        engine.update_weights(WeightStream(FAULTS[fault](list(scaled().items())), never()), 3)
    assert engine.weight_version == 0 and texts(engine) == before


@pytest.mark.parametrize("fault", FAULTS)
def test_so_it_is_before_anything_goes_to_vllm(fault: str, tmp_path: Path) -> None:
    carrier().save_pretrained(tmp_path)
    with pytest.raises(ForerunError, match="weight update: "):
        ServedWeights(tmp_path).plan(WeightStream(FAULTS[fault](list(scaled().items())), never()))


@pytest.mark.parametrize("error", [ForerunError("no room for it"), RuntimeError("no room for it")], ids=["own", "else"])
@pytest.mark.parametrize("after", [0, 7])
def test_after_one_that_broke_off_only_a_whole_one_helps(error: Exception, after: int, engine: RolloutEngine) -> None:
    with pytest.raises(type(error), match="no room for it"):
        engine.update_weights(breaking(error, after), 3)
    assert engine.weight_version == 0
    for _ in range(2):
        with pytest.raises(ForerunError, match=r"a part of a weight update|half of an update"):
            texts(engine)
    engine.update_weights(WeightStream.of(scaled().items()), 4)
    other = tiny.engine_of(carrier(), num_speculative_tokens=2)
    other.update_weights(scaled().items(), 4)
    assert texts(engine) == texts(other) and engine.weight_version == 4
    assert engine.drafter_digest() == other.drafter_digest()


def test_texts_do_not_go_on_with_a_part_of_an_update() -> None:
    engine = tiny.engine_of(carrier(), num_speculative_tokens=2)

    def update(_: Completion) -> None:
        with pytest.raises(RuntimeError):
            engine.update_weights(breaking(RuntimeError(), 7), 3)

    asked = [Request(str(size), [3], SamplingParams(max_tokens=size)) for size in (2, 40)]
    with pytest.raises(ForerunError, match="a part of a weight update"):
        engine.generate(asked, on_finish=update)


def test_a_trainer_gives_the_drafter_last() -> None:
    """Buffers of the trunk, too, come before it: a drafter that came first would wait in memory for the trunk."""
    model = tiny.family_carrier("glm4_moe")
    engine = TorchEngine(model, TorchEngineConfig())
    names, drafter = ([name for name, _ in found] for found in (engine.named_weights(), engine.drafter_weights()))
    assert names[-len(drafter) :] == drafter and sorted(names) == sorted(dict(named_weights(model)))
    assert names != [name for name, _ in named_weights(model)]


@pytest.mark.parametrize(
    "made",
    [
        [("a", torch.zeros(2))],
        [("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(1))],
        [("a", torch.zeros(2)), ("b", torch.zeros(4))],
        [("a", torch.zeros(2)), ("b", torch.zeros(3).bfloat16())],
        [("b", torch.zeros(3)), ("a", torch.zeros(2))],
    ],
    ids=["too few", "too many", "another shape", "another dtype", "another order"],
)
def test_what_comes_is_what_was_described(made: list[Named]) -> None:
    with pytest.raises(ForerunError, match="were to come as"):
        list(WeightStream([("a", torch.zeros(2)), ("b", torch.zeros(3))], made))
