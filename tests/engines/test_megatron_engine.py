"""Megatron-core against the torch engine: the same weights and batches give the same losses, gradients and updates.

Both compute in float32, so they agree up to its rounding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import forerun
from forerun.checkpoint.reader import CheckpointReader
from forerun.config_algorithm import AlgorithmConfig
from forerun.data.batch import Batch
from forerun.data.packing import Document
from forerun.engines.megatron.version import megatron_version
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.protocol import TrainingEngine, predicted_mask
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.errors import ForerunError
from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.mtp.config import MTPConfig
from forerun.trainers.batching import make_rows, micro_batches
from forerun.trainers.policy_objective import PolicyObjective
from tests.families.tiny import tiny_trunk
from tests.mtp.ranks import Ranks

VOCAB = 61  # no multiple of 2: tensor parallelism pads it
STEPS = 5
# Adam divides by a gradient's own size: where that is rounding alone, a large epsilon keeps it out of the weights.
OPTIMIZER = OptimizerConfig(lr=1e-2, mtp_lr=5e-3, weight_decay=0.1, max_grad_norm=0.5, eps=1e-3)


@dataclass(frozen=True)
class Case:
    """What is trained, and how it lies over ranks."""

    family: str = "attached"
    depths: int = 1
    tied: bool = False
    isolated: bool = False
    train_trunk: bool = True
    loss: str = "ce"
    recompute: str | None = None
    distributed: bool = False
    layout: dict[str, Any] = field(default_factory=dict)


def mtp_config(case: Case) -> MTPConfig:
    return MTPConfig(
        enable=True,
        enable_train=True,
        num_layers=case.depths,
        detach_encoder=case.isolated,
        mtp_loss_scaling_factor=0.5,
        chunk_size=7,
        loss=case.loss,
    )


def model(case: Case) -> MTPCarrier:
    """Tiny, with norms that are not one and biases that are not zero."""
    changes = {"tie_word_embeddings": case.tied, "num_hidden_layers": 4, "vocab_size": VOCAB}
    made = attach(tiny_trunk(case.family, **changes), mtp_config(case), init="plain", seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    return made


def torch_engine(case: Case) -> TorchEngine:
    settings = TorchEngineConfig(optimizer=OPTIMIZER, train_trunk=case.train_trunk, chunk_size=7)
    return TorchEngine(model(case), settings)


def megatron_engine(case: Case, checkpoint: CheckpointReader | None = None) -> Any:
    install()
    from forerun.engines.megatron.engine import MegatronEngine, MegatronEngineConfig
    from forerun.engines.megatron.layout import ParallelLayout
    from forerun.engines.megatron.model import build_model
    from forerun.engines.megatron.objective import MTPModel
    from forerun.engines.megatron.parallel import initialise
    from forerun.engines.megatron.weights import load_weights

    layout = ParallelLayout(**case.layout)
    initialise(layout, seed=1)
    if checkpoint is None:
        source = model(case)
        chunks = build_model(source.config, mtp_config(case), layout, family=source.mtp_family, model_class=MTPModel)
        load_weights(chunks, named_weights(source))
    else:
        chunks = build_model(checkpoint.config, mtp_config(case), layout, model_class=MTPModel)
        load_weights(chunks, checkpoint)
    settings = MegatronEngineConfig(
        optimizer=OPTIMIZER,
        train_trunk=case.train_trunk,
        chunk_size=7,
        recompute_granularity=case.recompute,
        use_distributed_optimizer=case.distributed,
    )
    return MegatronEngine(chunks, mtp_config(case), settings, checkpoint)


_installed = False


def install() -> None:
    global _installed
    if not _installed:
        from tests.engines import megatron_cpu

        megatron_cpu.install()
        wanted = os.environ.get("FORERUN_TEST_MEGATRON")  # of tests/oracles/test_megatron_newest_training.py
        assert wanted in (None, "{}.{}".format(*megatron_version()))
        _installed = True


def step_batches(step: int, rows: int = 2) -> list[Batch]:
    """Packed rows of documents of 2 to 20 tokens, unlike in length; an odd number of micro-batches."""
    draw = torch.Generator().manual_seed(step)
    documents = []
    for _ in range(14):
        length = int(torch.randint(2, 21, (1,), generator=draw))
        ids = torch.randint(0, VOCAB, (length,), generator=draw).tolist()
        documents.append(Document(ids, [j >= length // 3 for j in range(length)]))
    batches = micro_batches(make_rows(documents, max_length=26, packing=True), rows)
    return batches[: len(batches) - 1 + len(batches) % 2]


class MeanLoss:
    def __init__(self, batches: list[Batch]) -> None:
        self.targets = sum(batch.num_targets for batch in batches)

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert log_probs.shape == batch.input_ids.shape
        return -log_probs.sum() / self.targets, {"least_max": -log_probs.detach().min()}


def torch_gradients(engine: TorchEngine) -> dict[str, Tensor]:
    """Under the names of weights: what stands in the weights' places is the gradients."""
    kept = [(parameter, parameter.data) for parameter in engine.model.parameters()]
    for parameter, data in kept:
        parameter.data = torch.zeros_like(data) if parameter.grad is None else parameter.grad
    found = {name: tensor.detach().clone() for name, tensor in engine.named_weights()}
    for parameter, data in kept:
        parameter.data = data
    return found


