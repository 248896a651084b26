"""The RL loop on SGLang, started by the configuration: the protocol server stands where SGLang would."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from forerun.engines.torch_engine import TorchEngine
from forerun.errors import UsageError
from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier
from forerun.models.loading import load
from forerun.mtp.config import MTPConfig
from forerun.rollout.sglang import engine as sglang
from forerun.rollout.sglang.engine import SGLangEngine
from forerun.rollout.sglang.launch import LaunchSettings
from forerun.trainers.rl import RLTrainer
from forerun.trainers.rollout_engines import make_rollout_engine
from forerun.trainers.setup import engine_config
from tests.rollout.sglang_server import SGLangServer, serving
from tests.trainers.tiny import make_model, make_tokenizer
from tests.trainers.tiny_rl import MTP, PROMPTS, ShareOfWord, settings


def start(asked: LaunchSettings, mtp: MTPConfig | None, sessions: bool) -> tuple[str, ExitStack]:
    """A server of the protocol as the launch settings ask for it, on the checkpoint that they name."""
    model = load(asked.model_dir).eval()
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


@pytest.mark.parametrize("sessions", [True, False], ids=["0.5.23", "older"])
def test_a_run_rolls_out_on_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sessions: bool) -> None:
    """A version that does not show its drafter leaves open whether that is the trainer's."""
    monkeypatch.setattr(sglang, "launch", partial(start, sessions=sessions))
    config = settings(
        tmp_path,
        *MTP,
        "mtp.enable_rollout=true",
        "trainer.total_steps=2",
        "rollout.engine=sglang",
        f"rollout.python={sys.executable}",
    )
    model = attach(make_model(), config.mtp)
    engine = TorchEngine(model, engine_config(config.engine, config.optim, config.mtp, total_steps=2))
    made = RLTrainer(config, prompts=PROMPTS, engine=engine, reward=ShareOfWord(), tokenizer=make_tokenizer())
    assert isinstance(made.rollout, SGLangEngine)
    made.train()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["spec_num_draft_tokens"] > 0 and step["spec_num_accepted_tokens"] is not None
        assert step["drafter_in_sync"] == (1.0 if sessions else None)
        assert step["log_prob_gap_max"] < 1e-4
    # Sampled by the weights after the first update, which moved them.
    assert {version for sample in made.samples for version in sample.completion.weight_versions} == {1}
    assert steps[0]["grad_norm"] > 0


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
