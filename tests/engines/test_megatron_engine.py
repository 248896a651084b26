"""Megatron-core against the torch engine: the same weights and batches give the same losses, gradients and updates.

Both compute in float32, so they agree up to its rounding.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

import forerun
from forerun.checkpoint.reader import CheckpointReader
from forerun.config_algorithm import AlgorithmConfig
from forerun.data.batch import Batch
from forerun.engines.accumulation import predicted_mask
from forerun.engines.megatron.layout import ParallelLayout
from forerun.engines.megatron.version import megatron_version
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.protocol import TrainingEngine
from forerun.engines.random_state import random_state
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.errors import ForerunError, UsageError
from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.models.weight_stream import WeightStream
from forerun.mtp.config import MTPConfig
from forerun.trainers.policy_objective import PolicyObjective
from tests.engines import steps
from tests.engines.steps import MeanLoss
from tests.families.tiny import VOCAB, tiny_trunk
from tests.mtp.ranks import Ranks

assert VOCAB % 2  # so tensor parallelism pads it
STEPS = 5
LOSSES = ("loss", "mtp_loss", "mtp/depth_1/loss")
step_batches = partial(steps.step_batches, count=14, max_length=26, rows=2)
assert_close = partial(steps.assert_close, tensors=(1e-4, 2e-5), numbers=(2e-5, 1e-6))
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
    dtype: torch.dtype = torch.float32
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
    changes = {"tie_word_embeddings": case.tied, "num_hidden_layers": 4}
    made = attach(tiny_trunk(case.family, **changes), mtp_config(case), init="plain", seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    return made


def torch_engine(case: Case, carrier: MTPCarrier | None = None) -> TorchEngine:
    settings = TorchEngineConfig(optimizer=OPTIMIZER, train_trunk=case.train_trunk, chunk_size=7)
    return TorchEngine(model(case) if carrier is None else carrier, settings)


def megatron_engine(case: Case, checkpoint: CheckpointReader | None = None) -> Any:
    install()
    from forerun.engines.megatron.engine import MegatronEngine, MegatronEngineConfig
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
        chunks = build_model(checkpoint.config, mtp_config(case), layout, model_class=MTPModel, dtype=case.dtype)
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


def train(engine: TrainingEngine, gradients: Any, steps: int = STEPS) -> dict[str, Any]:
    """Everything that a run shows: metrics of every step, the first step's gradients, weights, held-out figures."""
    reports, found = [], {}
    for step in range(steps):
        batches = step_batches(step)
        metrics = engine.forward_backward(batches, MeanLoss(batches), temperature=0.9)
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


