"""The torch engine over several ranks (FSDP2, gloo) trains as one process does: losses, gradients, weights, files.

Both sides are float64. The one process and every rank are handed the same micro-batches; their number is uneven.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

import forerun
from forerun.data.batch import Batch
from forerun.engines.context_parallel import gather_in_attention
from forerun.engines.data_parallel import ShardingConfig
from forerun.engines.hidden_cache import HiddenCache
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.protocol import NonFiniteError
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig, default_mtp_loss
from forerun.errors import ForerunError, UsageError
from forerun.models.attach import attach
from forerun.models.carrier import named_weights
from forerun.mtp.config import MTPConfig
from forerun.trainers.sft import NextTokenLoss
from tests.engines import steps
from tests.engines.steps import MeanLoss, step_batches
from tests.families.tiny import TRUNKS, VOCAB, tiny_trunk
from tests.float64 import with_float64_norms
from tests.mtp.ranks import Ranks

STEPS = 5
# Routers compute in float32.
assert_close = partial(steps.assert_close, tensors=(1e-6, 1e-7), numbers=(1e-6, 1e-12))


@dataclass(frozen=True)
class Case:
    """What is trained, and how it lies over ranks."""

    depths: int = 1
    tied: bool = True
    trunk: str = "dense"
    repeat: bool = False
    isolated: bool = False
    train_trunk: bool = True
    recompute: bool = False
    reshard: bool = True
    replicas: int = 1
    loss: str = "ce"
    on_nonfinite: str = "stop"
    offload: bool = False
    context: int = 1
    steps: int = STEPS
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    dtype: torch.dtype = torch.float64
    router_dtype: torch.dtype | None = None


def engine(case: Case, mesh: DeviceMesh | None = None, hidden_cache: HiddenCache | None = None) -> TorchEngine:
    # Two of five experts for each token: five do not divide evenly over ranks.
    name, changes = {
        "dense": ("attached", {"num_key_value_heads": 1}),
        "latent": ("deepseek_v3", {"n_routed_experts": 5, "n_group": 1, "experts_implementation": "eager"}),
        "hybrid": ("qwen3_next", {"num_experts": 5, "experts_implementation": "eager"}),
        "moe": ("attached_moe", {"num_experts": 5, "mlp_only_layers": [], "experts_implementation": "eager"}),
    }[case.trunk]
    model = tiny_trunk(name, tie_word_embeddings=case.tied, **changes)
    if case.dtype is torch.float64:
        with_float64_norms(model)
    mtp = MTPConfig(
        enable=True,
        enable_train=True,
        num_layers=case.depths,
        repeat_layer=case.repeat,
        detach_encoder=case.isolated,
        mtp_loss_scaling_factor=0.5,
        chunk_size=5,
        loss=case.loss,
    )
    model = attach(model.to(case.dtype), mtp, init="plain", seed=1).to(case.dtype)
    if case.router_dtype is not None:
        for name, parameter in model.named_parameters():
            if name.endswith(".mlp.gate.weight"):
                parameter.data = parameter.data.to(case.router_dtype)
    settings = TorchEngineConfig(
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5),
        train_trunk=case.train_trunk,
        chunk_size=5,
        activation_recompute=case.recompute,
        on_nonfinite=case.on_nonfinite,
        sharding=ShardingConfig(
            case.param_dtype, case.reduce_dtype, case.reshard, case.offload, case.context if mesh else 1
        ),
    )
    return TorchEngine(model, settings, hidden_cache=hidden_cache, mesh=mesh)


def mesh_of(case: Case, group: dist.ProcessGroup) -> DeviceMesh:
    ranks = torch.arange(group.size())
    if case.replicas == 1:
        return DeviceMesh.from_group(group, "cpu", mesh=ranks.tolist())
    return DeviceMesh("cpu", ranks.view(case.replicas, -1), mesh_dim_names=("replicate", "shard"))


def gradients(made: TorchEngine) -> dict[str, Tensor]:
    found = {}
    for name, parameter in made.model.named_parameters():
        if parameter.grad is not None:
            grad: Any = parameter.grad
            found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return found


def train(made: TorchEngine, steps: int, first: int = 0) -> dict[str, Any]:
    """Everything that a run shows: metrics of every step, the first step's gradients, weights, held-out figures."""
    reports, grads = [], {}
    for step in range(first, first + steps):
        batches = step_batches(step)
        # With a term of the entropies, whatever it is.
        metrics = made.forward_backward(batches, MeanLoss(batches), entropy_loss_fn=NextTokenLoss(batches))
        grads = grads or gradients(made)
        reports.append(metrics | made.step())
    held_out = step_batches(99)
    return {
        "reports": reports,
        "gradients": grads,
        "weights": {name: tensor.clone() for name, tensor in made.named_weights()},
        "drafter": [name for name, _ in made.drafter_weights()],
        "evaluation": made.evaluate(held_out),
        "log_probs": made.log_probs(held_out, temperature=0.7),
        "hidden_states": made.trunk_hidden_states(held_out[0]),
    }


