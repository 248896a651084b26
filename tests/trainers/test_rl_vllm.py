"""The RL loop on vLLM: started by the configuration, updated after every step, ended with the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.engines.torch_engine import TorchEngine
from forerun.models.attach import attach
from forerun.rollout.vllm import VLLMEngine
from forerun.trainers.rl import RLTrainer
from forerun.trainers.setup import engine_config
from tests.trainers.tiny import make_tokenizer
from tests.trainers.tiny_rl import MTP, PROMPTS, ShareOfWord, settings

pytestmark = pytest.mark.oracle


def test_a_run_rolls_out_on_vllm(vllm_env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    config = settings(
        tmp_path,
        *MTP,
        "mtp.enable_rollout=true",
        "trainer.total_steps=2",
        "rollout.engine=vllm",
        f"rollout.python={vllm_env}",
        "rollout.enforce_eager=true",
        "rollout.engine_kwargs.kv_cache_memory_bytes=67108864",
    )
    tokenizer = make_tokenizer()
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    trunk = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **shape))
    model = attach(trunk, config.mtp)
    engine = TorchEngine(model, engine_config(config.engine, config.optim, config.mtp, total_steps=2))
    made = RLTrainer(config, prompts=PROMPTS, engine=engine, reward=ShareOfWord(), tokenizer=tokenizer)
    assert isinstance(made.rollout, VLLMEngine)
    made.train()
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["spec_num_draft_tokens"] > 0 and step["spec_num_accepted_tokens"] is not None
        assert step["drafter_in_sync"] == 1.0
        assert step["log_prob_gap_max"] < 1e-4
    # Sampled by the weights after the first update, which moved them.
    assert {version for sample in made.samples for version in sample.completion.weight_versions} == {1}
    assert steps[0]["grad_norm"] > 0
    with pytest.raises(Exception, match="ended"):
        made.rollout.drafter_digest()
