"""The RL loop on vLLM: started by the configuration, updated after every step, ended with the run."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from forerun.families import GLM4_MOE
from forerun.launch.command import run
from forerun.models.attach import attach
from forerun.models.serving import export
from forerun.mtp.config import MTPConfig
from forerun.rollout.sync import digest
from forerun.rollout.vllm import LaunchSettings, VLLMEngine
from forerun.rollout.vllm.environment import INSIDE
from forerun.trainers.rl import RLTrainer
from tests.oracles.exchange import HERE
from tests.oracles.served_models import trunk_of
from tests.trainers.tiny import make_tokenizer
from tests.trainers.tiny_rl import MTP, PROMPTS, ShareOfWord, settings

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.oracle


def on_vllm(python: Path) -> list[str]:
    return [
        "mtp.enable_rollout=true",
        "trainer.total_steps=2",
        "rollout.engine=vllm",
        f"rollout.python={python}",
        "rollout.enforce_eager=true",
        "rollout.engine_kwargs.kv_cache_memory_bytes=67108864",
    ]


def make_model(mtp: MTPConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = make_tokenizer()
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    trunk = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **shape))
    return attach(trunk, mtp), tokenizer


def drafted_steps(run: Path) -> list[dict[str, Any]]:
    """The metrics of two steps, whose rollouts drafted with the trainer's block."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["spec_num_draft_tokens"] > 0 and step["spec_num_accepted_tokens"] is not None
        assert step["drafter_in_sync"] == 1.0
    return steps


