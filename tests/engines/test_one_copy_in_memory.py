"""Over ranks a model is in one host's memory once: rank 0 reads it and hands shards out, and writes it shard by shard.

See tests/engines/test_sharded.py for what is trained.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import forerun
import forerun.checkpoint.shards
from forerun.config import ModelConfig
from forerun.engines.data_parallel import ShardingConfig, whole
from forerun.engines.handing_out import agree_on_weights, hand_out
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.ranks import RankGroup
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.errors import ForerunError, UsageError
from forerun.models.attach import attach
from forerun.models.carrier import named_weights
from forerun.mtp.config import MTPConfig
from forerun.trainers.setup import load_model
from tests.engines.test_sharded import VOCAB, Case, engine, mesh_of, train
from tests.families.handmade import read
from tests.families.test_round_trip import same
from tests.families.tiny import TRUNKS, tiny_trunk
from tests.mtp.ranks import Ranks
from tests.planner.live import LiveBytes

JOINT = MTPConfig(enable=True, enable_train=True, mtp_loss_scaling_factor=0.5, chunk_size=5)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@dataclass(frozen=True)
class Load:
    """What is loaded, and how it lies over ranks."""

    path: Path = Path()
    mtp: MTPConfig = field(default_factory=lambda: JOINT)
    dtype: str = "float32"
    override: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1
    context: int = 1
    offload: bool = False

    def model(self, ranks: RankGroup | None) -> PreTrainedModel:
        config = ModelConfig(str(self.path), self.dtype, trust_remote_code=True, override_config=self.override)
        return load_model(config, self.mtp, torch.device("cpu"), seed=3, ranks=ranks)

    def engine(self, model: PreTrainedModel, group: dist.ProcessGroup) -> TorchEngine:
        sharding = ShardingConfig(context_parallel_size=self.context, cpu_offload=self.offload)
        optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
        settings = TorchEngineConfig(optimizer, chunk_size=5, sharding=sharding)
        return TorchEngine(model, settings, mesh=mesh_of(Case(replicas=self.replicas), group))


def llama(path: Path, tied: bool, depths: int, **more: Any) -> Path:
    """A checkpoint with settings of its own for generation; without a block where `depths` is 0."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    config = LlamaConfig(vocab_size=VOCAB, **sizes, **heads, tie_word_embeddings=tied, initializer_range=0.4, **more)
    model: PreTrainedModel = LlamaForCausalLM(config)
    if depths:
        model = attach(model, MTPConfig(enable=True, num_layers=depths), init="plain", seed=1)
    model.save_pretrained(path)
    GenerationConfig(eos_token_id=[3, 4], temperature=0.25, do_sample=True).save_pretrained(path)
    return path


CONFIGURATION = """
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "of_its_own"
"""
MODEL = """
import torch
from transformers import LlamaForCausalLM, initialization
from .configuration import OwnConfig
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("steps", torch.arange(5.0) / 7, persistent=False)
    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self:
            initialization.copy_(self.steps, torch.arange(5.0) / 7)
"""


