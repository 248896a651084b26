"""The RL loop on SGLang, started by the configuration: the protocol server stands where SGLang would."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.engines.torch_engine import TorchEngine
from forerun.errors import ForerunError, UsageError
from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.models.loading import load
from forerun.mtp.config import MTPConfig
from forerun.rollout.client import Client
from forerun.rollout.sglang import engine as sglang
from forerun.rollout.sglang.engine import SGLangEngine
from forerun.rollout.sglang.launch import LaunchSettings
from forerun.rollout.sglang.transport import Broadcast
from forerun.trainers import rollout_engines
from forerun.trainers.checks import check_layout
from forerun.trainers.rl import RLTrainer
from forerun.trainers.rollout_engines import make_rollout_engine
from forerun.trainers.setup import engine_config
from tests.rollout.sglang_server import SGLangServer, serving
from tests.trainers.tiny import make_model, make_tokenizer
from tests.trainers.tiny_rl import MTP, PROMPTS, ShareOfWord, settings


def start(asked: LaunchSettings, mtp: MTPConfig | None, sessions: bool) -> tuple[str, ExitStack]:
    """A server of the protocol as the launch settings ask for it, on the checkpoint that they name."""
    model = load(asked.model_dir, dtype=getattr(torch, asked.dtype)).eval()  # "auto" would be float16
    with torch.no_grad():  # what a server starts on is replaced before it generates
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert isinstance(model, MTPCarrier) and mtp is not None
    server = SGLangServer(
        model,
        asked.model_dir,
        num_steps=mtp.speculative_num_steps,
        deterministic=asked.deterministic,
        sessions=sessions,
        end_tokens=(0,),
    )
    running = ExitStack()
    return running.enter_context(serving(server)), running


@pytest.mark.parametrize(("sessions", "deterministic"), [(True, False), (False, True)], ids=["0.5.23", "older"])
def test_a_run_rolls_out_on_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sessions: bool, deterministic: bool
) -> None:
    """A version that does not show its drafter leaves open whether that is the trainer's. Seeds are sent where they are
    heeded; elsewhere they are refused.
    """
    monkeypatch.setattr(sglang, "launch", partial(start, sessions=sessions))
    config = settings(
        tmp_path,
        *MTP,
        "mtp.enable_rollout=true",
        "trainer.total_steps=2",
        "rollout.engine=sglang",
        f"rollout.python={sys.executable}",
        f"rollout.deterministic={deterministic}".lower(),
    )
    model = attach(make_model(), config.mtp)
    engine = TorchEngine(model, engine_config(config.engine, config.optim, config.mtp, total_steps=2))
    made = RLTrainer(config, prompts=PROMPTS, engine=engine, reward=ShareOfWord(), tokenizer=make_tokenizer())
    made.train()
    assert isinstance(made.rollout, SGLangEngine) and made.rollout.facts.deterministic == deterministic
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["spec_num_draft_tokens"] > 0 and step["spec_num_accepted_tokens"] is not None
        assert step["drafter_in_sync"] == (1.0 if sessions else None)
        assert step["log_prob_gap_max"] < 1e-4
    # Sampled by the weights after the first update, which moved them.
    assert {version for sample in made.samples for version in sample.completion.weight_versions} == {1}
    assert steps[0]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("setting", "device", "started", "way"),
    [
        ("auto", "cuda x 2", False, "nccl"),
        ("auto", "cuda x 1", False, None),
        ("auto", "cpu", False, None),
        ("request", "cuda x 2", False, None),
        ("auto", "cuda x 2", True, None),
        ("nccl", "cuda x 1", True, "nccl"),
    ],
)
def test_weights_travel_as_the_run_says(
    setting: str, device: str, started: bool, way: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that has no GPU, gloo does what NCCL is asked for. A server that is started shares a GPU with us."""
    asked: list[str | None] = []

    def broadcast(client: Client, tp_size: int, backend: str) -> Broadcast:
        asked.append(backend)
        return Broadcast(client, tp_size, "gloo")

    monkeypatch.setattr(sglang, "Broadcast", broadcast)
    kind, _, gpus = device.partition(" x ")
    monkeypatch.setattr(rollout_engines, "resolve_device", lambda _: torch.device(kind))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(gpus or 0))
    model = attach(make_model(), MTPConfig(enable=True))
    model.save_pretrained(tmp_path / "model")
    with serving(SGLangServer(model, tmp_path / "model", num_steps=2)) as url:
        monkeypatch.setattr(sglang, "launch", lambda *_: (url, ExitStack()))
        place = f"rollout.python={sys.executable}" if started else f"rollout.base_url={url}"
        there = ["rollout.engine=sglang", place, f"rollout.weight_transport={setting}"]
        drafting = ["mtp.enable_rollout=true", "mtp.speculative_num_steps=2", "mtp.speculative_num_draft_tokens=3"]
        own = [f"model.path={tmp_path / 'model'}"]
        made = make_rollout_engine(settings(tmp_path, *MTP, *there, *drafting, *own), None)
        made.update_weights(named_weights(attach(make_model(seed=1), MTPConfig(enable=True))), 1)
        assert made.weight_version == 1 and asked == ([] if way is None else [way])
        made.close()


def test_a_gpu_that_is_in_the_group_twice_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL says so at the first broadcast."""

    def broadcast(*_: Any, **__: Any) -> None:
        raise torch.distributed.DistBackendError("Duplicate GPU detected :\nrank 0 and rank 1 both on one")

    model = attach(make_model(), MTPConfig(enable=True))
    model.save_pretrained(tmp_path / "model")
    with serving(SGLangServer(model, tmp_path / "model", num_steps=2)) as url:
        engine = SGLangEngine(url, transport="gloo")
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "broadcast", broadcast)
            with pytest.raises(ForerunError, match=r"Duplicate GPU .*set rollout.weight_transport=request$") as raised:
                engine.update_weights(named_weights(model), 1)
        assert "\n" not in str(raised.value)
        with pytest.raises(ForerunError, match="half of an update"):
            engine.generate([])
        engine.update_weights(named_weights(model), 2)  # in another group
        assert engine.weight_version == 2 and engine.generate([]) == []
        engine.close()


def test_nccl_is_refused_on_a_cpu(tmp_path: Path) -> None:
    there = ["rollout.engine=sglang", "rollout.base_url=http://127.0.0.1:1", "rollout.weight_transport=nccl"]
    config = settings(tmp_path, *there)
    with pytest.raises(UsageError, match=r"weight_transport=nccl is between GPUs.*set request, or auto"):
        check_layout(config, None, torch.device("cpu"))
    check_layout(config, None, torch.device("cuda"))


def test_a_server_that_drafts_otherwise_than_the_run_says_is_refused(tmp_path: Path) -> None:
    model = attach(make_model(), MTPConfig(enable=True))
    model.save_pretrained(tmp_path / "model")
    with serving(SGLangServer(model, tmp_path / "model", num_steps=2)) as url:
        there = [*MTP, "rollout.engine=sglang", f"rollout.base_url={url}"]
        drafting = [*there, "mtp.enable_rollout=true"]
        for given, mend in ((there, "enable_rollout=true and mtp.speculative_num_steps=2"), (drafting, "steps=2")):
            with pytest.raises(UsageError, match=f"drafts 2 tokens at a time.* set mtp.*{mend}"):
                make_rollout_engine(settings(tmp_path, *given), None)
        made = make_rollout_engine(settings(tmp_path, *drafting, "mtp.speculative_num_steps=2"), None)
        assert made.num_speculative_tokens == 2
        made.close()
