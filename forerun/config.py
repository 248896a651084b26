"""What describes a run: dataclasses under TRL's and verl's field names.

Values out of range and settings that contradict each other are found by `forerun.config_check`, before any model is
loaded, and named by their dotted key. `forerun.config_file` reads these from YAML.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from transformers.utils.generic import is_flash_attention_requested

from forerun.config_algorithm import AlgorithmConfig
from forerun.config_async import AsyncTrainingConfig, check_async, check_patience
from forerun.config_check import bounded
from forerun.config_megatron import MegatronConfig
from forerun.config_rollout import RolloutConfig, check_ranks_to_an_engine, check_rollout
from forerun.errors import UsageError
from forerun.mtp.config import MTPConfig

# No float16: its loss would need scaling.
Autocast = Literal["none", "bfloat16"]


@dataclass
class ModelConfig:
    """The Hugging Face directory that a run starts from."""

    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False
    # transformers' attention: eager, sdpa, flash_attention_2, flash_attention_3, a kernel of the Hub; null takes the
    # model's own choice, sdpa mostly. Flash attention needs its package, a GPU, and a forward pass in bfloat16.
    attn_implementation: str | None = None
    # Keys of its config.json to set before the model is built, nested as there or dotted: max_position_embeddings,
    # rope_scaling.factor. Saved models have them.
    override_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataConfig:
    """Where examples come from: `.jsonl` or `.parquet` files, or data sets of the Hub as `hub:NAME[:CONFIG][:SPLIT]`.

    SFT reads conversations (`messages`, or `prompt` and `response`), RL reads verl's columns (`prompt`,
    `reward_model.ground_truth`, `data_source`, `extra_info`).
    """

    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    # null reads all of them.
    train_max_samples: int | None = bounded(None, ge=1)
    val_max_samples: int | None = bounded(None, ge=1)
    shuffle: bool = True
    on_bad_row: Literal["error", "skip"] = "error"
    # SFT only: tokens a row holds, and whether short documents share one.
    max_length: int = bounded(1024, ge=2)
    packing: bool = True
    # RL with algorithm.filter_groups only: prompts of one generation batch; null takes train_batch_size.
    gen_batch_size: int | None = bounded(None, ge=1)
    # A document longer than max_length (SFT), or a prompt longer than rollout.max_prompt_length (RL; not truncate).
    on_too_long: Literal["error", "skip", "truncate"] = "error"


@dataclass
class OptimConfig:
    """AdamW and its schedule: `warmup_steps` or `warmup_ratio` warms it up; `max_grad_norm=0` clips nothing."""

    lr: float = bounded(1e-5, gt=0)
    # Peak rate of the MTP block; null takes lr.
    mtp_lr: float | None = bounded(None, gt=0)
    weight_decay: float = bounded(0.0, ge=0)
    betas: tuple[float, float] = bounded((0.9, 0.999), ge=0, lt=1)
    max_grad_norm: float = bounded(1.0, ge=0)
    warmup_steps: int | None = bounded(None, ge=0)
    warmup_ratio: float = bounded(0.0, ge=0, le=1)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"

    def validate(self, prefix: str) -> None:
        if self.warmup_steps is not None and self.warmup_ratio > 0:
            raise UsageError(f"{prefix}warmup_steps and {prefix}warmup_ratio are both set: keep one of them")

    def num_warmup_steps(self, total_steps: int) -> int:
        """Optimizer steps of linear warm-up in a run of `total_steps`."""
        return self.warmup_steps if self.warmup_steps is not None else math.ceil(self.warmup_ratio * total_steps)


@dataclass
class EngineConfig:
    """The training engine: where it computes, in what precision, what it keeps for backward."""

    # "megatron" is megatron-core (docs/megatron.md), divided as the section `megatron` says.
    strategy: Literal["torch", "megatron"] = "torch"
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    # "auto" takes CUDA where there is one.
    device: str = "auto"
    # Precision of the forward pass; "none" computes in the weights' own (model.dtype).
    autocast: Autocast = "none"
    activation_recompute: bool = False
    # A loss or gradient that is not finite: stop, or drop that step.
    on_nonfinite: Literal["stop", "skip"] = "stop"
    # The rest is for ranks that share the model (docs/launch.md), whose weights lie in shards (FSDP2).
    # Ranks to one copy of the model: fewer than all make replicas (HSDP); null is all.
    fsdp_size: int | None = bounded(None, ge=1)
    # Precision that weights are gathered and computed in, and that gradients are summed in; null is their own.
    param_dtype: Literal["bfloat16"] | None = None
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    # Free a layer's gathered weights after its forward pass, and gather them again for the backward pass.
    reshard_after_forward: bool = True
    # Consecutive ranks that share each row's tokens, for rows too long for one of them.
    context_parallel_size: int = bounded(1, ge=1)
    # CUDA only: keep shards, gradients and optimizer state in host memory, and update them there.
    cpu_offload: bool = False

    @property
    def ranks_to_a_row(self) -> int:
        """Ranks that share each row's tokens, by either strategy."""
        megatron = self.strategy == "megatron"
        return self.megatron.context_parallel_size if megatron else self.context_parallel_size

    def validate(self, prefix: str) -> None:
        if self.strategy == "torch" and self.megatron != MegatronConfig():
            raise UsageError(f"{prefix}megatron is of {prefix}strategy=megatron: set that, or leave the section out")
        if self.strategy == "megatron":
            unused = EngineConfig()
            kept = ("strategy", "megatron", "device", "on_nonfinite")
            for item in fields(self):
                if item.name not in kept and getattr(self, item.name) != getattr(unused, item.name):
                    raise UsageError(f"{prefix}{item.name} is of {prefix}strategy=torch: leave it out")
        if self.autocast != "none" and self.param_dtype is not None:
            raise UsageError(
                f"{prefix}autocast and {prefix}param_dtype both set the forward pass's precision: keep one"
            )


