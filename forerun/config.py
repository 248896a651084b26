"""What describes a run: dataclasses under TRL's and verl's field names, and what their values must satisfy.

Values out of range and settings that contradict each other are found here, before any model is loaded, and named by
their dotted key. `forerun.config_file` reads these from YAML.
"""

from __future__ import annotations

import math
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from forerun.algorithms.advantages import AdvEstimator
from forerun.algorithms.aggregation import LossAggMode
from forerun.algorithms.importance import ImportanceLevel
from forerun.algorithms.kl import KLEstimator, KLLossType
from forerun.algorithms.rejection import Bounds, parse_criteria, parse_range
from forerun.errors import UsageError
from forerun.mtp.config import MTPConfig

_BOUNDS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "greater than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}


def _number(default: Any, **bounds: float) -> Any:
    """A numeric field with bounds out of ge, gt, le, lt; `check` applies them, to each element of a tuple or list."""
    return field(default=default, metadata=bounds)


# No float16: its loss would need scaling.
Autocast = Literal["none", "bfloat16"]


@dataclass
class ModelConfig:
    """The Hugging Face directory that a run starts from."""

    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False


@dataclass
class DataConfig:
    """Where examples come from: `.jsonl` or `.parquet` files, or data sets of the Hub as `hub:NAME[:CONFIG][:SPLIT]`.

    SFT reads conversations (`messages`, or `prompt` and `response`), RL reads verl's columns (`prompt`,
    `reward_model.ground_truth`, `data_source`, `extra_info`).
    """

    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    # null reads all of them.
    train_max_samples: int | None = _number(None, ge=1)
    val_max_samples: int | None = _number(None, ge=1)
    shuffle: bool = True
    on_bad_row: Literal["error", "skip"] = "error"
    # SFT only: tokens a row holds, and whether short documents share one.
    max_length: int = _number(1024, ge=2)
    packing: bool = True
    # RL with algorithm.filter_groups only: prompts of one generation batch; null takes train_batch_size.
    gen_batch_size: int | None = _number(None, ge=1)
    # A document longer than max_length (SFT), or a prompt longer than rollout.max_prompt_length (RL; not truncate).
    on_too_long: Literal["error", "skip", "truncate"] = "error"


@dataclass
class OptimConfig:
    """AdamW and its schedule: `warmup_steps` or `warmup_ratio` warms it up; `max_grad_norm=0` clips nothing."""

    lr: float = _number(1e-5, gt=0)
    # Peak rate of the MTP block; null takes lr.
    mtp_lr: float | None = _number(None, gt=0)
    weight_decay: float = _number(0.0, ge=0)
    betas: tuple[float, float] = _number((0.9, 0.999), ge=0, lt=1)
    max_grad_norm: float = _number(1.0, ge=0)
    warmup_steps: int | None = _number(None, ge=0)
    warmup_ratio: float = _number(0.0, ge=0, le=1)
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

    # "auto" takes CUDA where there is one.
    device: str = "auto"
    # Precision of the forward pass; "none" computes in the weights' own (model.dtype).
    autocast: Autocast = "none"
    activation_recompute: bool = False
    # A loss or gradient that is not finite: stop, or drop that step.
    on_nonfinite: Literal["stop", "skip"] = "stop"
    # The rest is for ranks that share the model (docs/launch.md), whose weights lie in shards (FSDP2).
    # Ranks to one copy of the model: fewer than all make replicas (HSDP); null is all.
    fsdp_size: int | None = _number(None, ge=1)
    # Precision that weights are gathered and computed in, and that gradients are summed in; null is their own.
    param_dtype: Literal["bfloat16"] | None = None
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    # Free a layer's gathered weights after its forward pass, and gather them again for the backward pass.
    reshard_after_forward: bool = True

    def validate(self, prefix: str) -> None:
        if self.autocast != "none" and self.param_dtype is not None:
            raise UsageError(
                f"{prefix}autocast and {prefix}param_dtype both set the forward pass's precision: keep one"
            )


