"""Run configuration: defaults, files, overrides, and every way of getting them wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forerun import cli
from forerun.config import ModelConfig, OptimConfig, RLConfig, SFTConfig
from forerun.config_check import check
from forerun.config_file import load_config, save_config
from forerun.errors import UsageError
from forerun.mtp.config import MTPConfig

REQUIRED = ["model.path=some/model", "data.train_files=[a.jsonl]"]


def test_file_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train_files: [a.jsonl]}\noptim: {lr: 1e-4, betas: [0.8, 0.9]}\n")
    config = load_config(SFTConfig, path, ["optim.lr=2e-5", "mtp.enable=true", "optim.warmup_steps=3"])
    assert type(config) is SFTConfig and type(config.mtp) is MTPConfig
    assert config.optim.lr == 2e-5 and config.optim.betas == (0.8, 0.9) and config.optim.warmup_steps == 3
    assert config.model == ModelConfig(path="m") and config.data.train_files == ["a.jsonl"]
    assert config.mtp == MTPConfig(enable=True)


@pytest.mark.parametrize("cls", [SFTConfig, RLConfig])
def test_saved_configuration_loads_equal(tmp_path: Path, cls: type[SFTConfig] | type[RLConfig]) -> None:
    overrides = [*REQUIRED, "optim.betas=[0.8,0.9]", "mtp.enable=true", "mtp.loss=tv", "model.dtype=bfloat16"]
    if cls is RLConfig:
        overrides += ["reward.kwargs={buffer: 4, name: 'a: b'}", "reward.kwargs.deep.er=null"]
    config = load_config(cls, None, overrides)
    assert load_config(cls, save_config(config, tmp_path / "run")) == config


def test_reward_arguments_are_free() -> None:
    config = load_config(RLConfig, None, [*REQUIRED, "reward.kwargs.overlong.buffer=4", "reward.kwargs.x=[1, two]"])
    assert config.reward.kwargs == {"overlong": {"buffer": 4}, "x": [1, "two"]}


def test_interpolation() -> None:
    config = load_config(SFTConfig, None, [*REQUIRED, "trainer.output_dir=runs/${model.path}"])
    assert config.trainer.output_dir == "runs/some/model"


@pytest.mark.parametrize("section", ["engine", "engine.strategy=megatron engine.megatron"])
def test_ranks_that_share_a_row_have_room_for_a_longer_one(section: str) -> None:
    shared = [*REQUIRED, *f"{section}.context_parallel_size=2".split()]
    assert load_config(RLConfig, None, [*shared, "ppo_max_token_len_per_gpu=384"]).max_row_length == 768
    with pytest.raises(UsageError, match="= 768 tokens: give at least 384"):
        load_config(RLConfig, None, [*shared, "ppo_max_token_len_per_gpu=383"])


CORRECTION = "algorithm.rollout_correction"
URL = "base_url: 'http://127.0.0.1:8000'"
STARTED = f"python: {sys.executable}"
BAD = [
    ("optim.lrr=1", "unknown configuration key optim.lrr; did you mean optim.lr?"),
    ("lr=1", "unknown configuration key lr; did you mean optim.lr?"),
    ("temperatur=1", "unknown configuration key temperatur; did you mean rollout.temperature?"),
    ("mtp.num_layer=2", "unknown configuration key mtp.num_layer; did you mean mtp.num_layers?"),
    ("algorithms.clip_ratio_low=1", "algorithms.clip_ratio_low; did you mean algorithm.clip_ratio_low?"),
    ("actor.clip_ratio_low=1", "actor.clip_ratio_low; did you mean algorithm.clip_ratio_low?"),
    ("data.max_prompt_length=8", "data.max_prompt_length; did you mean rollout.max_prompt_length?"),
    ("rollout.name=vllm", "rollout.name; did you mean rollout.engine?"),
    ("max_steps=3", "max_steps; did you mean trainer.total_steps?"),
    ("reward.custom_reward_function.path=x", "did you mean reward.function?"),
    ("trainer.project_name=x", "docs/migrating.md has the names of verl and TRL beside ours"),
    ("optim.lr=fast", "optim.lr=fast must be a number"),
    ("optim.lr=null", "optim.lr=null must be a number"),
    ("optim.lr={a: 1}", "optim.lr={'a': 1} must be a number"),
    ("optim.lr=0", "optim.lr=0.0 must be greater than 0"),
    ("optim.lr=.nan", "optim.lr=nan must be a finite number"),
    ("optim.lr=.inf", "optim.lr=inf must be a finite number"),
    ("optim.lr=${nowhere}", "optim.lr: Interpolation key 'nowhere' not found"),
    ("optim.betas=[0.9]", "optim.betas=[0.9] must be a list of 2 items (each a number)"),
    ("optim.betas=[0.9,1.0]", "optim.betas=1.0 must be less than 1"),
    ("optim.warmup_ratio=1.5", "optim.warmup_ratio=1.5 must be at most 1"),
    ("optim.lr_scheduler_type=step", "optim.lr_scheduler_type=step must be one of constant, linear, cosine"),
    ("optim=3", "optim=3 must be a section with keys such as optim.lr"),
    ("mtp=null", "mtp=null must be a section with keys such as mtp.enable"),
    ("mtp.enable=perhaps", "mtp.enable=perhaps must be true or false"),
    ("mtp.loss=mse", "mtp.loss=mse must be one of ce, soft_ce, tv"),
    ("mtp.chunk_size=0", "mtp.chunk_size=0 must be at least 1"),
    ("mtp.enable_train=true", "mtp.enable_train=true needs mtp.enable=true"),
    ("rollout.n=1.5", "rollout.n=1.5 must be an integer"),
    ("rollout.n=1", "rollout.n=1 gives grpo nothing to compare"),
    ("rollout.temperature=0", "rollout.temperature=0 samples the same response every time"),
    ("reward.overlong_buffer={enable: true, len: 999}", "reward.overlong_buffer.len=999 is longer than"),
    ("data.on_too_long=truncate", "data.on_too_long=truncate would cut off what a prompt ends with"),
    ("algorithm.clip_ratio_low=1", "algorithm.clip_ratio_low=1.0 must be less than 1"),
    ("algorithm.clip_ratio_c=1", "algorithm.clip_ratio_c=1.0 must be greater than 1"),
    ("algorithm.adv_estimator=gae", "algorithm.adv_estimator=gae must be one of grpo, rloo"),
    ("algorithm.kl_loss_type=full", "algorithm.kl_loss_type=full must be one of kl, k1, abs, mse, k2, low_var_kl, k3"),
    ("algorithm.kl_penalty=k3+", "algorithm.kl_penalty=k3+ must be one of kl, k1, abs, mse, k2, low_var_kl, k3"),
    (
        "algorithm.loss_scale_factor=3",
        "loss_scale_factor is of algorithm.loss_agg_mode=seq-mean-token-sum-norm, not of",
    ),
    ("algorithm.filter_groups.max_num_gen_batches=-1", "max_num_gen_batches=-1 must be at least 0"),
    ("data.gen_batch_size=4", "data.gen_batch_size is of algorithm.filter_groups.enable=true"),
    (f"{CORRECTION}.rollout_is=both", "rollout_is=both must be one of token, sequence or null"),
    (f"{CORRECTION}.rollout_is_threshold=0.5_5", "rollout_is_threshold=0.55 must be at least 1, or a range"),
    (f"{CORRECTION}.rollout_is_threshold=big", "rollout_is_threshold: 'big' is neither a positive number nor a range"),
    (f"{CORRECTION}.rollout_rs=token_k1", "rollout_rs_threshold go together: set both or neither"),
    (f"{CORRECTION}={{rollout_rs: k9, rollout_rs_threshold: 2}}", "'k9' is not one of token_k1"),
    (f"{CORRECTION}={{bypass_mode: true, rollout_is: token}}", "bypass_mode=true leaves rollout_is and rollout_rs"),
    ("rollout.top_p=0", "rollout.top_p=0.0 must be greater than 0"),
    ("rollout.engine=vllm", "rollout.engine=vllm needs rollout.python"),
    ("rollout={engine: sglang, python: p, base_url: u}", "set one of them"),
    ("rollout.base_url=u", "rollout.base_url is of rollout.engine=vllm and sglang"),
    ("rollout={engine: vllm, python: p, depth_control: auto}", "depth_control=auto is of rollout.engine=native"),
    ("rollout={engine: sglang, python: p, engine_kwargs: {a: 1}}", "engine_kwargs is of rollout.engine=vllm"),
    ("rollout.dtype=bfloat16", "rollout.dtype is of rollout.engine=vllm and sglang"),
    ("rollout.weight_transport=nccl", "rollout.weight_transport is of rollout.engine=sglang"),
    ("rollout.update_weights_bucket_megabytes=1", "update_weights_bucket_megabytes is of rollout.engine=vllm and"),
    (
        f"rollout={{{URL}, engine: sglang, enforce_eager: true}}",
        "enforce_eager is of an engine that is started",
    ),
    (f"rollout={{{URL}, engine: vllm, max_num_seqs: 64}}", "max_num_seqs=64 is of an engine that is started"),
    ("rollout={engine: vllm, base_url: 'localhost:8000'}", "'localhost:8000' is not the address of a server"),
    ("rollout={engine: vllm, python: /none}", "rollout.python='/none' is no interpreter here"),
    (f"rollout={{{STARTED}, engine: vllm, deterministic: true}}", "deterministic=true is of rollout.engine=native and"),
    (f"rollout={{{STARTED}, engine: vllm, dtype: fp4}}", "rollout.dtype=fp4 must be one of auto, float32"),
    (f"rollout={{{STARTED}, engine: vllm, temperature: 3}}", "rollout.temperature=3.0 is none of vLLM's"),
    (f"rollout={{{STARTED}, engine: vllm, engine_kwargs: {{seed: 1}}}}", "holds seed, which trainer.seed decides"),
    (f"rollout={{{STARTED}, engine: sglang, top_p: 0.9}}", "rollout.top_p=0.9 without drafting"),
    (f"rollout={{{URL}, engine: sglang, top_p: 0.9}}", "without top_k"),
    ("rollout.depth_control=auto", "rollout.depth_control=auto has nothing to control"),
    ("rollout.engine=turbo", "rollout.engine=turbo must be one of native"),
    ("ppo_mini_batch_size=3", "train_batch_size=8 is no multiple of ppo_mini_batch_size=3"),
    ("ppo_max_token_len_per_gpu=767", "rollout.max_response_length = 768 tokens: give at least 768"),
    ("trainer.logger=3", "trainer.logger=3 must be a list (each item text), written [a, b]"),
    ("trainer.logger=[csv]", "trainer.logger='csv' is not one of jsonl, tensorboard, wandb"),
    ("trainer.save_freq=0", "trainer.save_freq=0 is not a frequency"),
    ("trainer.save_freq=-2", "trainer.save_freq=-2 must be at least -1"),
    ("trainer.output_dir=''", "trainer.output_dir is empty"),
    ("reward.kwargs=3", "reward.kwargs=3 must be a section of key: value pairs"),
    ("model.path=''", "model.path is not set"),
    ("data.train_files=[]", "data.train_files is empty"),
    ("data.max_length=true", "data.max_length=True must be an integer"),
    ("--optim.lr=1", "'--optim.lr=1' is not an override: write key=value"),
    ("optim.lr", "'optim.lr' is not an override: write key=value"),
    ("optim.betas=[1,", "cannot read the override 'optim.betas=[1,'"),
    ("optim.lr=${", "cannot read the override 'optim.lr=${'"),
]


DRAFTING = "mtp={enable: true, enable_rollout: true"


@pytest.mark.parametrize(
    ("mtp", "rollout", "message"),
    [
        ("acceptance: greedy", "{n: 4}", "mtp.acceptance=greedy is not lossless with rollout.temperature=1.0"),
        ("loss: ce", "{deterministic: true, depth_control: auto}", "which goes by measured times: unset one"),
        ("method: eagle", f"{{engine: vllm, {STARTED}}}", "mtp.method='eagle'"),
        ("loss: ce", f"{{engine: sglang, top_p: 0.9, {STARTED}}}", "rollout.top_p=0.9, min_p=0.0 without top_k"),
        ("speculative_num_draft_tokens: 9", f"{{engine: sglang, {STARTED}}}", "num_draft_tokens=9: with"),
    ],
)
def test_rollouts_that_cannot_be_drafted_so_are_one_line(mtp: str, rollout: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(RLConfig, None, [*REQUIRED, f"{DRAFTING}, {mtp}}}", f"rollout={rollout}"])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_engine_on_several_gpus_is_refused_where_its_rank_has_one() -> None:
    over_two = [*REQUIRED, f"rollout={{engine: vllm, {STARTED}, tensor_model_parallel_size: 2}}"]
    with pytest.raises(UsageError, match="=2 with launch=ray: an engine that a rank starts sees the one GPU of that"):
        load_config(RLConfig, None, [*over_two, "launch=ray"])
    for allowed in ("launch=torchrun", "async_training.enable=true", "engine.device=cpu"):
        load_config(RLConfig, None, [*over_two, "launch=ray", allowed])
    with pytest.raises(
        UsageError, match="parallel_size=2 must divide the number of ranks of a machine, 3: so many sha"
    ):
        load_config(RLConfig, None, [*over_two, "launch=torchrun", "distributed.nproc_per_node=3"])
    for ranks in (1, 2, 4):
        load_config(RLConfig, None, [*over_two, "launch=torchrun", f"distributed.nproc_per_node={ranks}"])


@pytest.mark.parametrize(("override", "message"), BAD)
def test_a_bad_override_is_one_line_that_names_it(override: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(RLConfig, None, [*REQUIRED, override])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n", "must hold `key: value` lines, not a list"),
        ("optim: [1, 2", "is not valid YAML"),
        ("optim: {lr: 1}\noptim: {lr: 2}\n", "is not valid YAML"),
        ("just text", "unknown configuration key just text"),
        ("optim:\n  lrr: 1\n", "unknown configuration key optim.lrr in {path}; did you mean optim.lr?"),
        ("optim:\n  lr: fast\n", "optim.lr=fast must be a number in {path}"),
        ("1: 2\n", "unknown configuration key 1 in {path}"),
        ("", "model.path is not set"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        load_config(SFTConfig, path)
    assert message.format(path=path) in str(caught.value) and "\n" not in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such configuration file"):
        load_config(SFTConfig, tmp_path / "missing.yaml")
    with pytest.raises(UsageError, match="cannot read"):
        load_config(SFTConfig, tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: {path: \xff}\n")
    with pytest.raises(UsageError, match="not valid YAML"):
        load_config(SFTConfig, tmp_path / "latin.yaml")


def test_a_configuration_built_in_python_is_checked_alike() -> None:
    config = load_config(SFTConfig, None, REQUIRED)
    config.optim.lr = -1.0
    with pytest.raises(UsageError, match=r"optim\.lr=-1\.0 must be greater than 0"):
        check(config)
    config.optim.lr = 1.0
    config.model.dtype = "int8"  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"model\.dtype='int8' must be one of"):
        check(config)
    rl = load_config(RLConfig, None, REQUIRED)
    rl.algorithm.rollout_correction.rollout_is = "both"  # type: ignore[assignment]
    with pytest.raises(
        UsageError, match=r"rollout_correction\.rollout_is='both' must be one of token, sequence or null"
    ):
        check(rl)


def test_contradictions() -> None:
    with pytest.raises(UsageError, match="freeze_trunk=true leaves nothing to train"):
        load_config(SFTConfig, None, [*REQUIRED, "freeze_trunk=true"])
    with pytest.raises(UsageError, match="micro_batch_size=9 is larger than train_batch_size=8"):
        load_config(SFTConfig, None, [*REQUIRED, "micro_batch_size=9"])
    with pytest.raises(UsageError, match="are both set"):
        load_config(SFTConfig, None, [*REQUIRED, "optim.warmup_steps=1", "optim.warmup_ratio=0.1"])


def test_warm_up() -> None:
    assert OptimConfig(warmup_ratio=0.1).num_warmup_steps(25) == 3
    assert OptimConfig(warmup_steps=0).num_warmup_steps(25) == 0
    assert OptimConfig().num_warmup_steps(25) == 0


def test_a_list_of_one_needs_no_brackets(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: x}\ndata: {train_files: a.jsonl, val_files: [b.jsonl]}\n")
    config = load_config(SFTConfig, tmp_path / "run.yaml", ["trainer.logger=wandb"])
    assert (config.data.train_files, config.data.val_files) == (["a.jsonl"], ["b.jsonl"])
    assert config.trainer.logger == ["wandb"]
    assert load_config(SFTConfig, tmp_path / "run.yaml", ["data.train_files=c.jsonl"]).data.train_files == ["c.jsonl"]


@pytest.mark.parametrize(("verb", "cls"), [("sft", SFTConfig), ("rl", RLConfig)])
def test_the_printed_settings_are_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, cls: type
) -> None:
    assert cli.main([verb, "--settings"]) == 0
    printed = capsys.readouterr().out
    assert "  strategy: torch  # one of torch, megatron\n" in printed and "  lr: 1.0e-0" in printed
    (tmp_path / "run.yaml").write_text(printed)
    given = ["model.path=x", "data.train_files=[y]"]
    assert load_config(cls, tmp_path / "run.yaml", given) == load_config(cls, None, given)
