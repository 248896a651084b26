"""The recipes that users copy: each loads, says what its name says, and its data is what its script makes."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.checkpoint.reader import CheckpointReader
from forerun.config import RLConfig, SFTConfig
from forerun.config_file import load_config
from forerun.data.examples import read_examples
from forerun.data.prompts import read_prompts
from forerun.errors import UsageError
from forerun.models.config_overrides import overridden_config
from forerun.planner.from_config import job_of, read_config
from forerun.planner.hardware import find
from forerun.planner.train_plan import GIB, TrainPlan, make_train_plan
from forerun.trainers.checks import check_config, check_layout

RECIPES = Path(__file__).parents[2] / "recipes"
DOCUMENT = RECIPES.parent / "docs" / "recipes.md"


def kind(path: Path) -> type[SFTConfig] | type[RLConfig]:
    return {"sft": SFTConfig, "rl": RLConfig}[path.stem.split("_")[0]]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_loads_and_its_data_is_there(path: Path) -> None:
    config = load_config(kind(path), path)
    assert config.trainer.output_dir == f"runs/{path.stem}"
    assert config.data.train_files
    for name in config.data.train_files:
        read = read_examples if isinstance(config, SFTConfig) else read_prompts
        assert len(read(RECIPES.parent / name)) >= 64


# Recipes for models that are not here: each says in a line what to plan it with.
PLANNED = {path.stem: path for path in sorted(RECIPES.glob("*.yaml")) if "\n# plan: " in path.read_text("utf-8")}


def plan_of(path: Path) -> tuple[dict[str, Any], TrainPlan]:
    """The options that its `# plan:` line gives, and the plan."""
    line = next(text for text in path.read_text("utf-8").splitlines() if text.startswith("# plan: "))
    words = line.removeprefix("# plan: ").split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    config = read_config(path, [], options["--model"])
    return options, make_train_plan(job_of(config, None), find(options["--hardware"]))


@pytest.mark.parametrize("name", PLANNED)
def test_what_is_planned_for_a_device_fits_it(name: str) -> None:
    """And docs/recipes.md says what it takes."""
    options, plan = plan_of(PLANNED[name])
    assert plan.fits, plan.sentence()
    train = max(peak.total for peak in plan.peaks) / GIB
    seconds = plan.compute_seconds() or 0
    loading = f"{plan.loading / GIB:,.0f}" if plan.loading else "-"
    device = f"{plan.job.run.layout.ranks} x {options['--hardware'].upper()}"
    row = f"| `{name}.yaml` | {device} | {plan.job.run.layout} | {train:.1f} | {loading} | {seconds:,.0f} |"
    assert row in DOCUMENT.read_text("utf-8"), row


@pytest.mark.parametrize("name", PLANNED)
def test_every_check_that_needs_no_weights_passes(name: str, tmp_path: Path) -> None:
    """The configuration's own, those of ranks and devices, and of overrides against the model's config.json."""
    options, plan = plan_of(PLANNED[name])
    (tmp_path / "config.json").write_text(json.dumps(config_json(options["--model"])))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model-1.safetensors"}}')
    (tmp_path / "model-1.safetensors").touch()
    config = load_config(kind(PLANNED[name]), PLANNED[name], [f"model.path={tmp_path}"])
    check_config(config, has_data=False, has_model=False)
    check_layout(config, plan.job.run.layout.ranks, torch.device("cuda"))
    merged = overridden_config(CheckpointReader(tmp_path), config.model.override_config)
    text = merged.get("text_config", merged)
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    assert text["max_position_embeddings"] >= longest
    wrong = replace(config, model=replace(config.model, override_config={"max_position_embedings": 1}))
    with pytest.raises(UsageError, match="did you mean"):
        check_config(wrong, has_data=False, has_model=False)


def config_json(model: str) -> dict[str, Any]:
    """What a published config.json of the model has, as far as its recipe touches it."""
    sizes = json.loads(resources.files("forerun.planner").joinpath("models.json").read_text("utf-8"))[model]
    sizes = {**sizes, "max_position_embeddings": 131_072}
    kinds = {"mimo-7b": "mimo", "glm-4.5-air": "glm4_moe", "deepseek-r1": "deepseek_v3", "qwen3.5-9b": "qwen3_5"}
    if model == "qwen3.5-9b":
        return {"model_type": "qwen3_5", "text_config": {**sizes, "model_type": "qwen3_5_text"}}
    return {"model_type": kinds[model], **sizes}


@pytest.mark.parametrize("name", ["rl_mimo_7b", "rl_mimo_7b_megatron"])
def test_the_reference_script_s_settings(name: str) -> None:
    """verl's examples/mtp_trainer/test_dapo_mimo_7b_with_mtp_math_megatron.sh."""
    config = load_config(RLConfig, RECIPES / f"{name}.yaml")
    assert (config.train_batch_size, config.ppo_mini_batch_size, config.rollout.n) == (32, 32, 16)
    assert (config.rollout.max_prompt_length, config.rollout.max_response_length) == (2048, 8192)
    buffer = config.reward.overlong_buffer
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 4096, 1.0)
    algorithm = config.algorithm
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert (algorithm.adv_estimator, algorithm.loss_agg_mode) == ("grpo", "token-mean")
    assert algorithm.rollout_correction.bypass_mode and not algorithm.needs_reference
    assert (config.optim.lr, config.optim.warmup_steps, config.optim.weight_decay) == (1e-6, 10, 0.1)
    mtp = config.mtp
    assert (mtp.enable, mtp.enable_train, mtp.detach_encoder, mtp.enable_rollout) == (True, True, True, False)
    assert mtp.mtp_loss_scaling_factor == 0.1
    assert config.model.override_config == {"max_position_embeddings": 32768}


def test_the_four_set_ups() -> None:
    def switches(name: str) -> tuple[bool, bool, bool, bool]:
        path = RECIPES / f"{name}.yaml"
        mtp = load_config(kind(path), path).mtp
        return mtp.enable, mtp.enable_train, mtp.detach_encoder, mtp.enable_rollout

    assert switches("sft_keep") == (True, False, False, False)
    assert switches("sft_joint") == (True, True, False, False)
    assert switches("sft_heads") == (True, True, True, False)
    assert switches("rl_speculative") == (True, True, True, True)


def test_the_data_is_what_its_script_makes(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    script = runpy.run_path(str(RECIPES / "data" / "make.py"))
    script["main"](tmp_path)
    for name in ("sft.jsonl", "rl.jsonl"):
        assert (tmp_path / name).read_bytes() == (RECIPES / "data" / name).read_bytes()