def rank_train(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    return train(engine(case, mesh_of(case, group)), case.steps)


CASES = {
    "one depth, tied": (Case(), 2),
    "two depths, untied": (Case(depths=2, tied=False), 4),
    "two depths, tied, four ranks": (Case(depths=2), 4),
    "untied, soft": (Case(tied=False, loss="soft_ce"), 2),
    "repeated layer": (Case(depths=2, repeat=True), 2),
    "heads only": (Case(depths=2, isolated=True), 2),
    "frozen trunk": (Case(depths=2, train_trunk=False, isolated=True), 2),
    "recompute": (Case(depths=2, recompute=True), 2),
    "kept after forward": (Case(reshard=False), 2),
    "replicas": (Case(depths=2, replicas=2), 4),
    "experts": (Case(depths=2, trunk="moe", tied=False), 2),
    "latent attention and experts": (Case(trunk="latent", tied=False), 4),
    "experts, routers in float32": (Case(trunk="latent", tied=False, router_dtype=torch.float32, recompute=True), 2),
    "recurrent layers": (Case(trunk="hybrid", tied=False, steps=2), 2),
    "offloaded": (Case(offload=True), 2),
    "rows in two parts": (Case(depths=2, context=2, steps=2, recompute=True), 4),
    "rows in four parts, soft": (Case(depths=2, context=4, steps=2, loss="soft_ce"), 4),
    "rows in two parts, latent attention, replicas": (
        Case(trunk="latent", context=2, steps=2, tied=False, replicas=2),
        4,
    ),
    "rows in two parts, frozen trunk": (Case(context=2, steps=2, train_trunk=False, isolated=True), 4),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one_process_does(name: str, ranks: Ranks) -> None:
    case, size = CASES[name]
    alone = train(engine(case), case.steps)
    assert any(key.startswith("mtp.") for key in alone["gradients"])
    for found in ranks.run(rank_train, [case] * size):
        assert_close(found, alone)


def test_the_trunk_of_heads_only_training_is_bit_identical_over_ranks(ranks: Ranks) -> None:
    """To the same ranks' training with an MTP loss of weight zero."""
    case = Case(depths=2, isolated=True)
    (with_heads, without), _ = ranks.run(rank_trunks, [case] * 2)
    assert with_heads.keys() == without.keys() and len(with_heads) > 10
    for name in without:
        assert torch.equal(with_heads[name], without[name]), name


def rank_trunks(group: dist.ProcessGroup, case: Case) -> list[dict[str, Tensor]]:
    trunks = []
    for factor in (0.5, 0.0):
        made = engine(case, mesh_of(case, group))
        made.model.mtp_config.mtp_loss_scaling_factor = factor
        shown = train(made, 2)
        trunks.append({n: t for n, t in shown["weights"].items() if n not in shown["drafter"]})
    return trunks


def rank_saves(group: dist.ProcessGroup, argument: tuple[Case, Path, bool]) -> Any:
    """Train, with a checkpoint on the way; or go on from the one that is there."""
    case, place, resumes = argument
    made = engine(case, mesh_of(case, group))
    if not resumes:
        train(made, 2)
        made.save(place / "checkpoint", {"place": 3})
    else:
        assert made.load(place / "checkpoint") == {"place": 3}
    shown = train(made, STEPS - 2, first=2)
    made.export(place / f"model-{group.size()}")
    return shown["weights"]


@pytest.mark.parametrize("case", [Case(depths=2), Case(depths=2, trunk="moe", tied=False)], ids=["dense", "experts"])
def test_a_checkpoint_resumes_on_another_number_of_ranks(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    alone = train(engine(case), STEPS)["weights"]
    for size, resumes in ((2, False), (4, True)):
        for weights in ranks.run(rank_saves, [(case, tmp_path, resumes)] * size):
            assert_close(weights, alone)
        exported = forerun.load(tmp_path / f"model-{size}", dtype=torch.float64)
        assert_close(dict(named_weights(exported)), alone)
    resumed = engine(case)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.global_step == 2
    assert_close(train(resumed, STEPS - 2, first=2)["weights"], alone)


def rank_fails(group: dist.ProcessGroup, argument: tuple[Case, Path]) -> list[str]:
    case, blocked = argument
    made = engine(case, mesh_of(case, group))
    said = []
    batches = step_batches(0)

    def poisoned(log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = MeanLoss(batches)(log_probs, batch)
        return (loss * float("nan") if batch is not None and made.ranks.rank == 1 else loss), metrics

    try:
        made.forward_backward(batches, poisoned)
    except NonFiniteError as error:
        said.append(str(error))
    said.append(str(made.step()["skipped"]))
    for write in (lambda: made.export(blocked), lambda: made.save(blocked / "checkpoint")):
        try:
            write()
        except ForerunError as error:
            said.append(str(error))
    return said


def test_what_goes_wrong_on_one_rank_is_said_on_all(ranks: Ranks, tmp_path: Path) -> None:
    """Nobody waits for a rank that has given up."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    for said in ranks.run(rank_fails, [(Case(), blocked)] * 2):
        assert len(said) == 4 and "loss is not finite" in said[0] and said[1] == "0.0"
        assert all("cannot write" in line for line in said[2:])
    for said in ranks.run(rank_fails, [(Case(on_nonfinite="skip"), blocked)] * 2):
        assert len(said) == 3 and said[0] == "1.0"


def test_weights_are_shards_again_when_nothing_is_to_be_differentiated(ranks: Ranks) -> None:
    assert ranks.run(rank_shards, [Case()] * 2) == [True, True]


def rank_shards(group: dist.ProcessGroup, case: Case) -> bool:
    made = engine(case, mesh_of(case, group))
    made.log_probs(step_batches(0))
    return all(isinstance(parameter, DTensor) for parameter in made.model.parameters())


def test_weights_of_several_dtypes_in_one_module_are_refused(ranks: Ranks) -> None:
    assert ranks.run(rank_mixes_in_a_module, [Case()] * 2) == [True, True]


def rank_mixes_in_a_module(group: dist.ProcessGroup, case: Case) -> bool:
    model = tiny_trunk("NemotronHForCausalLM", **TRUNKS["nemotron_h"][1])
    model.model.layers[0].mixer.D.data = model.model.layers[0].mixer.D.data.double()
    with pytest.raises(UsageError, match=r"NemotronHMamba2Mixer holds weights of several dtypes.*model.dtype=float32"):
        TorchEngine(model, mesh=mesh_of(case, group))
    return True


def test_cached_hiddens_are_for_one_process(ranks: Ranks) -> None:
    assert ranks.run(rank_caches, [Case(train_trunk=False)] * 2) == [True, True]


def rank_caches(group: dist.ProcessGroup, case: Case) -> bool:
    with pytest.raises(UsageError, match="several ranks"):
        engine(case, mesh_of(case, group), HiddenCache())
    return True


def rank_offloads(group: dist.ProcessGroup, case: Case) -> set[str]:
    made = engine(case, mesh_of(case, group))
    units = [module for module in made.ranks._runner.modules() if isinstance(module, FSDPModule)]
    return {type(part.offload_policy).__name__ for unit in units for part in unit._get_fsdp_state()._fsdp_param_groups}


@pytest.mark.parametrize("offload", [False, True])
def test_every_unit_is_offloaded_or_none(offload: bool, ranks: Ranks) -> None:
    policy = "CPUOffloadPolicy" if offload else "OffloadPolicy"
    assert ranks.run(rank_offloads, [Case(depths=2, offload=offload)] * 2) == [{policy}] * 2


def mixed_by_hand(case: Case, steps: int) -> dict[str, Tensor]:
    """float32 weights; per micro-batch a copy of them in bfloat16 and its gradients, which are added up in float32."""
    master = engine(case)
    for step in range(steps):
        batches = step_batches(step)
        counts = master._depth_counts(batches)

        def of_the_step(model: Any, hidden: Tensor, batch: Batch, _: Any, **more: Any) -> Any:
            return default_mtp_loss(model, hidden, batch, counts, **more)  # noqa: B023

        for batch in batches:
            low = copy.deepcopy(master.model)
            for parameter in low.parameters():
                parameter.data, parameter.grad = parameter.data.bfloat16(), None
            alone = TorchEngine(low, master.config, of_the_step)
            alone.forward_backward([batch], MeanLoss(batches), entropy_loss_fn=NextTokenLoss(batches))
            for own, found in zip(master.model.parameters(), low.parameters(), strict=True):
                assert found.dtype == found.grad.dtype == torch.bfloat16
                own.grad = found.grad.float() if own.grad is None else own.grad + found.grad.float()
        master.step()
    return {name: tensor.clone() for name, tensor in master.named_weights()}


def rank_mixes(group: dist.ProcessGroup, case: Case) -> tuple[dict[str, Tensor], bool]:
    made = engine(case, mesh_of(case, group))
    shown = train(made, 3)
    return shown["weights"], all(p.dtype == torch.float32 for p in made.model.parameters())


@pytest.mark.parametrize(("depths", "size"), [(1, 2), (2, 4)])
def test_weights_in_bfloat16_and_sums_in_float32(depths: int, size: int, ranks: Ranks) -> None:
    """Every micro-batch rounds alike, so only the order of the float32 sums differs."""
    case = Case(depths=depths, dtype=torch.float32, tied=False, param_dtype="bfloat16", reduce_dtype="float32")
    expected = mixed_by_hand(case, 3)
    exact = train(engine(case), 3)["weights"]
    for weights, kept in ranks.run(rank_mixes, [case] * size):
        assert kept and weights.keys() == expected.keys()
        apart = {name: (weights[name] - expected[name]).norm() for name in expected}
        rounding = {name: (exact[name] - expected[name]).norm() for name in expected}
        assert sum(apart.values()) < 0.01 * sum(rounding.values()), (apart, rounding)


def test_trunks_that_mix_tokens_otherwise_are_refused_for_long_rows() -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2}
    heads = {"intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    refused: list[tuple[PreTrainedModel, str]] = [
        (MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=8)), "layers of sliding_attention"),
        (Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads)), "layers of sliding_attention"),
        (MambaForCausalLM(MambaConfig(**sizes, state_size=4)), "layers of linear_attention"),
        (BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=8, n_head=2)), "an attention function of its own"),
    ]
    for model, why in refused:
        before = model.config._attn_implementation
        with pytest.raises(UsageError, match=f"{why}, which context parallelism does not cover: set engine.context_p"):
            gather_in_attention(model, None)  # type: ignore[arg-type]
        assert model.config._attn_implementation == before


def test_a_model_that_shared_rows_is_saved_as_any_other(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(rank_exports, [(Case(context=2), tmp_path / name) for name in ["out"] * 4])
    assert "forerun" not in (tmp_path / "out" / "config.json").read_text()
    forerun.load(tmp_path / "out")


def rank_exports(group: dist.ProcessGroup, argument: tuple[Case, Path]) -> None:
    case, place = argument
    engine(case, mesh_of(case, group)).export(place)