def test_a_run_rolls_out_on_vllm(vllm_env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started on links to the run's own files, under a config.json of its own."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    model, tokenizer = make_model(MTPConfig(enable=True))
    model.save_pretrained(tmp_path / "attached")
    export(tmp_path / "attached", tmp_path / "model")
    own = [f"model.path={tmp_path / 'model'}", "model.override_config.max_position_embeddings=48"]
    config = settings(tmp_path, *MTP, *on_vllm(vllm_env), *own)
    launch, seen = VLLMEngine.launch, []

    def look(path: Path, *arguments: Any) -> VLLMEngine:
        links = [file.is_symlink() for file in path.glob("*.safetensors")]
        seen.append((path, links, json.loads((path / "config.json").read_text())["max_position_embeddings"]))
        return launch(path, *arguments)

    monkeypatch.setattr(VLLMEngine, "launch", look)
    made = RLTrainer(config, prompts=PROMPTS, reward=ShareOfWord(), tokenizer=tokenizer)
    assert isinstance(made.rollout, VLLMEngine)
    assert [(links, context, path.exists()) for path, links, context in seen] == [([True], 48, False)]
    made.train()
    steps = drafted_steps(tmp_path / "run")
    assert all(step["log_prob_gap_max"] < 1e-4 for step in steps)
    # Sampled by the weights after the first update, which moved them.
    assert {version for sample in made.samples for version in sample.completion.weight_versions} == {1}
    assert steps[0]["grad_norm"] > 0
    with pytest.raises(Exception, match="ended"):
        made.rollout.drafter_digest()


def shared_memory(group: int) -> set[Path]:
    """What the processes of a group have in /dev/shm."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(maps.parent.name)) == group:
                found |= {
                    Path(line.split(maxsplit=5)[5]) for line in maps.read_text().splitlines() if "/dev/shm/" in line
                }
    return {path for path in found if path.exists()}


def test_two_workers_share_a_drafter(vllm_env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts, which vLLM's CPU build pads on each of the two; and a fault in the second one is found."""
    launch, added = VLLMEngine.launch, {"worker_extension_cls": "tampered_worker.TamperedWorker"}
    environment = {"PYTHONPATH": f"{INSIDE}:{HERE / 'vllm'}", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def with_faults(path: Path, settings: LaunchSettings, bucket_bytes: int) -> VLLMEngine:
        changed = replace(settings, engine_args={**settings.engine_args, **added}, environment=environment)
        return launch(path, changed, bucket_bytes)

    monkeypatch.setattr(VLLMEngine, "launch", with_faults)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    tokenizer = make_tokenizer()
    trunk = trunk_of("glm4_moe", vocab_size=len(tokenizer))
    attach(trunk, MTPConfig(enable=True), family=GLM4_MOE).save_pretrained(tmp_path / "model")
    own = [f"model.path={tmp_path / 'model'}", "rollout.tensor_model_parallel_size=2"]
    config = settings(tmp_path, *MTP, *on_vllm(vllm_env), *own)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made = RLTrainer(config, prompts=PROMPTS, reward=ShareOfWord(), tokenizer=tokenizer)
        with contextlib.closing(made):
            for _ in range(2):
                step = made.step(PROMPTS)
                assert step["drafter_in_sync"] == 1.0 and step["spec_num_draft_tokens"]
                gap = step["log_prob_gap_max"]
                assert gap is not None and gap < 1e-4
            rollout = made.rollout
            assert isinstance(rollout, VLLMEngine)
            worker, trained = rollout._connection.worker, digest(made.engine.drafter_weights(), rollout.dtype)
            for part in ("enorm.weight", "w2_weight"):  # both workers have the one, and each has half of the other
                worker("forerun_scale", 1, part, 0.5)
                assert rollout.drafter_digest() not in (None, trained)
                worker("forerun_scale", 1, part, 2.0)
                assert rollout.drafter_digest() == trained
            worker("forerun_hide_experts", 1)
            assert [rollout.drafter_digest(), rollout.drafter_digest()] == [None, None]
            shared = shared_memory(rollout._connection.process.pid)
    assert shared and not any(path.exists() for path in shared)
    told = [str(warning.message) for warning in warned if "vLLM" in str(warning.message)]
    assert len(told) == 2 and "no sleep mode" in told[0] and "w2_weight, which cannot be read back" in told[1], told


def command_line(tmp_path: Path) -> list[str]:
    """Settings of a run whose model, prompts and reward are files, beside a run.yaml."""
    model, tokenizer = make_model(MTPConfig(enable=True))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"say {word}", "data_source": "x", "reward_model": {"ground_truth": word}} for word in "abcd"]
    (tmp_path / "rl.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "run.yaml").write_text(f"model: {{path: {tmp_path / 'model'}}}")
    (tmp_path / "reward.py").write_text("def score(prompt, response, ground_truth, extra):\n    return len(response)\n")
    return [
        f"data.train_files=[{tmp_path / 'rl.jsonl'}]",
        f"reward.function={tmp_path / 'reward.py'}:score",
        f"trainer.output_dir={tmp_path / 'run'}",
        "rollout.n=4",
        "rollout.max_response_length=8",
        "rollout.max_prompt_length=32",
        "train_batch_size=4",
        "ppo_mini_batch_size=4",
    ]


def test_workers_on_ray_roll_out_on_vllm(vllm_env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronously: each worker is an actor that has started a vLLM."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    own = [*command_line(tmp_path), "launch=ray", "async_training.enable=true"]
    run("rl", tmp_path / "run.yaml", [*MTP, *on_vllm(vllm_env), *own])
    steps = drafted_steps(tmp_path / "run")
    assert steps[0]["log_prob_gap_max"] < 1e-4  # the second may train on samples of older weights
    assert all(step["rollout_workers"] == 1.0 and step["requests_reissued"] == 0.0 for step in steps)


# Started by Python itself, in every rank.
NOTING = """
import os
if "RANK" in os.environ:
    from pathlib import Path
    from forerun.rollout.vllm.engine import VLLMEngine
    generate = VLLMEngine.generate
    def noted(engine, requests, *more):
        with Path(__file__).with_name(os.environ["RANK"]).open("a") as file:
            print(len(requests), file=file)
        return generate(engine, requests, *more)
    VLLMEngine.generate = noted
"""


def test_every_rank_rolls_out_on_a_vllm_of_its_own(
    vllm_env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    (tmp_path / "sitecustomize.py").write_text(NOTING)
    two = ["launch=torchrun", "distributed.nproc_per_node=2", "engine.device=cpu"]
    run("rl", tmp_path / "run.yaml", [*MTP, *on_vllm(vllm_env), *command_line(tmp_path), *two])
    assert all(step["log_prob_gap_max"] < 1e-4 for step in drafted_steps(tmp_path / "run"))
    assert [(tmp_path / rank).read_text().split() for rank in "01"] == [["8", "8"]] * 2
