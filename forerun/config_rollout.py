"""The section `rollout` of an RL run: how responses are sampled, and by which engine."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forerun.config_check import bounded
from forerun.errors import UsageError
from forerun.mtp.config import MTPConfig
from forerun.rollout.client import check_address
from forerun.rollout.protocol import SamplingParams
from forerun.rollout.sglang.launch import drafting_arguments
from forerun.rollout.sglang.sampling import why_not_filters
from forerun.rollout.vllm.launch import SET_BY_FORERUN
from forerun.rollout.vllm.sampling import why_not

# Of an engine that is started outside this process.
_OF_STARTED = (
    "dtype",
    "tensor_model_parallel_size",
    "gpu_memory_utilization",
    "enforce_eager",
    "engine_kwargs",
)
_OUTSIDE = ("python", "base_url", *_OF_STARTED)


@dataclass
class ValidationSampling:
    """How held-out prompts are answered: `n` times each, greedily unless there is a temperature."""

    n: int = bounded(1, ge=1)
    temperature: float = bounded(0.0, ge=0)
    top_p: float = bounded(1.0, gt=0, le=1)
    top_k: int = bounded(0, ge=0)

    def validate(self, prefix: str) -> None:
        if self.temperature == 0 and self != ValidationSampling():
            raise UsageError(
                f"{prefix}temperature=0 is greedy, which n, top_p and top_k do not change: unset those, or give it one"
            )


@dataclass
class RolloutConfig:
    """How responses are sampled: `n` for each prompt."""

    engine: Literal["native", "vllm", "sglang"] = "native"
    n: int = bounded(8, ge=1)
    temperature: float = bounded(1.0, ge=0)
    top_p: float = bounded(1.0, gt=0, le=1)
    top_k: int = bounded(0, ge=0)
    val_kwargs: ValidationSampling = field(default_factory=ValidationSampling)
    max_prompt_length: int = bounded(512, ge=1)
    max_response_length: int = bounded(256, ge=1)
    # Requests that are decoded together.
    max_num_seqs: int = bounded(16, ge=1)
    # Round alike in every run, so that a resumed one repeats an uninterrupted one to the bit. Otherwise the native
    # engine times the spellings of small matrix products on this machine and takes the fastest, and SGLang, which heeds
    # seeds in its deterministic mode alone, draws as it likes.
    deterministic: bool = False
    # native: draft mtp.num_speculative_tokens at every step, or as many of them as measurements say pay.
    depth_control: Literal["fixed", "auto"] = "fixed"
    # vllm and sglang run outside this process. `python` is the interpreter of their environment, to start one that ends
    # with the run; `base_url` takes one of this machine that runs already, on a checkpoint of the same model.
    python: str | None = None
    base_url: str | None = None
    # While the trainer trains, have the engine give its memory back. In asynchronous runs it never rests.
    free_cache_engine: bool = True
    # Of one that is started; "auto" is the checkpoint's.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # Ranks that train on one machine have an engine for each so many of them, on their GPUs.
    tensor_model_parallel_size: int = bounded(1, ge=1)
    gpu_memory_utilization: float | None = bounded(None, gt=0, le=1)
    enforce_eager: bool = False
    update_weights_bucket_megabytes: int = bounded(256, ge=1)
    # sglang: weights travel inside HTTP requests, 4/3 of their bytes for each of the server's GPUs, or by NCCL, once,
    # between GPUs of one machine. NCCL takes no GPU twice, and an engine that is started has the one that weights come
    # from: "auto" takes NCCL for a server at `base_url` on this machine, if the trainer computes on CUDA.
    weight_transport: Literal["auto", "request", "nccl"] = "auto"
    # vllm: further arguments of vLLM's EngineArgs, {name: value}.
    engine_kwargs: dict[str, Any] = field(default_factory=dict)

    def validate(self, prefix: str) -> None:
        if self.engine != "sglang" and self.weight_transport != "auto":
            raise UsageError(f"{prefix}weight_transport is of {prefix}engine=sglang: unset it")
        if self.engine == "native":
            if unused := self._set_among(_OUTSIDE):
                raise UsageError(
                    f"{prefix}{unused} is of {prefix}engine=vllm and sglang: unset it, or set {prefix}engine"
                )
            return
        if (self.python is None) == (self.base_url is None):
            raise UsageError(
                f"{prefix}engine={self.engine} needs {prefix}python (the interpreter of its environment, to start one) "
                f"or {prefix}base_url (one that runs): set one of them"
            )
        if self.depth_control == "auto":
            raise UsageError(f"{prefix}depth_control=auto is of {prefix}engine=native: {self.engine} drafts as started")
        if self.engine == "sglang" and self.engine_kwargs:
            raise UsageError(f"{prefix}engine_kwargs is of {prefix}engine=vllm")
        if self.engine == "vllm" and self.deterministic:
            raise UsageError(
                f"{prefix}deterministic=true is of {prefix}engine=native and sglang: vLLM promises no such"
            )
        if self.base_url is not None:
            if unused := self._set_among(_OF_STARTED):
                raise UsageError(f"{prefix}{unused} is of an engine that is started: unset it, or {prefix}base_url")
            check_address(self.base_url)
        elif shutil.which(Path(self.python or "").expanduser()) is None:
            raise UsageError(
                f"{prefix}python={self.python!r} is no interpreter here: give the one that has {self.engine}"
            )
        for name, setting in SET_BY_FORERUN.items():
            if name in self.engine_kwargs:
                raise UsageError(f"{prefix}engine_kwargs holds {name}, which {setting} decides: leave it out")

    @property
    def num_devices(self) -> int:
        """GPUs of an engine that is started."""
        more = (self.engine_kwargs.get(name) for name in ("pipeline_parallel_size", "data_parallel_size"))
        return math.prod([self.tensor_model_parallel_size, *(size for size in more if isinstance(size, int))])

    def _set_among(self, names: tuple[str, ...]) -> str | None:
        """The first of these fields that has not its default."""
        unset = RolloutConfig()
        return next((name for name in names if getattr(self, name) != getattr(unset, name)), None)


def check_ranks_to_an_engine(ranks: int, size: int) -> None:
    """Refuse a number of ranks of a machine that engines of so many GPUs do not divide.

    Raises:
        UsageError
    """
    if ranks > size and ranks % size:
        raise UsageError(
            f"rollout.tensor_model_parallel_size={size} must divide the number of ranks of a machine, {ranks}: so many "
            "share an engine (times vLLM's pipeline_parallel_size, if rollout.engine_kwargs has one)"
        )


def check_rollout(rollout: RolloutConfig, mtp: MTPConfig, *, on_ray: bool, asynchronous: bool) -> None:
    """Check how responses are sampled against how they are drafted, and both against what the engine can do.

    Args:
        rollout: how responses are sampled.
        mtp: how they are drafted.
        on_ray: the engine is in a Ray actor.
        asynchronous: the run gives an engine `max_num_seqs` requests at a time.

    Raises:
        UsageError: names the setting.
    """
    if rollout.base_url is not None and not asynchronous and rollout._set_among(("max_num_seqs",)):
        raise UsageError(
            f"rollout.max_num_seqs={rollout.max_num_seqs} is of an engine that is started: give the server at "
            "rollout.base_url its own such limit, and unset this one"
        )
    in_process = rollout.engine == "native" and not on_ray
    if in_process and (unused := rollout._set_among(("update_weights_bucket_megabytes",))):
        raise UsageError(
            f"rollout.{unused} is of rollout.engine=vllm and sglang, and of rollout workers on Ray: unset it"
        )
    if rollout.temperature == 0:
        raise UsageError("rollout.temperature=0 samples the same response every time: use a positive temperature")
    depth = mtp.speculative_num_steps if rollout.engine == "sglang" else mtp.num_speculative_tokens
    drafts = mtp.enable_rollout and depth > 0
    if drafts and mtp.acceptance == "greedy":
        raise UsageError(
            f"mtp.acceptance=greedy is not lossless with rollout.temperature={rollout.temperature}: use rejection or "
            "match"
        )
    if rollout.depth_control == "auto":
        if not drafts:
            raise UsageError("rollout.depth_control=auto has nothing to control: set mtp.enable_rollout=true")
        if rollout.deterministic:
            raise UsageError(
                "rollout.deterministic=true with rollout.depth_control=auto, which goes by measured times: unset one"
            )
    if drafts and rollout.python is not None:
        if rollout.engine == "vllm" and not mtp.method.endswith("mtp"):
            raise UsageError(f"mtp.method={mtp.method!r}: with vLLM the model's own MTP block drafts under mtp alone")
        if rollout.engine == "sglang":
            drafting_arguments(mtp)
    for prefix, wanted in (("rollout.", rollout), ("rollout.val_kwargs.", rollout.val_kwargs)):
        sampling = SamplingParams(temperature=wanted.temperature, top_p=wanted.top_p, top_k=wanted.top_k)
        reason: str | None = None
        if rollout.engine == "vllm":
            reason = why_not(sampling, speculative=drafts, has_tokenizer=True)
        elif rollout.engine == "sglang":
            reason = why_not_filters(sampling, drafts or rollout.base_url is not None)
        if reason is not None:
            raise UsageError(f"{prefix}{reason}")