@dataclass
class DistributedConfig:
    """The processes of launch=torchrun and launch=ray, by torchrun's names. Under an outer torchrun only `timeout_s`
    counts.
    """

    nproc_per_node: int = bounded(1, ge=1)
    nnodes: int = bounded(1, ge=1)
    # With several machines: HOST:PORT of one of them, and a name of the run, the same on all.
    rdzv_endpoint: str | None = None
    rdzv_id: str = "forerun"
    # launch=ray: HOST:PORT of the Ray to join, or auto for the one of this machine; null starts one that ends with the
    # run.
    ray_address: str | None = None
    # Seconds that a rank waits for the others, at the start and in every exchange, before it fails.
    timeout_s: float = bounded(1800.0, gt=0)
    # Seconds that ranks get to end after another one failed; then they are killed.
    shutdown_timeout_s: int = bounded(30, ge=0)

    @property
    def num_ranks(self) -> int:
        return self.nnodes * self.nproc_per_node

    def validate(self, prefix: str) -> None:
        if self.nnodes > 1 and self.ray_address is not None and self.rdzv_endpoint is None:
            return
        if (self.nnodes > 1) != (self.rdzv_endpoint is not None):
            raise UsageError(
                f"{prefix}nnodes={self.nnodes} with {prefix}rdzv_endpoint={self.rdzv_endpoint or 'null'}: several "
                f"machines meet at HOST:PORT of one of them (launch=ray: {prefix}ray_address), and one needs none"
            )


@dataclass
class TrainerConfig:
    """Length, cadence and output of a run. A frequency of -1 switches that off; 0 is not a frequency."""

    total_steps: int = bounded(100, ge=1)
    save_freq: int = bounded(-1, ge=-1)
    test_freq: int = bounded(-1, ge=-1)
    # Held-out figures of the model as it is, too (step 0). The last step's are always taken.
    val_before_train: bool = True
    output_dir: str = "runs/forerun"
    seed: int = bounded(0, ge=0)
    # Go on from the newest checkpoint in output_dir, if there is one.
    resume: bool = True
    # Copy the state and write it while training goes on, instead of waiting until it is on the disk.
    async_save: bool = False
    # Newest checkpoints that are kept; 0 keeps all.
    save_total_limit: int = bounded(2, ge=0)
    # What an alarm does (acceptance of exactly 1.00, MTP loss above ln V, a drafter that differs): warn once, or stop.
    on_alarm: Literal["warn", "stop"] = "warn"
    logger: list[str] = field(default_factory=lambda: ["jsonl", "tensorboard"])

    def validate(self, prefix: str) -> None:
        for name in ("save_freq", "test_freq"):
            if getattr(self, name) == 0:
                raise UsageError(f"{prefix}{name}=0 is not a frequency: give a number of steps, or -1 for never")
        known = ("jsonl", "tensorboard", "wandb")
        for name in self.logger:
            if name not in known:
                raise UsageError(f"{prefix}logger={name!r} is not one of {', '.join(known)}")
        if not self.output_dir:
            raise UsageError(f"{prefix}output_dir is empty: name a directory")


