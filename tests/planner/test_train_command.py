"""`forerun plan train` as a user meets it: figures in print and as JSON, advice that holds, mistakes in a line."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forerun import cli
from forerun.models.config_overrides import ConfigFile, overridden_config
from forerun.planner.from_config import job_of, read_config
from forerun.planner.hardware import find
from forerun.planner.shape import find_config
from forerun.planner.train_plan import make_train_plan

GIB = 2**30


@pytest.fixture
def sft(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {path: mimo-7b, dtype: bfloat16}\n"
        "data: {train_files: [a.jsonl], max_length: 4096}\n"
        "mtp: {enable: true, enable_train: true}\n"
        "launch: torchrun\n"
        "distributed: {nproc_per_node: 8}\n"
        "train_batch_size: 32\n"
    )
    return path


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["plan", "train", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = plan(capsys, *arguments, "--json")
    assert code == 0 and not err
    return json.loads(out)


def peak(found: dict[str, Any], which: str = "peaks") -> float:
    return max(phase["bytes"] for phase in found[which])


def test_the_figures_in_print_and_as_json(capsys: pytest.CaptureFixture[str], sft: Path) -> None:
    found = answer(capsys, str(sft), "--hardware", "h100")
    parts = found["peaks"][0]["parts"]
    weights = 36 * (4096 * 128 * 80 + 3 * 4096 * 11008) + 2 * 4096 * 151680
    block = 4096 * 128 * 80 + 3 * 4096 * 11008 + 2 * 4096**2
    assert parts["weights"] == (weights + block) * 2 / 8 and parts["optimizer"] == 2 * parts["weights"]
    without = found["peaks_without_mtp"][0]["parts"]
    assert without["weights"] == weights * 2 / 8 and without["activations, MTP"] == 0 < parts["activations, MTP"]
    assert peak(found) > peak(found, "peaks_without_mtp")
    assert 1.03 < found["compute_seconds"] / found["compute_seconds_without_mtp"] < 1.2  # one layer and head on 36
    code, out, err = plan(capsys, str(sft), "--hardware", "h100")
    assert code == 0 and not err and out.splitlines()[-1] == found["sentence"]
    assert f"{peak(found) / GIB:.2f}" in out and "FSDP2 x 8" in out and "mtp.enable=false" in out
    assert out.startswith("mimo-7b: 7.83 B weights, ") and "gather weights, over 8 ranks" in out


def test_settings_reach_the_figures(capsys: pytest.CaptureFixture[str], sft: Path) -> None:
    plain = peak(answer(capsys, str(sft)))
    assert peak(answer(capsys, str(sft), "engine.activation_recompute=true")) < plain / 1.5
    assert peak(answer(capsys, str(sft), "micro_batch_size=2")) > 1.5 * plain
    assert peak(answer(capsys, str(sft), "data.max_length=2048")) < plain
    assert peak(answer(capsys, str(sft), "mtp.enable_train=false")) < plain
    assert peak(answer(capsys, str(sft), "mtp.detach_encoder=true")) < plain
    assert peak(answer(capsys, str(sft), "freeze_trunk=true")) < plain / 2
    assert peak(answer(capsys, str(sft), "engine.fsdp_size=4")) > plain
    assert peak(answer(capsys, str(sft), "model.dtype=float32")) > 1.5 * plain
    assert peak(answer(capsys, str(sft), "engine.reshard_after_forward=false")) > plain
    assert (
        peak(answer(capsys, str(sft), "mtp.chunk_size=1024"))
        == plain
        > peak(answer(capsys, str(sft), "mtp.chunk_size=64"))
    )
    on_cpu = peak(answer(capsys, str(sft), "engine.device=cpu"))
    assert peak(answer(capsys, str(sft), "engine.device=cpu", "mtp.chunk_size=64")) == on_cpu
    hsdp = answer(capsys, str(sft), "engine.fsdp_size=4", "engine.reduce_dtype=float32")
    assert [kind["what"] for kind in hsdp["traffic"]][-1] == "sum over replicas"


def test_an_override_of_config_json_reaches_the_figures(
    capsys: pytest.CaptureFixture[str], sft: Path, tmp_path: Path
) -> None:
    """Of a known model, and of a config.json, where a key that is not there is refused as a run does."""
    whole = 36 * (4096 * 128 * 80 + 3 * 4096 * 11008) + 2 * 4096 * 151680
    layer = 4096 * 128 * 80 + 3 * 4096 * 11008

    def weights(*arguments: str) -> float:
        found = answer(capsys, str(sft), "mtp.enable=false", "mtp.enable_train=false", *arguments)
        return found["peaks"][0]["parts"]["weights"] * 8 / 2

    assert weights() == whole and weights("model.override_config.num_hidden_layers=35") == whole - layer
    config = {"model_type": "qwen2", **find_config("mimo-7b").config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    here = f"--model={tmp_path}"
    assert weights(here) == whole and weights(here, "model.override_config.num_hidden_layers=35") == whole - layer
    code, out, err = plan(capsys, str(sft), here, "model.override_config.num_hiden_layers=35")
    assert code == 2 and out == "" and "did you mean num_hidden_layers?" in err and len(err.splitlines()) == 1


def test_the_megatron_engine_s_settings_reach_the_figures(capsys: pytest.CaptureFixture[str], sft: Path) -> None:
    def megatron(**settings: object) -> dict[str, Any]:
        chosen = [f"engine.megatron.{name}={value}".lower() for name, value in settings.items()]
        return answer(capsys, str(sft), "engine.strategy=megatron", *chosen)

    def parts(found: dict[str, Any]) -> dict[str, float]:
        return found["peaks"][0]["parts"]

    plain = megatron()
    weights = 36 * (4096 * 128 * 80 + 3 * 4096 * 11008) + 2 * 4096 * 151680
    block = 4096 * 128 * 80 + 3 * 4096 * 11008 + 2 * 4096**2
    assert plain["layout"] == "DP 8" and parts(plain)["weights"] == 2 * (weights + block)
    assert parts(plain)["optimizer"] == 12 * (weights + block) / 8 and plain["loading_bytes"] == 0
    assert parts(megatron(use_distributed_optimizer=False))["optimizer"] == 12 * (weights + block)
    halves = megatron(tensor_model_parallel_size=2)
    assert parts(halves)["weights"] == weights + block
    trunk = "activations, trunk"
    shared = parts(megatron(tensor_model_parallel_size=2, sequence_parallel=True))[trunk]
    assert shared < parts(halves)[trunk] < parts(plain)[trunk]
    assert parts(megatron(recompute_granularity="full"))[trunk] < parts(plain)[trunk] / 4
    assert parts(megatron(context_parallel_size=2))[trunk] < parts(plain)[trunk]
    deep = megatron(pipeline_model_parallel_size=4)
    interleaved = megatron(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=3)
    assert parts(interleaved)[trunk] > parts(deep)[trunk]
    assert {kind["what"] for kind in deep["traffic"]} == {"pipeline", "optimizer"}


def test_rollouts_count(capsys: pytest.CaptureFixture[str], sft: Path) -> None:
    rl = ["rollout.max_prompt_length=1024", "rollout.max_response_length=7168", "rollout.max_num_seqs=8"]
    found = answer(capsys, str(sft), *rl)
    phases = {phase["phase"]: phase["parts"] for phase in found["peaks"]}
    assert phases["rollout"]["rollout cache"] == 8 * 8192 * 36 * 2 * 8 * 128 * 2
    weights = 36 * (4096 * 128 * 80 + 3 * 4096 * 11008) + 2 * 4096 * 151680
    assert phases["rollout"]["rollout engine"] == 2 * weights
    assert phases["forward and backward"]["rollout engine"] == 2 * weights  # it drops its cache only
    one = answer(capsys, str(sft), *rl, "ppo_max_token_len_per_gpu=8192")
    two = answer(capsys, str(sft), *rl, "ppo_max_token_len_per_gpu=16384")
    assert peak(one) == peak(answer(capsys, str(sft), *rl, "micro_batch_size=1")) < peak(two)
    drafting = answer(capsys, str(sft), *rl, "mtp.enable_rollout=true")
    assert peak(drafting) > peak(found)
    elsewhere = answer(capsys, str(sft), *rl[:2], "rollout.engine=vllm", "rollout.base_url=http://127.0.0.1:8000")
    assert [phase["phase"] for phase in elsewhere["peaks"]] == ["forward and backward", "optimizer step"]
    one = [*rl, "launch=local", "distributed.nproc_per_node=1"]
    alone = answer(capsys, str(sft), *one)
    beside = answer(capsys, str(sft), *one, "async_training.enable=true", "async_training.num_workers=2")
    engine = alone["peaks"][-1]["parts"]["rollout engine"] + alone["peaks"][-1]["parts"]["rollout cache"]
    assert beside["peaks"][0]["parts"]["rollout engine"] == 2 * engine  # they generate while it trains
    ray = answer(capsys, str(sft), *one, "async_training.enable=true", "launch=ray")
    assert "rollout engine" not in ray["peaks"][0]["parts"]
    reference = answer(capsys, str(sft), *rl, "algorithm.use_kl_loss=true")
    assert reference["peaks"][0]["parts"]["reference policy"] == reference["peaks"][0]["parts"]["weights"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["micro_batch_size=8"],
        ["rollout.n=4", "ppo_max_token_len_per_gpu=65536"],
        ["distributed.nproc_per_node=1"],
        ["model.dtype=float32"],
    ],
)
def test_the_advice_holds(capsys: pytest.CaptureFixture[str], sft: Path, overrides: list[str]) -> None:
    """What the sentence tells to set makes the run fit, and without it the run does not."""
    found = answer(capsys, str(sft), *overrides, "--hardware", "a100")
    assert found["fits"] is False
    advice = found["sentence"].split("; ", 1)[1].split(" brings it to ")[0]
    settings = [word for word in advice.replace(" and ", " ").replace(" with ", " ").split() if "=" in word]
    words = advice.split()
    if "ranks" in words:
        settings.append(f"distributed.nproc_per_node={words[0]}")
    assert settings
    mended = answer(capsys, str(sft), *overrides, *settings, "--hardware", "a100")
    assert mended["fits"] is True
    assert f"brings it to {peak(mended) / GIB:.3g} GiB" in found["sentence"]


def test_rollouts_longer_than_the_models_context_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(config: dict[str, Any], *more: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps(find_config("smollm2-135m").config | config))
        lengths = ["rollout.max_prompt_length=100", "rollout.max_response_length=412"]
        settings = [f"model.path={tmp_path}", "data.train_files=[a.jsonl]", *lengths, *more]
        code, _, err = plan(capsys, *settings)
        assert (code == 2) == bool(err)
        return err

    refused = "rollout.max_prompt_length + rollout.max_response_length = 512 is more than the model's context of 511: "
    assert refused in said({"max_position_embeddings": 511})
    assert refused in said({"text_config": find_config("smollm2-135m").config | {"max_position_embeddings": 511}})
    assert not said({"max_position_embeddings": 512})
    assert not said({})  # config.json does not say
    stretched = {"max_position_embeddings": 256, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    assert "context of 256" in said(stretched)
    assert not said(stretched, "rollout.engine=vllm", "rollout.python=python")
    assert refused in said({"max_position_embeddings": 511, "rope_scaling": "none"})


def test_the_advice_on_context_keeps_scaled_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers takes the new context for the original one where config.json has none."""
    base = find_config("smollm2-135m").config | {"model_type": "llama", "max_position_embeddings": 256}

    def tried(config: dict[str, Any], *more: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        lengths = ["rollout.max_prompt_length=100", "rollout.max_response_length=412"]
        return plan(capsys, f"model.path={tmp_path}", "data.train_files=[a.jsonl]", *lengths, *more)[2]

    def frequencies(config: dict[str, Any]) -> Any:
        made: Any = LlamaConfig.from_dict(copy.deepcopy(config))
        rotary = LlamaRotaryEmbedding(made)
        return rotary.inv_freq.tolist(), rotary.attention_scaling

    for scaled in (
        {"rope_type": "yarn", "factor": 4.0},
        {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ):
        config = base | {"rope_scaling": scaled}
        original = "rope_scaling.original_max_position_embeddings"
        assert f"model.override_config.max_position_embeddings, and there {original}=256, which" in tried(config)
        settings = {"max_position_embeddings": 512, original: 256}
        assert not tried(config, *(f"model.override_config.{key}={value}" for key, value in settings.items()))
        longer = overridden_config(ConfigFile(tmp_path, config), settings)
        assert frequencies(longer) == frequencies(config)
        assert "original" not in tried(base | {"rope_scaling": scaled | {"original_max_position_embeddings": 64}})
    nested = tried({"text_config": base | {"rope_scaling": scaled}})
    assert "model.override_config.text_config.max_position_embeddings, and there rope_scaling.original" in nested


def test_fitting_leaves_room_for_what_is_not_a_tensor(sft: Path) -> None:
    job, device = job_of(read_config(sft, [], None), None), find("h200")
    need = make_train_plan(job, device).peak
    assert make_train_plan(job, replace(device, memory=need / 0.95)).fits is False
    assert make_train_plan(job, replace(device, memory=need / 0.90)).fits is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.yaml"], "no such configuration file: nowhere.yaml"),
        (["{sft}", "--hardware", "abacus"], "no spec sheet for hardware 'abacus'"),
        (["{sft}", "--model", "forerun-demo/model"], "run `forerun demo`, which makes it"),
        (["{sft}", "--model", "nowhere"], "nowhere is neither a directory with a config.json"),
        (["{sft}", "mtp.enable_trian=true"], "did you mean mtp.enable_train?"),
        (["{sft}", "rollout.temprature=1"], "did you mean rollout.temperature?"),
        (["{sft}", "micro_batch_size=64"], "micro_batch_size=64 is larger than train_batch_size=32"),
        (["{sft}", "engine.fsdp_size=3"], "engine.fsdp_size=3 must divide the number of ranks, 8"),
        (["{sft}", "engine.context_parallel_size=3"], "context_parallel_size=3 must divide the number of ranks, 8"),
        (["{sft}", "engine.cpu_offload=true", "--hardware", "cpu"], "engine.device is the CPU already"),
        (["{sft}", "engine.cpu_offload=true", "engine.device=cpu"], "engine.device is the CPU already"),
        (["{sft}", "launch=local", "engine.fsdp_size=8"], "engine.fsdp_size=8 is for ranks that share the model"),
        (["{sft}", "freeze_trunk=true", "cache_hiddens=true"], "set cache_hiddens=false"),
        (["{sft}", "engine.device=abacus"], "engine.device='abacus' is no device"),
        (["{sft}", "engine.context_parallel_size=2", "--model", "qwen3.5-9b"], "layers of linear_attention, which"),
        (
            ["{sft}", "engine.strategy=megatron", "engine.megatron.tensor_model_parallel_size=3"],
            "8 ranks cannot be div",
        ),
        (["{sft}", "engine.strategy=megatron", "--hardware", "cpu"], "computes on CUDA devices only"),
        (
            [
                "{sft}",
                "engine.strategy=megatron",
                "engine.megatron.pipeline_model_parallel_size=8",
                "model.override_config.num_hidden_layers=7",
            ],
            "7 layers cannot fill 8 pipeline stages",
        ),
        (["{sft}", "engine.megatron.tensor_model_parallel_size=2"], "engine.megatron is of engine.strategy=megatron"),
    ],
)
def test_unusable_input_is_one_line(
    capsys: pytest.CaptureFixture[str], sft: Path, arguments: list[str], said: str
) -> None:
    code, out, err = plan(capsys, *[text.format(sft=sft) for text in arguments])
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and said in err
