"""A training step, a policy update and speculative rollouts on a device that is not the CPU, with the CPU's results.

A tensor that is made without `device=` fails here as it would on a GPU (`tests.engines.second_device`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.engines.ranks import RankGroup
from forerun.engines.torch_engine import TorchEngine
from forerun.models.attach import attach
from forerun.models.carrier import named_weights
from forerun.models.weight_stream import Named, WeightStream
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.native.sampler import Sampler
from forerun.rollout.protocol import Completion
from forerun.speculative.drafter import Drafter
from forerun.trainers.batching import micro_batches
from forerun.trainers.policy_update import PolicyUpdate
from forerun.trainers.ranked import RankedRollout
from forerun.trainers.setup import engine_config
from forerun.trainers.sft import NextTokenLoss
from tests.engines.second_device import DEVICE, MixedDevicesError, moved, second_device
from tests.engines.test_torch_engine import engine_for, mtp_config, rows, tiny_model
from tests.rollout.tiny import carrier, engine_of, family_carrier, prompts, requests
from tests.trainers.tiny import make_model
from tests.trainers.tiny_rl import MTP, PROMPTS, settings, trainer

Figures = dict[str, float]


def test_the_second_device_refuses_what_a_gpu_refuses() -> None:
    with second_device() as waits:
        there, here = torch.ones(3, device=DEVICE), torch.ones(3)
        for mixed in (lambda: there + here, lambda: torch.cat([there, here]), lambda: here.add_(there.sum())):
            with pytest.raises(MixedDevicesError):
                mixed()
        assert not waits
        assert (there * torch.tensor(2.0)).sum().item() == 6  # a number is welcome anywhere
        assert there[torch.tensor([0, 2])].device == DEVICE  # and so is an index, for which the host waits
        assert there.cpu().tolist() == here.tolist()
    assert sum(waits.values()) == 3


def figures_and_weights(on_device: bool, loss: str, isolated: bool) -> tuple[Figures, dict[str, Tensor]]:
    model = attach(tiny_model(dtype=torch.float64), mtp_config(loss=loss, detach_encoder=isolated))
    if on_device:
        moved(model)
    engine = engine_for(model)
    assert (engine.device == DEVICE) == on_device
    batches = micro_batches(rows(), 2)
    figures = engine.forward_backward(batches, NextTokenLoss(batches)) | engine.step()
    figures |= {f"val/{name}": value for name, value in engine.evaluate(batches).items()}
    figures["log_probs"] = float(sum(log_probs.sum() for log_probs, _ in engine.log_probs(batches)))
    return figures, {name: tensor.cpu() for name, tensor in named_weights(model)}


@pytest.mark.parametrize(("loss", "isolated"), [("ce", False), ("soft_ce", True)])
def test_training(loss: str, isolated: bool) -> None:
    expected, weights = figures_and_weights(False, loss, isolated)
    with second_device():
        found, own = figures_and_weights(True, loss, isolated)
    assert found == pytest.approx(expected, rel=1e-5)
    assert own.keys() == weights.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, weights[name])


EVERYTHING = [
    "algorithm.use_kl_loss=true",
    "algorithm.use_kl_in_reward=true",
    "algorithm.loss_agg_mode=seq-mean-token-mean",
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.rollout_correction.rollout_rs=token_k1,seq_max_k2",
    "algorithm.rollout_correction.rollout_rs_threshold=0.2_5.0,4.0",
    "rollout.n=4",
]


def test_policy_update(tmp_path: Path) -> None:
    config = settings(tmp_path, *MTP, *EVERYTHING)
    made = trainer(config)
    samples = made.judge(PROMPTS, made.generate(PROMPTS))
    for sample, gap in zip(samples, itertools.cycle([0.5, 2.0]), strict=False):  # of which one is too wide
        sample.completion.raw_log_probs = [value - gap for value in sample.completion.log_probs]

    def update(on_device: bool) -> Any:
        engines = []
        for seed in (0, 1):
            model = attach(make_model(seed), config.mtp, init="plain")
            if on_device:
                moved(model)
            engines.append(TorchEngine(model, engine_config(config.engine, config.optim, config.mtp, 10)))
        return PolicyUpdate(config, *engines)(samples)

    expected = update(False)
    with second_device():
        found = update(True)
    assert expected["kl_loss"] and expected["reward_kl_penalty"] and 0 < expected["rollout_rs_masked_fraction"] < 1
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


FILTERS: dict[str, Any] = {
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "min_tokens": 6,
    "stop_token_ids": (2, 7, 11),
    "logit_bias": {3: 1.0},
}


@pytest.mark.parametrize(
    ("kind", "layers", "sampling"),
    [
        ("llama", 1, {"temperature": 0.0}),
        ("llama", 2, {"temperature": 0.9, "seed": 3}),
        ("glm4_moe", 1, {"temperature": 0.9, "seed": 3, **FILTERS}),
        ("qwen3_next", 1, {"temperature": 0.9, "seed": 3}),
    ],
)
def test_native_rollouts(kind: str, layers: int, sampling: dict[str, Any]) -> None:
    model = carrier(kind, layers=layers) if kind == "llama" else family_carrier(kind)
    asked = requests(prompts(3), max_tokens=8, **sampling)

    def generated(device: torch.device) -> list[Completion]:
        engine = engine_of(model, num_speculative_tokens=2, device=device)
        with torch.no_grad():  # not in inference mode, in which a tensor that wraps another cannot be sliced
            return NativeEngine.generate.__wrapped__(engine, asked)  # type: ignore[attr-defined]

    expected = generated(torch.device("cpu"))
    with second_device():
        found = generated(DEVICE)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.log_probs == pytest.approx(other.log_probs)
        assert one.accepted_per_depth == other.accepted_per_depth


def test_a_decoding_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host asks for a value it cannot hand out work ahead, and a GPU idles while it does."""
    waited: dict[str, list[int]] = {"draft": [], "judge": []}
    asked = requests(prompts(2), max_tokens=8, temperature=0.9, seed=3, **FILTERS)
    with second_device() as waits:

        def counted(cls: type, name: str) -> None:
            call = getattr(cls, name)

            def called(*args: Any, **kwargs: Any) -> Any:
                before = waits.total()
                result = call(*args, **kwargs)
                waited[name].append(waits.total() - before)
                return result

            monkeypatch.setattr(cls, name, called)

        counted(Drafter, "draft")
        counted(Sampler, "judge")
        engine = engine_of(carrier(), num_speculative_tokens=2, device=DEVICE)
        with torch.no_grad():
            NativeEngine.generate.__wrapped__(engine, asked)  # type: ignore[attr-defined]
    steps = len(waited["draft"])
    assert steps > 2 and set(waited["draft"]) == {0}
    assert waited["judge"][-steps:] == [1] * steps  # before them, a prompt's first token


def test_weights_that_ranks_gather_do_not_gather_on_the_device() -> None:
    model = carrier()
    engine = engine_of(model)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most: list[int] = []

    def gathered() -> Iterator[Named]:
        for name, tensor in named_weights(model):
            made = (tensor * 1.5).to(DEVICE)
            alive.add(made)
            most.append(len(alive))
            yield name, made
            del made

    with second_device():
        RankedRollout(RankGroup(), engine).update_weights(WeightStream(named_weights(model), gathered()), 1)
    assert len(most) == len(list(named_weights(model))) and max(most) == 1
    assert all(torch.equal(engine.runner.weights[name], tensor * 1.5) for name, tensor in named_weights(model))