@dataclass
class DistributedConfig:
    """The processes of launch=torchrun, by torchrun's names. Under an outer torchrun only `timeout_s` counts."""

    nproc_per_node: int = _number(1, ge=1)
    nnodes: int = _number(1, ge=1)
    # With several machines: HOST:PORT of one of them, and a name of the run, the same on all.
    rdzv_endpoint: str | None = None
    rdzv_id: str = "forerun"
    # Seconds that a rank waits for the others, at the start and in every exchange, before it fails.
    timeout_s: float = _number(1800.0, gt=0)
    # Seconds that ranks get to end after another one failed; then they are killed.
    shutdown_timeout_s: int = _number(30, ge=0)

    def validate(self, prefix: str) -> None:
        if (self.nnodes > 1) != (self.rdzv_endpoint is not None):
            raise UsageError(
                f"{prefix}nnodes={self.nnodes} with {prefix}rdzv_endpoint={self.rdzv_endpoint or 'null'}: several "
                "machines meet at the HOST:PORT of one of them, and one machine needs none"
            )


@dataclass
class TrainerConfig:
    """Length, cadence and output of a run. A frequency of -1 switches that off; 0 is not a frequency."""

    total_steps: int = _number(100, ge=1)
    save_freq: int = _number(-1, ge=-1)
    test_freq: int = _number(-1, ge=-1)
    output_dir: str = "runs/forerun"
    seed: int = _number(0, ge=0)
    # Go on from the newest checkpoint in output_dir, if there is one.
    resume: bool = True
    # Newest checkpoints that are kept; 0 keeps all.
    save_total_limit: int = _number(2, ge=0)
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
class RolloutConfig:
    """How responses are sampled: `n` for each prompt."""

    engine: Literal["native", "vllm", "sglang"] = "native"
    n: int = _number(8, ge=1)
    temperature: float = _number(1.0, ge=0)
    top_p: float = _number(1.0, gt=0, le=1)
    top_k: int = _number(0, ge=0)
    max_prompt_length: int = _number(512, ge=1)
    max_response_length: int = _number(256, ge=1)
    # Requests that are decoded together.
    max_num_seqs: int = _number(16, ge=1)
    # Round alike in every run, so that a resumed one repeats an uninterrupted one to the bit. Otherwise the engine
    # times the spellings of small matrix products on this machine and takes the fastest.
    deterministic: bool = False
    # native: draft mtp.num_speculative_tokens at every step, or as many of them as measurements say pay.
    depth_control: Literal["fixed", "auto"] = "fixed"
    # vllm and sglang run outside this process. `python` is the interpreter of their environment, to start one that ends
    # with the run; `base_url` takes one of this machine that runs already, on a checkpoint of the same model.
    python: str | None = None
    base_url: str | None = None
    # Of one that is started; "auto" is the checkpoint's.
    dtype: str = "auto"
    tensor_model_parallel_size: int = _number(1, ge=1)
    gpu_memory_utilization: float | None = _number(None, gt=0, le=1)
    enforce_eager: bool = False
    update_weights_bucket_megabytes: int = _number(256, ge=1)
    # vllm: further arguments of vLLM's EngineArgs, {name: value}.
    engine_kwargs: dict[str, Any] = field(default_factory=dict)

    def validate(self, prefix: str) -> None:
        if self.engine == "native":
            for name in ("python", "base_url"):
                if getattr(self, name) is not None:
                    raise UsageError(f"{prefix}{name} is of {prefix}engine=vllm and sglang: unset it, or set engine")
        elif (self.python is None) == (self.base_url is None):
            raise UsageError(
                f"{prefix}engine={self.engine} needs {prefix}python (the interpreter of its environment, to start one) "
                f"or {prefix}base_url (one that runs): set one of them"
            )
        elif self.depth_control == "auto":
            raise UsageError(f"{prefix}depth_control=auto is of {prefix}engine=native: {self.engine} drafts as started")
        if self.engine == "sglang" and self.engine_kwargs:
            raise UsageError(f"{prefix}engine_kwargs is of {prefix}engine=vllm")


