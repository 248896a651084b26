"""Whole SFT and RL runs with engine.strategy=megatron on two ranks of a pipeline are those of the torch engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import forerun
from forerun.config import RLConfig, SFTConfig
from forerun.config_file import load_config
from forerun.data.packing import Document
from forerun.errors import ForerunError, UsageError
from forerun.models.attach import attach
from forerun.models.carrier import named_weights
from forerun.mtp.config import MTPConfig
from forerun.trainers.asynchronous.trainer import AsyncRLTrainer
from forerun.trainers.checks import check_ranks
from forerun.trainers.rl import RLTrainer
from forerun.trainers.sft import SFTTrainer
from tests.mtp.ranks import Ranks
from tests.trainers.tiny import WORDS, make_model, make_tokenizer
from tests.trainers.tiny_rl import PROMPTS, ShareOfWord

MEGATRON = ("engine.strategy=megatron", "engine.megatron.pipeline_model_parallel_size=2")
SHOWN = ("loss", "mtp/depth_1/loss", "grad_norm", "mtp_grad_norm", "lr", "entropy", "reward_mean", "drafter_in_sync")


def sft(place: Path, run: str, *more: str) -> SFTConfig:
    return load_config(
        SFTConfig,
        None,
        [
            f"model.path={place / 'start'}",
            "data.train_files=[given]",
            "data.max_length=32",
            f"trainer={{output_dir: {place / run}, logger: [jsonl], total_steps: 3, save_freq: 2, seed: 3}}",
            "mtp={enable: true, enable_train: true}",
            "optim={lr: 1e-3, warmup_steps: 2, lr_scheduler_type: linear}",
            "train_batch_size=4",
            "micro_batch_size=2",
            *more,
        ],
    )


def rl(place: Path, run: str, *more: str) -> RLConfig:
    return load_config(
        RLConfig,
        None,
        [
            f"model.path={place / 'start'}",
            "data.train_files=[given]",
            f"trainer={{output_dir: {place / run}, logger: [jsonl], total_steps: 2, on_alarm: stop}}",
            "mtp={enable: true, enable_train: true, enable_rollout: true}",
            "rollout={n: 4, max_response_length: 6, max_prompt_length: 16, deterministic: true, temperature: 0.8}",
            "algorithm.use_kl_loss=true",
            "train_batch_size=4",
            "ppo_mini_batch_size=4",
            "optim.lr=1e-3",
            *more,
        ],
    )


def documents() -> list[Document]:
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(4, 24, (12,), generator=draw).tolist()
    ids = [torch.randint(0, len(WORDS), (size,), generator=draw).tolist() for size in sizes]
    return [Document(tokens, [j > 1 for j in range(len(tokens))]) for tokens in ids]


def run_sft(config: SFTConfig, mesh: DeviceMesh | None = None) -> dict[str, float]:
    return SFTTrainer(
        config, documents=documents(), eval_documents={"val": documents()[:4]}, tokenizer=make_tokenizer(), mesh=mesh
    ).train()


def run_rl(config: RLConfig, mesh: DeviceMesh | None = None) -> dict[str, float | None]:
    trainer = RLTrainer(config, prompts=PROMPTS, reward=ShareOfWord(), tokenizer=make_tokenizer(), mesh=mesh)
    return trainer.train()


def run_asynchronous_rl(config: RLConfig, mesh: DeviceMesh) -> None:
    AsyncRLTrainer(config, prompts=PROMPTS, reward=ShareOfWord(), tokenizer=make_tokenizer(), mesh=mesh).train()


def lines(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in SHOWN if name in line} for line in found]


def rank_runs(group: dist.ProcessGroup, place: Path) -> None:
    """Both runs on this rank; what is stood in for is CUDA, as in tests/engines/megatron_cpu.py."""
    from forerun.trainers import checks
    from tests.engines.test_megatron_engine import install

    install()
    checks.resolve_device = lambda _: torch.device("cuda")  # type: ignore[assignment]
    rotary: Any = forerun.load(place / "start").get_submodule("model.rotary_emb")
    assert rotary.inv_freq[0] == 1  # which no file holds
    mesh = DeviceMesh.from_group(group, "cpu", mesh=[0, 1])
    run_sft(sft(place, "sft-megatron", *MEGATRON), mesh)
    shorter = sft(place, "sft-stopped", *MEGATRON, "trainer.total_steps=2", "trainer.save_freq=1")
    shorter.optim.lr_scheduler_type = "constant"
    run_sft(shorter, mesh)
    if group.rank() == 0:
        (place / "sft-stopped" / "checkpoint-2" / "seen").touch()
    shorter.trainer.total_steps = 3  # goes on from the checkpoint
    run_sft(shorter, mesh)
    run_rl(rl(place, "rl-megatron", *MEGATRON, "ppo_max_token_len_per_gpu=40"), mesh)
    turns = "async_training={enable: true, max_staleness: 0, partial_rollout: false}"
    run_asynchronous_rl(rl(place, "rl-asynchronous", *MEGATRON, turns), mesh)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("runs")
    model = make_model()
    # The input embedding of a padding token gets no gradient in transformers, and one in megatron-core.
    model.config.pad_token_id = model.get_input_embeddings().padding_idx = None
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.02)
    attach(model, MTPConfig(enable=True), init="plain").save_pretrained(place / "start")
    make_tokenizer().save_pretrained(place / "start")
    with Ranks(2, [2], place / "store") as ranks:
        ranks.run(rank_runs, [place] * 2)
    yield place


def test_an_sft_run_is_the_torch_engines(place: Path) -> None:
    run_sft(sft(place, "sft-torch"))
    expected, found = lines(place / "sft-torch"), lines(place / "sft-megatron")
    assert len(expected) == len(found) == 4 and "mtp_grad_norm" in expected[-1]
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-3)
    weights = [
        dict(named_weights(forerun.load(place / run / "model", dtype=torch.float32)))
        for run in ("sft-torch", "sft-megatron")
    ]
    assert weights[0].keys() == weights[1].keys()
    moved = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    assert moved < 5e-4  # Adam makes a step of its own where a gradient is rounding alone; three steps of 1e-3


def test_a_run_goes_on_from_its_checkpoint(place: Path) -> None:
    run = place / "sft-stopped"
    assert (run / "checkpoint-3").is_dir() and len(lines(run)) == 4
    assert (run / "checkpoint-2" / "seen").exists()  # a run that started anew would have written it again


def test_an_rl_run_is_the_torch_engines(place: Path) -> None:
    """The same responses are drawn, and the drafter that the rollouts use is the one that is trained."""
    run_rl(rl(place, "rl-torch"))
    expected = lines(place / "rl-torch")
    for run in ("rl-megatron", "rl-asynchronous"):
        found = lines(place / run)
        assert len(expected) == len(found) == 2 and found[-1]["drafter_in_sync"] == 1.0
        for a, b in zip(found, expected, strict=True):
            assert a == pytest.approx(b, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        (MEGATRON[1:], None, "engine.megatron is of engine.strategy=megatron"),
        ([*MEGATRON, "engine.fsdp_size=2"], None, "engine.fsdp_size is of engine.strategy=torch"),
        ([*MEGATRON, "engine.megatron.sequence_parallel=true"], None, "sequence_parallel"),
        ([*MEGATRON], 2, "computes on CUDA devices only"),
    ],
)
def test_what_a_configuration_cannot_ask_for(settings: list[str], ranks: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_ranks(sft(Path("nowhere"), "run", *settings), ranks)


def on_a_gpu(config: SFTConfig, num_ranks: int) -> None:
    from forerun.trainers.megatron_setup import check_megatron

    check_megatron(config, num_ranks, torch.device("cuda"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["freeze_trunk=true"], "frozen trunk sends no gradient"),
        (["mtp.loss=soft_ce", "mtp.loss_top_k=3"], "mtp.loss_top_k needs the whole vocabulary"),
        (["engine.megatron.tensor_model_parallel_size=2"], "2 ranks cannot be divided"),
    ],
)
def test_what_the_engine_cannot_train(settings: list[str], message: str) -> None:
    on_a_gpu(sft(Path("nowhere"), "run", *MEGATRON), 2)
    with pytest.raises(ForerunError, match=message):
        on_a_gpu(sft(Path("nowhere"), "run", *MEGATRON, *settings), 2)