def with_code(path: Path) -> Path:
    """A checkpoint that brings its model's code."""
    llama(path, False, 0)
    (path / "configuration.py").write_text(CONFIGURATION)
    (path / "model.py").write_text(MODEL)
    config = json.loads((path / "config.json").read_text()) | {"model_type": "of_its_own"}
    config["architectures"] = ["OwnForCausalLM"]
    config["auto_map"] = {"AutoConfig": "configuration.OwnConfig", "AutoModelForCausalLM": "model.OwnForCausalLM"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def family(path: Path, name: str) -> Path:
    attach(tiny_trunk(name), MTPConfig(enable=True), init="plain", seed=1).save_pretrained(path)
    return path


def everything(made: TorchEngine) -> dict[str, Tensor]:
    """Weights and all buffers, whole."""
    tensors = (*made.model.named_parameters(remove_duplicate=False), *made.model.named_buffers())
    return {name: whole(tensor.detach()).clone() for name, tensor in tensors}


def rank_loads(group: dist.ProcessGroup, case: Load) -> list[Any]:
    """Once as rank 0 hands it out, once read on every rank: what there is at the start, and after five steps."""
    shown = []
    for members in (RankGroup(mesh_of(Case(replicas=case.replicas), group)), None):
        torch.manual_seed(5)
        model = case.model(members)
        empty = {tensor.is_meta for tensor in (*model.parameters(), *model.buffers())}
        assert empty == {members is not None and members.rank > 0}
        made = case.engine(model, group)
        held = sum(not isinstance(p, DTensor) for p in model.parameters())
        start = everything(made)
        settings = [model.config.to_dict(), model.generation_config.to_dict(), model.training, torch.rand(1).item()]
        shown.append((held, start, settings, train(made, 5)))
    return shown


CASES: dict[str, tuple[Any, Load, int]] = {
    "one depth, tied": (lambda p: llama(p, True, 1), Load(), 2),
    "two depths, untied, replicas": (lambda p: llama(p, False, 2), Load(replicas=2), 4),
    "a new head, tied": (lambda p: llama(p, True, 0), Load(mtp=replace(JOINT, num_layers=2)), 2),
    "no head": (lambda p: llama(p, False, 1), Load(mtp=MTPConfig()), 2),
    "scaled positions, set for the run": (
        lambda p: llama(p, True, 1),
        Load(override={"rope_scaling": YARN, "max_position_embeddings": 128}),
        2,
    ),
    "experts": (lambda p: family(p, "deepseek_v3"), Load(), 2),
    "experts, routers in float32": (lambda p: family(p, "glm4_moe"), Load(dtype="bfloat16"), 2),
    "code of its own": (with_code, Load(), 2),
    "rows in two parts, offloaded": (lambda p: llama(p, False, 1), Load(context=2, offload=True), 4),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_model_that_every_rank_would_have_read(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """To the bit, at the start and after five steps; and the same settings and random numbers."""
    write, case, size = CASES[name]
    case = replace(case, path=write(tmp_path / "model"))
    for rank, (handed_out, read_by_all) in enumerate(ranks.run(rank_loads, [case] * size)):
        assert handed_out[0] == 0
        for found, expected in zip(handed_out[1:], read_by_all[1:], strict=True):
            assert_same(found, expected, f"rank {rank}")
        assert handed_out[2][1]["eos_token_id"] == (
            {"experts": 1, "experts, routers in float32": None}.get(name, [3, 4])
        )
        if "code" in name:
            assert torch.equal(handed_out[1]["steps"], torch.arange(5.0) / 7)
        if "scaled" in name:
            assert handed_out[2][0]["rope_parameters"]["factor"] == 4.0


def assert_same(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_same(found[name], expected[name], f"{where}/{name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for place, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{where}[{place}]")
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    else:
        assert found == expected, where


def rank_gets_all(group: dist.ProcessGroup, case: Load) -> list[dict[str, Tensor]]:
    """The whole model on every rank, as rollouts want it: from rank 0, and read here."""
    members = RankGroup(mesh_of(Case(), group))
    found = case.model(None) if members.rank == 0 else forerun.load(case.path, case.mtp, meta=True)  # in float32
    assert agree_on_weights(found, members)
    hand_out([*found.parameters(), *found.buffers()], members, torch.device("cpu"))
    return [{n: t.detach() for n, t in (*m.named_parameters(), *m.named_buffers())} for m in (found, case.model(None))]


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "attached_gemma"])
def test_every_dtype_is_rank_0_s(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Some families keep routers, corrections or decays in float32."""
    path = family(tmp_path, name)
    for found, expected in ranks.run(rank_gets_all, [Load(path, dtype="bfloat16")] * 2):
        assert_same(found, expected, name)
        assert len({tensor.dtype for tensor in expected.values()}) > 1


def rank_hears_of_a_section(group: dist.ProcessGroup, path: Path) -> str:
    """Of a config.json with sections: how weights are stored and who wrote the file is no difference, the rest is."""
    members = RankGroup(mesh_of(Case(), group))
    model: Any = forerun.load(path, dtype=torch.float32 if members.rank else torch.bfloat16, meta=members.rank > 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.configuration_utils.__version__", f"5.0.{members.rank}")
        assert agree_on_weights(model, members)
    model.config.text_config.rms_norm_eps = 0.5 if members.rank else 0.25
    with pytest.raises(UsageError) as refused:
        agree_on_weights(model, members)
    return str(refused.value)


def test_sections_are_compared_setting_by_setting(ranks: Ranks, tmp_path: Path) -> None:
    path = family(tmp_path, "qwen3_5")
    for said in ranks.run(rank_hears_of_a_section, [path] * 2):
        assert "this rank's model has text_config.rms_norm_eps=0.5, rank 0's 0.25: give every rank the same" in said


def rank_measures(group: dist.ProcessGroup, case: Load) -> list[dict[str, int]]:
    """Most bytes alive while the model is loaded and cut, handed out and read by all; and what this rank keeps."""
    shown = []
    for members in (RankGroup(mesh_of(Case(), group)), None):
        with LiveBytes(torch.nn.Module()) as live:
            model = case.model(members)
            made = case.engine(model, group)
        kept = sum(parameter.to_local().nbytes for parameter in made.model.parameters())
        shown.append({"peak": max(live.peaks.values()), "kept": kept})
    return shown


def test_one_rank_alone_ever_holds_the_whole_model(ranks: Ranks, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = attach(LlamaForCausalLM(config), MTPConfig(enable=True), init="plain")
    model.save_pretrained(tmp_path)
    everything = sum(parameter.nbytes for parameter in model.parameters())
    layer = sum(parameter.nbytes for parameter in model.mtp.parameters())
    unit = max(layer, sum(p.nbytes for n, p in model.named_parameters() if "layers" not in n))
    for rank, (handed_out, read_by_all) in enumerate(ranks.run(rank_measures, [Load(tmp_path)] * 4)):
        assert read_by_all["peak"] >= everything
        if rank == 0:
            assert handed_out["peak"] >= everything
        else:  # its own shards, one unit whole (and its shards while they are cut), buffers
            assert handed_out["peak"] <= handed_out["kept"] + 1.3 * unit < 0.6 * everything, (rank, handed_out, unit)


def rank_refuses(group: dist.ProcessGroup, argument: tuple[str, Path]) -> str:
    """What goes wrong on one rank, as this one hears of it; and all can go on."""
    how, path = argument
    members = RankGroup(mesh_of(Case(), group))
    case = Load(path)
    try:
        if how == "no weights anywhere":
            case.engine(forerun.load(path, JOINT, meta=True), group)
        elif how == "another model":
            model: Any = forerun.load(path, JOINT, meta=members.rank > 0)
            if members.rank == 1:
                del model.model.layers[1]
            case.engine(model, group)
        elif how.startswith("another setting"):
            other = {"rms_norm_eps": 0.5} if members.rank == 1 else None
            meta = members.rank > 0 and "read by all" not in how
            case.engine(forerun.load(path, JOINT, meta=meta, override_config=other), group)
        elif how == "no such device":
            load_model(ModelConfig(str(path)), JOINT, torch.device("cuda:99"), ranks=members)
        else:
            case.engine(case.model(members), group)
    except Exception as error:
        assert members.agree("together") == "together"
        return f"{getattr(error, 'exit_code', '')} {error}"
    return ""


SETTING = "this rank's model has rms_norm_eps=0.5, rank 0's 1e-06: give every rank the same config.json"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a weight is missing", "lacks 1 of the trunk's weights, first model.layers.1.mlp.up_proj.weight"),
        ("an MTP weight is missing", "has no tensor model.mtp_layers.0.mlp.up_proj.weight"),
        ("no checkpoint", "has no config.json"),
        ("no weights anywhere", "the model has no weights: load it without meta=true"),
        ("another model", "this rank's model is not rank 0's, first at model.layers.1."),
        ("another setting", SETTING),
        ("another setting, read by all", SETTING),
    ],
)
def test_what_is_wrong_is_one_line_on_every_rank(how: str, message: str, ranks: Ranks, tmp_path: Path) -> None:
    path = llama(tmp_path / "model", True, 1)
    weights = path / "model.safetensors"
    lost = {"a weight is missing": "model.layers.1.mlp.up_proj.weight"}
    lost["an MTP weight is missing"] = "model.mtp_layers.0.mlp.up_proj.weight"
    if how in lost:
        save_file({n: t for n, t in load_file(weights).items() if n != lost[how]}, weights, {"format": "pt"})
    if how == "no checkpoint":
        (path / "config.json").unlink()
    for said in ranks.run(rank_refuses, [(how, path)] * 2):
        assert message in said and said.startswith("2 ") and "\n" not in said


def test_a_device_that_takes_no_weights_is_said_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """As one without room for them."""
    path = llama(tmp_path / "model", True, 1)
    first, second = ranks.run(rank_refuses, [("no such device", path)] * 2)
    assert first and second == f"1 rank 0: {' '.join(first.split())}"


def test_a_process_of_its_own_needs_the_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the model has no weights: load it without meta=true"):
        TorchEngine(forerun.load(llama(tmp_path, True, 1), meta=True))


@dataclass(frozen=True)
class Export:
    """An engine's export to `place`; where `fails`, the disk is full in the middle of it."""

    case: Case
    place: Path
    fails: bool = False


def rank_exports(group: dist.ProcessGroup, export: Export) -> str:
    made = engine(export.case, mesh_of(export.case, group))
    save_file, written = forerun.checkpoint.shards.save_file, []

    def full(*arguments: Any) -> None:
        written.append(arguments)
        if len(written) == 2:
            raise SafetensorError("No space left on device")
        save_file(*arguments)

    if export.fails:
        forerun.checkpoint.shards.save_file = full
    try:
        made.export(export.place, shard_bytes=1500)
    except ForerunError as error:
        assert made.ranks.agree("together") == "together"
        return str(error)
    finally:
        forerun.checkpoint.shards.save_file = save_file
    return ""


EXPORTS = {
    "two depths, tied, replicas": (Case(depths=2, replicas=2), 4),
    "untied, rows in two parts": (Case(tied=False, context=2), 4),
    "experts": (Case(depths=2, trunk="moe", tied=False), 4),
    "latent attention and experts": (Case(trunk="latent", tied=False), 2),
    "repeated layer, offloaded": (Case(depths=2, repeat=True, offload=True), 2),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_in_many_files_is_what_one_process_saves(name: str, ranks: Ranks, tmp_path: Path) -> None:
    case, size = EXPORTS[name]
    alone = engine(case)
    alone.model.save_pretrained(tmp_path / "whole", max_shard_size=1500)
    assert set(ranks.run(rank_exports, [Export(case, tmp_path / "parts")] * size)) == {""}
    alone.export(tmp_path / "alone", shard_bytes=1500)
    expected = read(tmp_path / "whole")
    for place in ("parts", "alone"):
        assert same(read(tmp_path / place), expected)
        assert len(list((tmp_path / place).glob("*-of-*.safetensors"))) > 5
        assert (tmp_path / place / "config.json").read_text() == (tmp_path / "whole" / "config.json").read_text()
        index = json.loads((tmp_path / place / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
    loaded = forerun.load(tmp_path / "parts", dtype=torch.float64)
    found, trained = (dict(named) for named in (named_weights(loaded), alone.named_weights()))
    assert found.keys() == trained.keys()
    assert all(torch.equal(tensor.double(), trained[n]) for n, tensor in found.items())


def test_an_export_that_fails_is_said_on_all_ranks_and_loses_nothing(ranks: Ranks, tmp_path: Path) -> None:
    place = tmp_path / "model"
    engine(Case()).export(place)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    first, second = ranks.run(rank_exports, [Export(Case(depths=2), place, fails=True)] * 2)
    assert "No space left on device" in first and second == f"rank 0: {first}" and "\n" not in first
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == kept


@pytest.mark.parametrize("name", TRUNKS)
def test_without_weights_every_family_is_the_model_that_is_read(name: str, tmp_path: Path) -> None:
    path = family(tmp_path / "model", name)
    for mtp in (MTPConfig(enable=True), MTPConfig()):
        model, empty = forerun.load(path, mtp), forerun.load(path, mtp, meta=True)
        held, none = ({n: t.shape for n, t in (*m.named_parameters(), *m.named_buffers())} for m in (model, empty))
        assert held == none and all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert empty.config.to_dict() == model.config.to_dict() and not empty.training
        assert [base.__name__ for base in type(empty).__mro__] == [base.__name__ for base in type(model).__mro__]
        for attribute in ("mtp_layout", "mtp_source", "mtp_family", "mtp_config"):
            assert getattr(empty, attribute, None) == getattr(model, attribute, None)