def megatron_gradients(engine: Any) -> dict[str, Tensor]:
    parameters = [parameter for chunk in engine.models for parameter in chunk.parameters()]
    kept = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        gradient = getattr(parameter, "main_grad", None)
        parameter.data.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    found = {name: tensor.clone() for name, tensor in engine.named_weights()}
    for parameter, data in zip(parameters, kept, strict=True):
        parameter.data.copy_(data)
    return found


def train(engine: TrainingEngine, gradients: Any, loss: Any = MeanLoss) -> dict[str, Any]:
    """Everything that a run shows: metrics of every step, the first step's gradients, weights, held-out figures."""
    reports, found = [], {}
    for step in range(STEPS):
        batches = step_batches(step)
        metrics = engine.forward_backward(batches, loss(batches), temperature=0.9)
        if step == 0 and gradients is not None:
            found = gradients(engine)
        reports.append(metrics | engine.step())
    held_out = step_batches(99)
    return {
        "reports": reports,
        "gradients": found,
        "weights": {name: tensor.detach().clone() for name, tensor in engine.named_weights()},
        "drafter": sorted(name for name, _ in engine.drafter_weights()),
        "evaluation": engine.evaluate(held_out),  # type: ignore[attr-defined]
        "log_probs": engine.log_probs(held_out, temperature=0.7),
    }


