"""How vLLM is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.errors import UsageError
from forerun.models import configuration_mimo
from forerun.rollout.served import ServedFiles, written_dtype

# Arguments of EngineArgs that are not for `engine_kwargs` of an RL run, and what decides them.
SET_BY_FORERUN = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    "max_model_len": "rollout.max_prompt_length + max_response_length",
    "max_num_seqs": "rollout.max_num_seqs",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "enforce_eager": "rollout.enforce_eager",
    "seed": "trainer.seed",
    "speculative_config": "mtp.num_speculative_tokens",
    "per_request_spec_decode_metrics": "Forerun",
    "generation_config": "Forerun",
    "logprobs_mode": "Forerun",
    "worker_extension_cls": "Forerun",
}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class LaunchSettings:
    """Settings of a vLLM that we start.

    Attributes:
        python: the interpreter of the environment that vLLM is installed in.
        num_speculative_tokens: tokens per draft, 0 for no drafting.
        method: vLLM's speculative method.
        dtype: "auto" is the checkpoint's. (vLLM's own "auto" makes float32 ones bfloat16.)
        max_model_len: longest prompt + completion; None is the model's context.
        max_num_seqs: requests that run at once.
        gpu_memory_utilization: share of the memory that vLLM takes in all (on a CPU, too), None for vLLM's default.
        kv_cache_bytes: size of the cache in its place.
        seed: for requests that bring none.
        enforce_eager: run without compilation and CUDA graphs; it starts in seconds.
        enable_prefix_caching: None for vLLM's default. Hybrid trunks need False on a CPU.
        sleep_mode: have `sleep` give the GPU's memory back. Not on a CPU.
        trust_remote_code: run Python files of the checkpoint. None trusts configuration_mimo.py as `forerun convert`
            writes it, and nothing else.
        engine_args: any other argument of vLLM's EngineArgs.
        environment: variables for its process, such as VLLM_CPU_OMP_THREADS_BIND.
    """

    python: str | Path
    num_speculative_tokens: int = 1
    method: str = "mtp"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    gpu_memory_utilization: float | None = None
    kv_cache_bytes: int | None = None
    seed: int = 0
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    sleep_mode: bool = False
    trust_remote_code: bool | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 0:
            raise UsageError(f"num_speculative_tokens={self.num_speculative_tokens} must not be negative")


def engine_arguments(model_dir: str | Path, settings: LaunchSettings) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs.

    Raises:
        UsageError: the checkpoint is none that vLLM can draft with, or brings code that nobody vouched for.
    """
    model_dir = Path(model_dir).resolve()
    served = ServedFiles(model_dir)
    drafts = settings.num_speculative_tokens > 0
    if drafts and served.depth == 0:
        raise UsageError(f"{model_dir} carries no MTP block: launch it with num_speculative_tokens=0")
    if drafts and not served.family.model_types:
        raise UsageError(
            f"vLLM knows no drafter for {model_dir}: run `forerun convert {model_dir} OUT --to mimo` first"
        )
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "dtype": written_dtype(served.config) if settings.dtype == "auto" else settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "seed": settings.seed,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enable_sleep_mode": settings.sleep_mode,
        "trust_remote_code": _trusted(model_dir, served.config, settings.trust_remote_code),
        "skip_tokenizer_init": not any((model_dir / name).exists() for name in _TOKENIZERS),
        "generation_config": "vllm",  # a request says how to sample; the checkpoint's own defaults stay out
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "forerun_worker.ForerunWorker",
    }
    if drafts:
        arguments["speculative_config"] = {
            "method": settings.method,
            "num_speculative_tokens": settings.num_speculative_tokens,
        }
        arguments["per_request_spec_decode_metrics"] = "detailed"
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return arguments | dict(settings.engine_args)


def _trusted(model_dir: Path, config: Mapping[str, Any], asked: bool | None) -> bool:
    if asked is not None or not config.get("auto_map"):
        return bool(asked)
    own = Path(configuration_mimo.__file__)
    there = sorted(model_dir.glob("*.py"))
    if [path.name for path in there] == [own.name] and there[0].read_bytes() == own.read_bytes():
        return True
    raise UsageError(
        f"{model_dir} brings Python code (auto_map in config.json): read it, then pass trust_remote_code=True"
    )
