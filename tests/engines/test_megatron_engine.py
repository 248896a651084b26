"""Megatron-core against the torch engine: the same weights and batches give the same losses, gradients and updates.

Both compute in float32, so they agree up to its rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forerun.data.batch import Batch
from forerun.data.packing import Document
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.protocol import TrainingEngine
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.mtp.config import MTPConfig
from forerun.trainers.batching import make_rows, micro_batches
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


def megatron_engine(case: Case) -> Any:
    from forerun.engines.megatron.engine import MegatronEngine, MegatronEngineConfig
    from forerun.engines.megatron.layout import ParallelLayout
    from forerun.engines.megatron.model import build_model
    from forerun.engines.megatron.objective import MTPModel
    from forerun.engines.megatron.parallel import initialise
    from forerun.engines.megatron.weights import load_weights

    install()
    layout = ParallelLayout(**case.layout)
    initialise(layout, seed=1)
    source = model(case)
    chunks = build_model(source.config, mtp_config(case), layout, family=source.mtp_family, model_class=MTPModel)
    load_weights(chunks, named_weights(source))
    settings = MegatronEngineConfig(
        optimizer=OPTIMIZER,
        train_trunk=case.train_trunk,
        chunk_size=7,
        recompute_granularity=case.recompute,
        use_distributed_optimizer=case.distributed,
    )
    return MegatronEngine(chunks, mtp_config(case), settings)


_installed = False


def install() -> None:
    global _installed
    if not _installed:
        from tests.engines import megatron_cpu

        megatron_cpu.install()
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