def rank_train(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    engine = megatron_engine(case)
    return train(engine, None if case.distributed else megatron_gradients)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, [2], tmp_path_factory.mktemp("two") / "store") as made:
        yield made


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(4, [4], tmp_path_factory.mktemp("four") / "store") as made:
        yield made


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_close(found[name], expected[name], f"{where}/{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_close(a, b, f"{where}[{i}]")
    elif isinstance(expected, Tensor):
        scale = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * scale, msg=lambda m: f"{where}: {m}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-6), where
    else:
        assert found == expected, where


def layout(**sizes: Any) -> dict[str, Any]:
    names = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert", "vp": "virtual_pipeline"}
    of = {"cp": "context_parallel_size", "sp": "sequence_parallel"}
    return {of.get(key) or f"{names[key]}_model_parallel_size": value for key, value in sizes.items()}


CASES = {
    "TP2": (Case(depths=2, layout=layout(tp=2)), 2),
    "TP2 in sequence, tied, soft": (Case(tied=True, loss="soft_ce", layout=layout(tp=2, sp=True)), 2),
    "PP2, tied": (Case(depths=2, tied=True, layout=layout(pp=2)), 2),
    "PP2, untied, heads": (Case(isolated=True, distributed=True, layout=layout(pp=2)), 2),
    "CP2": (Case(depths=2, layout=layout(cp=2)), 2),
    "CP2, total variation": (Case(loss="tv", tied=True, distributed=True, layout=layout(cp=2)), 2),
    "DP2": (Case(depths=2, tied=True), 2),
    "DP2, distributed optimizer, heads": (Case(depths=2, isolated=True, distributed=True), 2),
    "frozen trunk, TP2": (Case(train_trunk=False, isolated=True, layout=layout(tp=2)), 2),
    "EP2": (Case(family="glm4_moe", layout=layout(ep=2)), 2),
    "PP2 in two chunks each": (Case(layout=layout(pp=2, vp=2)), 2),
    "TP2 x PP2, recompute": (Case(depths=2, tied=True, recompute="full", layout=layout(tp=2, pp=2)), 4),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_the_torch_engine_does(name: str, request: pytest.FixtureRequest) -> None:
    case, size = CASES[name]
    ranks: Ranks = request.getfixturevalue({2: "two", 4: "four"}[size])
    alone = train(torch_engine(case), torch_gradients)
    if case.distributed:  # each rank has the sum of its own part of the gradients
        alone["gradients"] = {}
    for found in ranks.run(rank_train, [case] * size):
        assert_close(found, alone)


def advance(engine: TrainingEngine, steps: range) -> dict[str, Tensor]:
    for step in steps:
        batches = step_batches(step)
        engine.forward_backward(batches, MeanLoss(batches))
        engine.step()
    return {name: tensor.detach().clone() for name, tensor in engine.named_weights()}


def rank_saves(group: dist.ProcessGroup, argument: tuple[Case, Path, bool]) -> list[Any]:
    """Weights after a run with a checkpoint on the way, of one that went on from it, and what is refused."""
    case, place, wait = argument
    source = CheckpointReader(place / "start")
    whole = megatron_engine(case, source)
    advance(whole, range(1))
    whole.save(place / "checkpoint-1", {"place": 3}, wait)
    end = advance(whole, range(1, 2))  # while the checkpoint is written, where nobody waits
    whole.finish_saves()
    whole.export(place / "end")
    resumed = megatron_engine(case, source)
    assert resumed.load(place / "checkpoint-1") == {"place": 3} and resumed.global_step == 1
    again = advance(resumed, range(1, 2))
    if not wait:
        return [end, again]
    other = megatron_engine(replace(case, layout=layout(pp=2)), source)
    with pytest.raises(ForerunError, match=r"was written with layout=.*and this run has"):
        other.load(place / "checkpoint-1")
    return [end, again]


@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "beside the training"])
def test_resumes_bit_by_bit_and_exports(wait: bool, tmp_path: Path) -> None:
    case = Case(distributed=True, layout=layout(tp=2, sp=True))
    model(case).save_pretrained(tmp_path / "start")
    # Processes of its own, which have divided themselves in no other way before: the group that writes beside the
    # training takes its name from its ranks.
    with Ranks(2, [2], tmp_path / "store") as ranks:
        results = ranks.run(rank_saves, [(case, tmp_path, wait)] * 2)
    for end, again in results:
        assert end.keys() == again.keys()
        for name in end:
            assert torch.equal(end[name], again[name]), name
    exported = dict(named_weights(forerun.load(tmp_path / "end", dtype=torch.float32)))
    assert exported.keys() == end.keys()
    for name in end:
        assert torch.equal(exported[name], end[name]), name


class Surrogate:
    """GRPO's clipped objective, the mean over the step's tokens, against log-probabilities of the step before."""

    def __init__(self, batches: list[Batch]) -> None:
        algorithm = AlgorithmConfig(adv_estimator="grpo", loss_agg_mode="seq-mean-token-mean")
        self.objective = PolicyObjective(batches, algorithm, 20)
        self.batches = batches

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.objective(log_probs, batch)


def rl_batches(step: int) -> list[Batch]:
    """Step batches with what an RL step carries, the same on every rank."""
    batches = []
    for number, batch in enumerate(step_batches(step)):
        draw = torch.Generator().manual_seed(100 * step + number)
        mask = predicted_mask(batch)
        advantages = torch.randn(batch.input_ids.shape, generator=draw) * batch.loss_mask
        sampled = -(torch.rand(batch.input_ids.shape, generator=draw) * 4 + 2) * mask
        extras = {"advantages": advantages, "rollout_log_probs": sampled, "old_log_probs": sampled}
        batches.append(replace(batch, extras=extras))
    return batches


def train_policy(engine: TrainingEngine) -> list[Any]:
    shown: list[Any] = []
    for step in range(2):
        batches = rl_batches(step)
        shown.append(engine.forward_backward(batches, Surrogate(batches), temperature=0.8) | engine.step())
    return [*shown, {name: tensor.detach().clone() for name, tensor in engine.named_weights()}]


def rank_train_policy(group: dist.ProcessGroup, case: Case) -> list[Any]:
    return train_policy(megatron_engine(case))


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"pp": 2}, {"tp": 2}, {}], ids=["CP2", "PP2", "TP2", "DP2"])
def test_a_policy_gradient_step_is_the_torch_engines(sizes: dict[str, int], two: Ranks) -> None:
    case = Case(isolated=True, layout=layout(**sizes))
    alone = train_policy(torch_engine(case))
    for found in two.run(rank_train_policy, [case] * 2):
        assert_close(found, alone)