@dataclass
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups with nothing to learn from are dropped and further prompts drawn in their place.

    A step trains on `train_batch_size` groups; what was sampled beyond that is dropped too.
    """

    enable: bool = False
    # What must differ within a group: "reward" (the overlong penalty included, KL not), "acc" (the reward's own score),
    # or a numeric field of the dict that the reward function returns.
    metric: str = "reward"
    # Generation batches for one step; 0 sets no limit. With fewer groups by then the step trains on those.
    max_num_gen_batches: int = _number(10, ge=0)


@dataclass
class KLControlConfig:
    """The coefficient of the KL penalty in the reward; fixed."""

    kl_coef: float = _number(0.001, gt=0)


@dataclass
class RolloutCorrectionConfig:
    """The gap between the rollout's and the trainer's log-probs: weights, rejection, or neither (verl's names)."""

    rollout_is: ImportanceLevel | None = None
    # The largest weight; a range, "0.5_5.0", gives weights outside it 0 (quote it in YAML).
    rollout_is_threshold: str = "2.0"
    # Criteria separated by commas (`forerun.algorithms.rejection`), and one threshold for all or one for each.
    rollout_rs: str | None = None
    rollout_rs_threshold: str | None = None
    # Take the rollout's log-probs for the old policy's: the clipped ratio then covers the gap, and saves a forward.
    bypass_mode: bool = False

    def validate(self, prefix: str) -> None:
        upper, _ = self.importance_bounds(prefix)
        if upper < 1:
            raise UsageError(
                f"{prefix}rollout_is_threshold={self.rollout_is_threshold} must be at least 1, or a range such as "
                "'0.5_5.0', in quotes: without them YAML reads 0.5_5 as 0.55"
            )
        if (self.rollout_rs is None) != (self.rollout_rs_threshold is None):
            raise UsageError(f"{prefix}rollout_rs and {prefix}rollout_rs_threshold go together: set both or neither")
        self.criteria(prefix)
        if self.bypass_mode and (self.rollout_is is not None or self.rollout_rs is not None):
            raise UsageError(
                f"{prefix}bypass_mode=true leaves rollout_is and rollout_rs nothing to correct: the old policy is the "
                "rollout's own; unset one or the other"
            )

    def importance_bounds(self, prefix: str = "") -> tuple[float, float | None]:
        """(upper, lower) of `importance_weights`."""
        try:
            lower, upper = parse_range(self.rollout_is_threshold)
        except ValueError as error:
            raise UsageError(f"{prefix}rollout_is_threshold: {error}") from None
        return upper, lower

    def criteria(self, prefix: str = "") -> dict[str, Bounds]:
        """The criteria of `rejection_mask`; none where nothing is rejected."""
        if self.rollout_rs is None or self.rollout_rs_threshold is None:
            return {}
        try:
            return parse_criteria(self.rollout_rs, self.rollout_rs_threshold)
        except ValueError as error:
            raise UsageError(f"{prefix}rollout_rs with {prefix}rollout_rs_threshold: {error}") from None


@dataclass
class AlgorithmConfig:
    """The policy-gradient estimator (docs/algorithms.md). Clip ratios of 0.2 and 0.2 are PPO's, 0.2 and 0.28 DAPO's."""

    adv_estimator: AdvEstimator = "grpo"
    # false is Dr. GRPO's, with loss_agg_mode=seq-mean-token-sum-norm.
    norm_adv_by_std_in_grpo: bool = True
    # gspo: one ratio for each sequence; it has no dual clip and leaves clip_ratio_c alone.
    loss_mode: Literal["vanilla", "gspo"] = "vanilla"
    clip_ratio_low: float = _number(0.2, gt=0, lt=1)
    clip_ratio_high: float = _number(0.2, gt=0)
    # Dual clip: no loss at a negative advantage is larger than -clip_ratio_c times it; null switches it off.
    clip_ratio_c: float | None = _number(3.0, gt=1)
    loss_agg_mode: LossAggMode = "token-mean"
    # Of seq-mean-token-sum-norm; null takes rollout.max_response_length.
    loss_scale_factor: float | None = _number(None, gt=0)
    # KL against the policy that the run started from, which is kept beside the model (its memory once more): as a
    # penalty in the reward (kl_penalty, kl_ctrl), or as a term of the loss.
    use_kl_in_reward: bool = False
    kl_penalty: KLEstimator = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    use_kl_loss: bool = False
    kl_loss_coef: float = _number(0.001, gt=0)
    kl_loss_type: KLLossType = "low_var_kl"
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def validate(self, prefix: str) -> None:
        if self.loss_scale_factor is not None and self.loss_agg_mode != "seq-mean-token-sum-norm":
            raise UsageError(
                f"{prefix}loss_scale_factor is of {prefix}loss_agg_mode=seq-mean-token-sum-norm, not of "
                f"{self.loss_agg_mode}: unset it, or change the mode"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the policy that the run started from must be kept."""
        return self.use_kl_in_reward or self.use_kl_loss


@dataclass
class OverlongBufferConfig:
    """DAPO's soft penalty: it grows linearly over the last `len` tokens before rollout.max_response_length."""

    enable: bool = False
    len: int = _number(64, ge=1)
    # The penalty of a response that fills max_response_length.
    penalty_factor: float = _number(1.0, gt=0)


@dataclass
class RewardConfig:
    """The reward, run in processes of its own (`forerun.rewards.runner`); `kwargs` are passed to the function.

    `function` is math, exact_match, reasoning_gym, auto (by data source), module:function or file.py:function.
    """

    function: str = "auto"
    kwargs: dict[str, Any] = field(default_factory=dict)
    # Seconds for one response; a longer one scores 0 and is counted.
    time_limit_s: float = _number(10.0, gt=0)
    num_workers: int = _number(1, ge=1)
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
    # "torchrun" starts distributed.nproc_per_node processes on this machine.
    launch: Literal["local", "torchrun"] = "local"
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    # Passes over the data; when given, it takes the place of trainer.total_steps.
    total_epochs: int | None = _number(None, ge=1)
    # Rows for each optimizer step, and how many of them go through the model at once.
    train_batch_size: int = _number(8, ge=1)
    micro_batch_size: int = _number(1, ge=1)
    # Head-only training: the trunk gets neither gradient nor update.
    freeze_trunk: bool = False
    # Start of a block for a model that has none: "fit" solves for its projection on the first training rows (seconds,
    # and far ahead of the others), "carry" repeats the trunk's last prediction, "plain" is random.
    mtp_init: Literal["fit", "carry", "plain"] = "fit"
    # Keep the frozen trunk's hiddens in memory, so that further epochs cost only the head.
    cache_hiddens: bool = False

    def validate(self, prefix: str) -> None:
        _need_model_and_data(self.model, self.data)
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
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    # "torchrun" starts distributed.nproc_per_node processes on this machine.
    launch: Literal["local", "torchrun"] = "local"
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    # Prompts for each rollout; the optimizer steps on ppo_mini_batch_size prompts at a time (each with its rollout.n
    # responses), ppo_epochs times over; micro_batch_size counts responses.
    train_batch_size: int = _number(8, ge=1)
    ppo_mini_batch_size: int = _number(8, ge=1)
    ppo_epochs: int = _number(1, ge=1)
    micro_batch_size: int = _number(4, ge=1)

    def validate(self, prefix: str) -> None:
        _need_model_and_data(self.model, self.data)
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
        if self.rollout.temperature == 0:
            raise UsageError("rollout.temperature=0 samples the same response every time: use a positive temperature")


def _need_model_and_data(model: ModelConfig, data: DataConfig) -> None:
    if not model.path:
        raise UsageError("model.path is not set: give the directory of a Hugging Face checkpoint")
    if not data.train_files:
        raise UsageError("data.train_files is empty: give at least one .jsonl or .parquet file, or hub:NAME")


def check(config: Any, prefix: str = "") -> None:
    """Check bounds and contradictions of a configuration built in Python; `load_config` has done so already.

    Raises:
        UsageError: names the dotted key, the value and what is allowed.
    """
    hints = typing.get_type_hints(type(config))
    for item in fields(config):
        key, value = prefix + item.name, getattr(config, item.name)
        if is_dataclass(value):
            check(value, key + ".")
            continue
        if not _is_choice(value, hints[item.name]):
            raise UsageError(f"{key}={value!r} must be {type_name(hints[item.name])}")
        _check_bounds(key, value, item.metadata)
    if not hasattr(config, "validate"):
        return
    if isinstance(config, MTPConfig):
        try:
            config.validate()
        except ValueError as error:
            raise UsageError(str(error)) from error
    else:
        config.validate(prefix)


def _is_choice(value: Any, hint: Any) -> bool:
    """Whether a value is one that its Literal, or Literal or None, names; True of every other type."""
    choices = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is Literal]
    if not choices or (value is None and type(None) in typing.get_args(hint)):
        return True
    return any(value in typing.get_args(choice) for choice in choices)


def _check_bounds(key: str, value: Any, bounds: Mapping[str, Any]) -> None:
    for number in value if isinstance(value, list | tuple) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise UsageError(f"{key}={number} must be a finite number")
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        for bound, limit in bounds.items():
            holds, words = _BOUNDS[bound]
            if not holds(number, limit):
                raise UsageError(f"{key}={number} must be {words} {limit}")


def type_name(hint: Any) -> str:
    """A type in the words of someone who writes YAML."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args)
    if origin is list:
        return f"a list (each item {type_name(args[0])}), written [a, b]"
    if origin is tuple:
        return f"a list of {len(args)} items (each {type_name(args[0])})"
    if origin is dict:
        return "a section of key: value pairs"
    names = {float: "a number", int: "an integer", bool: "true or false", str: "text", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
