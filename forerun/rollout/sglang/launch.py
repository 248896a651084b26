"""An SGLang server of our own, and its launch arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forerun.errors import UsageError
from forerun.mtp.config import MTPConfig
from forerun.rollout.child import ChildProcess, environment_without
from forerun.rollout.local_server import start_server
from forerun.rollout.loopback import HOST, free_port

# Would change what log-probs mean.
_UNWANTED = ("SGLANG_RETURN_ORIGINAL_LOGPROB",)


@dataclass(frozen=True)
class LaunchSettings:
    """What to start. None leaves a setting to SGLang.

    Attributes:
        model_dir: a checkpoint in a layout that SGLang serves, see docs/serving.md.
        python: interpreter of the environment that SGLang is installed in.
        port: 0 takes a free one.
        tensor_parallel_size: GPUs.
        dtype: "auto" is the checkpoint's.
        max_num_seqs: requests that run at once; SGLang's own default while drafting is 48.
        max_model_len: longest prompt + completion.
        gpu_memory_utilization: share of the GPU's memory for weights and caches.
        enforce_eager: run without CUDA graphs.
        deterministic: results do not depend on the batch and seeds are obeyed; slower.
        sleeps: memory can be given back.
        keeps_weights: a copy in the CPU's memory survives that.
        trust_remote_code: run the Python files of the checkpoint.
        seed: SGLang's.
        start_timeout_s: seconds until it must answer.
        extra_arguments: appended as they are.
        environment: variables for its process.
    """

    model_dir: Path
    python: str = "python"
    port: int = 0
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    deterministic: bool = False
    sleeps: bool = True
    keeps_weights: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    start_timeout_s: float = 1200.0
    extra_arguments: tuple[str, ...] = field(default=())
    environment: Mapping[str, str] = field(default_factory=dict)


def launch_arguments(settings: LaunchSettings, mtp: MTPConfig | None, port: int) -> list[str]:
    """The arguments of sglang.launch_server.

    Raises:
        UsageError: drafting settings that SGLang would refuse, change on its own, or not draft with our block under.
    """
    arguments = ["--model-path", str(settings.model_dir)]
    arguments += ["--host", HOST, "--port", str(port), "--tp-size", str(settings.tensor_parallel_size)]
    # Defaults for sampling must not come from the checkpoint's generation_config.json.
    arguments += ["--dtype", settings.dtype, "--sampling-defaults", "openai", "--random-seed", str(settings.seed)]
    for name, value in (
        ("--max-running-requests", settings.max_num_seqs),
        ("--context-length", settings.max_model_len),
        ("--mem-fraction-static", settings.gpu_memory_utilization),
    ):
        if value is not None:
            arguments += [name, str(value)]
    for name, wanted in (
        ("--disable-cuda-graph", settings.enforce_eager),
        ("--enable-deterministic-inference", settings.deterministic),
        ("--enable-memory-saver", settings.sleeps),
        ("--enable-weights-cpu-backup", settings.keeps_weights),
        ("--trust-remote-code", settings.trust_remote_code),
    ):
        if wanted:
            arguments.append(name)
    if mtp is not None and mtp.enable_rollout and mtp.speculative_num_steps > 0:
        arguments += drafting_arguments(mtp)
    return [*arguments, *settings.extra_arguments]


def drafting_arguments(mtp: MTPConfig) -> list[str]:
    """Those of drafting with the model's own block, which is taken to be on.

    Raises:
        UsageError: see `launch_arguments`.
    """
    algorithm, steps, topk, tokens = (
        mtp.speculative_algorithm.upper(),
        mtp.speculative_num_steps,
        mtp.speculative_eagle_topk,
        mtp.speculative_num_draft_tokens,
    )
    if algorithm not in ("EAGLE", "NEXTN"):
        raise UsageError(
            f"mtp.speculative_algorithm={mtp.speculative_algorithm!r}: SGLang drafts with a model's own MTP block "
            "under EAGLE and NEXTN (two names of one thing)"
        )
    if topk < 1:
        raise UsageError(f"mtp.speculative_eagle_topk={topk} must be at least 1")
    if topk == 1 and tokens != steps + 1:
        raise UsageError(
            f"mtp.speculative_num_draft_tokens={tokens}: with speculative_eagle_topk=1 SGLang verifies "
            f"speculative_num_steps + 1 tokens; set it to {steps + 1}"
        )
    # A tree keeps the best of topk tokens at depth 1 and topk * topk at every further one.
    most = 1 + topk + (steps - 1) * topk * topk
    if not 2 <= tokens <= most:
        raise UsageError(
            f"mtp.speculative_num_draft_tokens={tokens} must lie between 2 and {most}, the largest tree of "
            f"speculative_num_steps={steps} and speculative_eagle_topk={topk}"
        )
    if mtp.acceptance == "rejection" and topk != 1:
        raise UsageError(
            f"mtp.acceptance=rejection with mtp.speculative_eagle_topk={topk}: SGLang rejects along a chain alone; "
            "set mtp.acceptance=match, or speculative_eagle_topk=1"
        )
    arguments = ["--speculative-algorithm", algorithm, "--speculative-num-steps", str(steps)]
    arguments += ["--speculative-eagle-topk", str(topk), "--speculative-num-draft-tokens", str(tokens)]
    # Without it SGLang accepts a draft with the target's probability of it, which is `match`'s rate.
    return [*arguments, "--speculative-use-rejection-sampling"] if mtp.acceptance == "rejection" else arguments


def launch(settings: LaunchSettings, mtp: MTPConfig | None) -> tuple[str, ChildProcess]:
    """Start a server on the loopback interface; returns its address and process once it answers.

    Raises:
        UsageError: settings that SGLang would not take, or no such interpreter or checkpoint.
        ForerunError: it did not come up.
    """
    if not settings.model_dir.is_dir():
        raise UsageError(f"{settings.model_dir} is not a directory: give the checkpoint that SGLang should serve")
    port = settings.port or free_port()
    url = f"http://{HOST}:{port}"
    arguments = launch_arguments(settings, mtp, port)
    environment = environment_without(_UNWANTED) | dict(settings.environment)
    return url, start_server(
        "SGLang", settings.python, "sglang.launch_server", arguments, url, environment, settings.start_timeout_s
    )