DIVIDING = [f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert")]


def rank_train(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    engine = megatron_engine(case)
    found = train(engine, None if case.distributed else megatron_gradients)
    return found | {"sent": {which: sent(getattr(engine, which)) for which in ("named_weights", "drafter_weights")}}


def sent(make: Callable[[], WeightStream]) -> dict[str, int]:
    """Bytes of what ranks gather and hear when weights are described, and when they are read; and of the weights."""
    count = 0

    def counted(call: Any) -> Any:
        def called(tensor: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += sum(each.nbytes for each in (tensor if isinstance(tensor, list) else [tensor]))
            return call(tensor, *arguments, **named)

        return called

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", counted(dist.all_gather))
        patch.setattr(dist, "broadcast", counted(dist.broadcast))
        stream = make()
        described = count
        for _ in stream:
            pass
    return {"described": described, "read": count, "bytes": sum(tensor.nbytes for _, tensor in stream.described)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, [2], tmp_path_factory.mktemp("two") / "store") as made:
        yield made


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(4, [4], tmp_path_factory.mktemp("four") / "store") as made:
        yield made


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
        whole, drafter = (found["sent"][which] for which in ("named_weights", "drafter_weights"))
        assert whole["described"] == drafter["described"] == 0
        # Twice: gathered, and told to other stages.
        assert drafter["bytes"] < whole["bytes"] / 2 and drafter["read"] <= 2 * drafter["bytes"]
        assert (whole["read"] > drafter["read"]) == any(case.layout.get(key, 1) > 1 for key in DIVIDING)
        assert_close({key: value for key, value in found.items() if key != "sent"}, alone)


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
    extra = {"place": [3]}
    whole.save(place / "checkpoint-1", extra, wait)
    extra["place"].append(4)
    end = advance(whole, range(1, 2))  # while the checkpoint is written, where nobody waits
    whole.finish_saves()
    whole.export(place / "end")
    after = train(whole, None, steps=1)
    resumed = megatron_engine(case, source)
    assert resumed.load(place / "checkpoint-1") == {"place": [3]} and resumed.global_step == 1
    again = advance(resumed, range(1, 2))
    if not wait:
        return [end, again, after]
    other = megatron_engine(replace(case, layout=layout(pp=2)), source)
    with pytest.raises(ForerunError, match=r"was written with layout=.*and this run has"):
        other.load(place / "checkpoint-1")
    rounding = megatron_engine(replace(case, dtype=torch.bfloat16), source)
    with pytest.raises(ForerunError, match=r"has .* in torch\.float32, and here it is in torch\.bfloat16: "):
        rounding.load(place / "checkpoint-1")
    strange = CheckpointReader(place / "start")
    strange.config |= {"rms_norm_eps": 0.5} if group.rank() == 1 else {}
    with pytest.raises(UsageError, match=r"this rank's model has rms_norm_eps=0\.5, rank 0's 1e-"):
        megatron_engine(case, strange)
    own = place / "checkpoint-1" / "parts" / f"{group.rank():05}.safetensors"
    tensors = load_file(own)
    before = {name: tensor.clone() for name, tensor in resumed.named_weights()}
    size = list(tensors["main.0.0.0"].shape)
    for strange, said in (
        ("exp_avg:0.0.0", rf"no exp_avg:0.0.0 of shape {re.escape(str(size))}: it belongs to another model"),
        ("step:0.0.0", r"no step:0.0.0 of shape \[\]: it belongs to another model"),
        ("exp_avg:0.9.9", r"exp_avg:0.9.9, which has no place here: it belongs to another model"),
    ):
        if group.rank() == 1:
            save_file(tensors | {strange: torch.ones(2)}, own)
        with pytest.raises(ForerunError, match=rf"00001.safetensors has {said}"):
            resumed.load(place / "checkpoint-1")
    assert all(torch.equal(tensor, before[name]) for name, tensor in resumed.named_weights())
    state = place / "checkpoint-1" / "trainer_state.json"
    group.barrier().wait()
    if group.rank() == 0:
        state.write_text(json.dumps(json.loads(state.read_text()) | {"schedule": None}))
    with pytest.raises(ForerunError, match=r"trainer_state.json has no schedule of type dict: resume from an older"):
        resumed.load(place / "checkpoint-1")
    if group.rank() == 0:
        state.write_text(json.dumps(json.loads(state.read_text()) | {"schedule": {}}))
    (place / "checkpoint-1" / "random" / f"{group.rank():05}.safetensors").unlink()
    with pytest.raises(
        ForerunError, match=rf"checkpoint-1/random/{group.rank():05}.safetensors cannot be read \(.*older"
    ):
        resumed.load(place / "checkpoint-1")
    from forerun.engines.megatron.saved_parts import write_part

    blocked = place / f"blocked-{group.rank()}"
    blocked.mkdir()
    (blocked / "parts").touch()
    with pytest.raises(ForerunError, match=rf"{blocked.name}/parts/00000.safetensors: "):
        write_part(blocked, 0, tensors, random_state())
    return [end, again, after]


@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "beside the training"])
def test_resumes_bit_by_bit_and_exports(wait: bool, tmp_path: Path) -> None:
    case = Case(distributed=True, layout=layout(tp=2, sp=True))
    model(case).save_pretrained(tmp_path / "start")
    # Processes of its own, which have divided themselves in no other way before: the group that writes beside the
    # training takes its name from its ranks.
    with Ranks(2, [2], tmp_path / "store") as ranks:
        results = ranks.run(rank_saves, [(case, tmp_path, wait)] * 2)
    for end, again, _ in results:
        assert end.keys() == again.keys()
        for name in end:
            assert torch.equal(end[name], again[name]), name
    exported = forerun.load(tmp_path / "end", mtp_config(case), dtype=torch.float32)
    weights = dict(named_weights(exported))
    assert weights.keys() == end.keys()
    for name in end:
        assert torch.equal(weights[name], end[name]), name
    # The torch engine goes on from there.
    figures = train(torch_engine(case, exported), None, steps=1)
    for _, _, after in results:
        assert_close([after["reports"][0][name] for name in LOSSES], [figures["reports"][0][name] for name in LOSSES])


def rank_exports_the_trunk(group: dist.ProcessGroup, place: Path) -> None:
    from forerun.engines.megatron.settings import MegatronEngineConfig
    from forerun.engines.megatron.start import start_engine

    install()
    sizes = ParallelLayout(**layout(tp=2))
    start_engine(place / "start", MTPConfig(), sizes, MegatronEngineConfig(optimizer=OPTIMIZER)).export(place / "end")


def test_an_export_without_the_block_declares_none(two: Ranks, tmp_path: Path) -> None:
    """A server would draft with random weights otherwise."""
    model(Case()).save_pretrained(tmp_path / "start")
    two.run(rank_exports_the_trunk, [tmp_path] * 2)
    assert not any("mtp" in name for name in load_file(tmp_path / "end" / "model.safetensors"))
    assert not isinstance(forerun.load(tmp_path / "end"), MTPCarrier)


def rank_is_refused(group: dist.ProcessGroup, place: Path) -> str:
    from forerun.engines.megatron.settings import MegatronEngineConfig
    from forerun.engines.megatron.start import start_engine

    install()
    sizes = ParallelLayout(**layout(tp=2))
    with pytest.raises(UsageError) as refused:
        start_engine(place, MTPConfig(), sizes, MegatronEngineConfig(optimizer=OPTIMIZER))
    return str(refused.value)


def test_files_of_two_models_are_refused(two: Ranks, tmp_path: Path) -> None:
    """config.json ties the LM head, and the files hold one of its own."""
    model(Case()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for said in two.run(rank_is_refused, [tmp_path] * 2):
        assert "ties the LM head to the embedding, and lm_head.weight in the files is another" in said


def rank_trains_in_bfloat16(group: dist.ProcessGroup, argument: tuple[Case, Path]) -> dict[str, Any]:
    case, place = argument
    engine = megatron_engine(case, CheckpointReader(place / "start"))
    shown = train(engine, None)
    engine.export(place / "end")
    return shown


@pytest.mark.parametrize("sizes", [{"tp": 2, "sp": True}, {"pp": 2}], ids=["TP2", "PP2"])
def test_weights_in_bfloat16(sizes: dict[str, Any], two: Ranks, tmp_path: Path) -> None:
    """They go where those in float32 go, and leave in bfloat16."""
    case = Case(depths=2, tied=True, layout=layout(**sizes))
    start = model(case)
    start.save_pretrained(tmp_path / "start")
    before = {name: tensor.clone() for name, tensor in named_weights(start)}
    exact = train(torch_engine(case, start), None)
    for found in two.run(rank_trains_in_bfloat16, [(replace(case, dtype=torch.bfloat16), tmp_path)] * 2):
        for report, expected in zip(found["reports"], exact["reports"], strict=True):
            assert [report[name] for name in LOSSES] == pytest.approx([expected[name] for name in LOSSES], rel=0.02)
        ways = {name: tensor - before[name] for name, tensor in exact["weights"].items()}
        apart = sum(float((found["weights"][name] - before[name] - way).norm()) for name, way in ways.items())
        assert apart < 0.4 * sum(float(way.norm()) for way in ways.values())
    exported = load_file(tmp_path / "end" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "end" / "config.json").read_text())["dtype"] == "bfloat16"
    assert all(torch.equal(exported[name], tensor) for name, tensor in found["weights"].items() if name in exported)


POLICY = AlgorithmConfig(adv_estimator="grpo", loss_agg_mode="seq-mean-token-mean", entropy_coeff=0.3)


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
        objective = PolicyObjective(batches, POLICY, 20)
        metrics = engine.forward_backward(batches, objective, 0.8, objective.entropy_loss_fn)
        shown.append(metrics | engine.step())
    return [*shown, {name: tensor.detach().clone() for name, tensor in engine.named_weights()}]


def rank_train_policy(group: dist.ProcessGroup, case: Case) -> list[Any]:
    return train_policy(megatron_engine(case))


@pytest.mark.parametrize("sizes", [{"cp": 2}, {"pp": 2}, {"tp": 2}, {}], ids=["CP2", "PP2", "TP2", "DP2"])
def test_a_policy_gradient_step_with_entropy_is_the_torch_engines(sizes: dict[str, int], two: Ranks) -> None:
    case = Case(isolated=True, layout=layout(**sizes))
    alone = train_policy(torch_engine(case))
    for found in two.run(rank_train_policy, [case] * 2):
        assert_close(found, alone)