@dataclass
class OverlongBufferConfig:
    """DAPO's soft penalty: it grows linearly over the last `len` tokens before rollout.max_response_length."""

    enable: bool = False
    len: int = bounded(64, ge=1)
    # The penalty of a response that fills max_response_length.
    penalty_factor: float = bounded(1.0, gt=0)


@dataclass
class RewardConfig:
    """The reward, run in processes of its own (`forerun.rewards.runner`); `kwargs` are passed to the function.

    `function` is math, exact_match, reasoning_gym, auto (by data source), module:function or file.py:function.
    """

    function: str = "auto"
    kwargs: dict[str, Any] = field(default_factory=dict)
    # Seconds for one response; a longer one scores 0 and is counted.
    time_limit_s: float = bounded(10.0, gt=0)
    num_workers: int = bounded(1, ge=1)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@dataclass
class SFTConfig:
    """Supervised fine-tuning, of trunk and MTP block or of the block alone (`freeze_trunk`)."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    # "torchrun" starts distributed.nproc_per_node processes on this machine, "ray" so many actors on each of nnodes.
    launch: Literal["local", "torchrun", "ray"] = "local"
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    # Passes over the data; when given, it takes the place of trainer.total_steps.
    total_epochs: int | None = bounded(None, ge=1)
    # Rows for each optimizer step, and how many of them go through the model at once.
    train_batch_size: int = bounded(8, ge=1)
    micro_batch_size: int = bounded(1, ge=1)
    # Head-only training: the trunk gets neither gradient nor update.
    freeze_trunk: bool = False
    # Start of a block for a model that has none: "fit" solves for its projection on the first training rows (seconds,
    # and far ahead of the others), "carry" repeats the trunk's last prediction, "plain" is random.
    mtp_init: Literal["fit", "carry", "plain"] = "fit"
    # Keep the frozen trunk's hiddens in memory, so that further epochs cost only the head.
    cache_hiddens: bool = False

    def validate(self, prefix: str) -> None:
        _need_model_and_data(self.model, self.data)
        _check_launch(self.launch, self.distributed)
        _check_attention(self.model, self.engine)
        if self.micro_batch_size > self.train_batch_size:
            raise UsageError(
                f"micro_batch_size={self.micro_batch_size} is larger than train_batch_size={self.train_batch_size}"
            )
        if self.freeze_trunk and not self.mtp.enable_train:
            raise UsageError("freeze_trunk=true leaves nothing to train: set mtp.enable=true and mtp.enable_train=true")
        if self.cache_hiddens and not self.freeze_trunk:
            raise UsageError("cache_hiddens=true needs freeze_trunk=true: the hiddens of a trunk that learns change")


@dataclass
class RLConfig:
    """Reinforcement learning on verifiable rewards, with speculative rollouts where `mtp.enable_rollout` is set."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6))
    mtp: MTPConfig = field(default_factory=MTPConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    async_training: AsyncTrainingConfig = field(default_factory=AsyncTrainingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    # "torchrun" starts distributed.nproc_per_node processes on this machine, "ray" so many actors on each of nnodes.
    launch: Literal["local", "torchrun", "ray"] = "local"
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    # Prompts for each rollout; the optimizer steps on ppo_mini_batch_size prompts at a time (each with its rollout.n
    # responses), ppo_epochs times over; micro_batch_size counts responses.
    train_batch_size: int = bounded(8, ge=1)
    ppo_mini_batch_size: int = bounded(8, ge=1)
    ppo_epochs: int = bounded(1, ge=1)
    micro_batch_size: int = bounded(4, ge=1)
    # Tokens that go through a rank at once; when given, it takes the place of micro_batch_size: responses, prompts
    # included, are packed into rows of so many.
    ppo_max_token_len_per_gpu: int | None = bounded(None, ge=1)

    @property
    def max_row_length(self) -> int | None:
        """Tokens of a row under ppo_max_token_len_per_gpu, over the ranks that share it."""
        limit = self.ppo_max_token_len_per_gpu
        return None if limit is None else limit * self.engine.ranks_to_a_row

    @property
    def starts_engines(self) -> bool:
        """Whether ranks start a vLLM or an SGLang each, or several ranks one."""
        return self.rollout.python is not None and not self.async_training.enable

    def validate(self, prefix: str) -> None:
        _need_model_and_data(self.model, self.data)
        _check_launch(self.launch, self.distributed)
        _check_attention(self.model, self.engine)
        longest = self.rollout.max_prompt_length + self.rollout.max_response_length
        if self.max_row_length is not None and self.max_row_length < longest:
            raise UsageError(
                f"ppo_max_token_len_per_gpu={self.ppo_max_token_len_per_gpu} has no room for a prompt and its response "
                f"of rollout.max_prompt_length + rollout.max_response_length = {longest} tokens: give at least "
                f"{-(-longest // self.engine.ranks_to_a_row)}"
            )
        if self.train_batch_size % self.ppo_mini_batch_size:
            raise UsageError(
                f"train_batch_size={self.train_batch_size} is no multiple of "
                f"ppo_mini_batch_size={self.ppo_mini_batch_size}"
            )
        if self.data.on_too_long == "truncate":
            raise UsageError("data.on_too_long=truncate would cut off what a prompt ends with: use error or skip")
        if self.rollout.n < 2:
            raise UsageError(
                f"rollout.n=1 gives {self.algorithm.adv_estimator} nothing to compare a response with: use at least 2"
            )
        if self.data.gen_batch_size is not None and not self.algorithm.filter_groups.enable:
            raise UsageError("data.gen_batch_size is of algorithm.filter_groups.enable=true: set both or neither")
        buffer, limit = self.reward.overlong_buffer, self.rollout.max_response_length
        if buffer.enable and buffer.len > limit:
            raise UsageError(
                f"reward.overlong_buffer.len={buffer.len} is longer than rollout.max_response_length={limit}"
            )
        asynchronous = self.async_training.enable
        size = self.rollout.num_devices
        on_gpus = self.rollout.python is not None and self.engine.device != "cpu"
        if self.launch == "ray" and not asynchronous and on_gpus and size > 1:
            raise UsageError(
                f"rollout.tensor_model_parallel_size={size} with launch=ray: an engine that a rank starts sees the one "
                "GPU of that rank: set launch=torchrun, or async_training.enable=true, whose workers have their own"
            )
        if self.launch != "local" and self.starts_engines:
            check_ranks_to_an_engine(self.distributed.nproc_per_node, size)
        check_rollout(self.rollout, self.mtp, on_ray=self.launch == "ray" and asynchronous, asynchronous=asynchronous)
        check_async(self.async_training, self.algorithm, self.rollout, self.data.gen_batch_size, self.launch)
        if asynchronous and self.launch == "ray" and self.distributed.num_ranks > 1:
            check_patience(self.async_training, self.distributed.timeout_s)


def _check_attention(model: ModelConfig, engine: EngineConfig) -> None:
    name = model.attn_implementation
    if name is None:
        return
    if engine.strategy == "megatron" or engine.context_parallel_size > 1:
        other = "strategy=megatron" if engine.strategy == "megatron" else "context_parallel_size"
        raise UsageError(f"model.attn_implementation={name}: engine.{other} brings its own attention, leave it out")
    flash = is_flash_attention_requested(requested_attention_implementation=name)
    if flash and "bfloat16" not in (model.dtype, engine.autocast, engine.param_dtype):
        raise UsageError(
            f"model.attn_implementation={name} computes in bfloat16: set engine.autocast=bfloat16 (one process), "
            "engine.param_dtype=bfloat16 (ranks) or model.dtype=bfloat16"
        )


def _check_launch(launch: str, distributed: DistributedConfig) -> None:
    if launch == "torchrun" and distributed.ray_address is not None:
        raise UsageError("distributed.ray_address is of launch=ray: set that, or unset it")
    if launch == "ray" and distributed.rdzv_endpoint is not None:
        raise UsageError(
            "distributed.rdzv_endpoint is of launch=torchrun: with launch=ray give distributed.ray_address"
        )


def _need_model_and_data(model: ModelConfig, data: DataConfig) -> None:
    if not model.path:
        raise UsageError("model.path is not set: give the directory of a Hugging Face checkpoint")
    if not data.train_files:
        raise UsageError("data.train_files is empty: give at least one .jsonl or .parquet file, or hub:NAME")
