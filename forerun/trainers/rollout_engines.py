"""The rollout engine that a configuration names: in this process, or vLLM or SGLang outside it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.checkpoint.files import linked
from forerun.checkpoint.reader import CheckpointReader
from forerun.config import RLConfig
from forerun.engines.handing_out import agree_on_weights, hand_out
from forerun.engines.protocol import TrainingEngine
from forerun.engines.ranks import RankGroup
from forerun.engines.torch_engine import TorchEngine
from forerun.errors import UsageError
from forerun.rollout.loopback import HOST
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import RolloutEngine
from forerun.rollout.served import written_dtype
from forerun.trainers.ranked import RankedRollout
from forerun.trainers.rollout_places import machine, own_place
from forerun.trainers.served_model import served_model
from forerun.trainers.setup import load_model, resolve_device


def make_rollout_engine(
    config: RLConfig,
    engine: TrainingEngine | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ranks: RankGroup | None = None,
) -> RolloutEngine:
    """The engine of `config.rollout`, with its own copy of the training engine's model, or in a process that does not
    train (None) with the model that the run starts from.

    On several ranks every one of them has a native engine. A vLLM or an SGLang is started for each
    `rollout.tensor_model_parallel_size` of them (see `own_place`), and a server that runs already is spoken to by
    rank 0, for all. All ranks call this.

    Raises:
        UsageError: the training engine holds no model that could be copied, or the rollout engine cannot run it.
        ForerunError: vLLM or SGLang does not start, or does not answer.
    """
    if config.engine.strategy == "megatron":
        engine = None  # no rank has the model whole
    if ranks is not None and ranks.size == 1:
        ranks = None
    if config.rollout.engine == "native":
        native = _native(config, engine, tokenizer, ranks)
        return native if ranks is None else RankedRollout(ranks, native)
    if (base_url := config.rollout.base_url) is not None:
        if ranks is None:
            return _connected(config, base_url)
        return RankedRollout(ranks, _connected(config, base_url) if ranks.rank == 0 else None)
    if ranks is not None:
        return _started_by_ranks(config, engine, tokenizer, ranks)
    with served_model(config, engine, tokenizer) as path:
        return _started(config, path, {})


def _started_by_ranks(
    config: RLConfig, engine: TrainingEngine | None, tokenizer: PreTrainedTokenizerBase | None, ranks: RankGroup
) -> RankedRollout:
    """An engine for each place that ranks have; those of a machine start on one directory."""
    hosts, device = ranks.collect(ranks.size, [machine()]), resolve_device(config.engine)
    place = ranks.on_each(lambda: own_place(ranks.rank, hosts, config.rollout.num_devices, device))
    with ExitStack() as directories, ExitStack() as failing:

        def write() -> Path | None:
            if place.writer != ranks.rank:
                return None
            return directories.enter_context(served_model(config, engine, tokenizer))

        def start() -> RolloutEngine | None:
            if not place.starts:
                return None
            assert path is not None
            started = _started(config, path, place.environment)
            failing.callback(started.close)
            return started

        try:
            path = ranks.collect(ranks.size, [ranks.on_each(write)])[place.writer]
            if path is not None and place.writer != ranks.rank:
                directories.enter_context(linked(path, Path(config.model.path)))
            rollout = RankedRollout(ranks, ranks.on_each(start))
            failing.pop_all()
            return rollout
        except Exception as error:
            failure = error
    with suppress(RuntimeError):  # the process of a rank that fails takes the others along: not before all are here
        ranks.collect(ranks.size, [None])
    raise failure


def _native(
    config: RLConfig,
    engine: TrainingEngine | None,
    tokenizer: PreTrainedTokenizerBase | None,
    ranks: RankGroup | None = None,
) -> NativeEngine:
    if not isinstance(engine, TorchEngine | None):
        raise UsageError(f"{type(engine).__name__} has no model in this process: give the trainer a rollout engine")
    return NativeEngine(
        _whole_model(config, engine, ranks),
        tokenizer=tokenizer,
        num_speculative_tokens=config.mtp.num_speculative_tokens if config.mtp.enable_rollout else 0,
        depth_control="auto" if config.rollout.depth_control == "auto" else None,
        acceptance=config.mtp.acceptance,
        max_num_seqs=config.rollout.max_num_seqs,
        products="linear" if config.rollout.deterministic else "measure",
        seed=config.trainer.seed,
    )


def _connected(config: RLConfig, base_url: str) -> RolloutEngine:
    """One in front of a server that was started elsewhere, if that drafts as the run's configuration says.

    Raises:
        UsageError
    """
    bucket_bytes, seed = config.rollout.update_weights_bucket_megabytes << 20, config.trainer.seed
    engine: RolloutEngine
    if config.rollout.engine == "vllm":
        from forerun.rollout.vllm.engine import VLLMEngine

        engine, setting = VLLMEngine.connect(base_url, bucket_bytes), "num_speculative_tokens"
    else:
        from forerun.rollout.sglang.engine import SGLangEngine

        way = _weight_transport(config)
        engine = SGLangEngine(base_url, transport=way, bucket_bytes=bucket_bytes, seed=seed)
        setting = "speculative_num_steps"
    depth = engine.num_speculative_tokens
    if depth != (getattr(config.mtp, setting) if config.mtp.enable_rollout else 0):
        engine.close()
        mend = f"set mtp.enable_rollout=true and mtp.{setting}={depth}" if depth else "set mtp.enable_rollout=false"
        raise UsageError(
            f"the server at {base_url} drafts {depth} tokens at a time, and this run is set to another depth: {mend}, "
            "or start the server otherwise"
        )
    return engine


def _started(config: RLConfig, path: Path, environment: Mapping[str, str]) -> RolloutEngine:
    """One of our own, with these variables, on a directory that it reads at its start only."""
    return (_vllm if config.rollout.engine == "vllm" else _sglang)(config, path, environment)


def _vllm(config: RLConfig, path: Path, environment: Mapping[str, str]) -> RolloutEngine:
    from forerun.rollout.vllm.engine import VLLMEngine
    from forerun.rollout.vllm.launch import LaunchSettings

    rollout = config.rollout
    assert rollout.python is not None
    settings = LaunchSettings(
        python=rollout.python,
        num_speculative_tokens=config.mtp.num_speculative_tokens if config.mtp.enable_rollout else 0,
        method=config.mtp.method,
        dtype=rollout.dtype,
        max_model_len=rollout.max_prompt_length + rollout.max_response_length,
        max_num_seqs=rollout.max_num_seqs,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        seed=config.trainer.seed,
        enforce_eager=rollout.enforce_eager,
        sleep_mode=rollout.free_cache_engine and not config.async_training.enable,
        trust_remote_code=config.model.trust_remote_code or None,
        engine_args={"tensor_parallel_size": rollout.tensor_model_parallel_size, **rollout.engine_kwargs},
        environment=environment,
    )
    return VLLMEngine.launch(path, settings, rollout.update_weights_bucket_megabytes << 20)


def _sglang(config: RLConfig, path: Path, environment: Mapping[str, str]) -> RolloutEngine:
    from forerun.rollout.sglang.engine import SGLangEngine
    from forerun.rollout.sglang.launch import LaunchSettings

    rollout = config.rollout
    assert rollout.python is not None
    settings = LaunchSettings(
        model_dir=path,
        python=rollout.python,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        # SGLang's own "auto" makes float32 ones float16.
        dtype=written_dtype(CheckpointReader(path).config) if rollout.dtype == "auto" else rollout.dtype,
        max_num_seqs=rollout.max_num_seqs,
        max_model_len=rollout.max_prompt_length + rollout.max_response_length,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        trust_remote_code=config.model.trust_remote_code,
        deterministic=rollout.deterministic,
        seed=config.trainer.seed,
        environment=environment,
    )
    return SGLangEngine.launch(
        settings,
        config.mtp,
        transport=_weight_transport(config),
        bucket_bytes=rollout.update_weights_bucket_megabytes << 20,
        seed=config.trainer.seed,
    )


def _weight_transport(config: RLConfig) -> Literal["request", "nccl"]:
    """`rollout.weight_transport`, decided."""
    rollout = config.rollout
    if rollout.weight_transport != "auto":
        return rollout.weight_transport
    here = rollout.base_url is not None and urlsplit(rollout.base_url).hostname in (HOST, "localhost")
    # On a machine with one GPU the server is on the trainer's, which NCCL does not take twice.
    several = resolve_device(config.engine).type == "cuda" and torch.cuda.device_count() > 1
    return "nccl" if here and several else "request"


def _whole_model(config: RLConfig, engine: TorchEngine | None, ranks: RankGroup | None) -> PreTrainedModel:
    """The training engine's model; where there is none, or that lies in shards, the model that the run starts from.

    Where several ranks are to have that, and all call this, the first one reads it and sends it to the others' devices.
    """
    if engine is not None and not engine.ranks.sharded:
        return engine.model
    device = resolve_device(config.engine)
    model = load_model(config.model, config.mtp, device, config.trainer.seed, ranks=ranks)
    if ranks is not None and agree_on_weights(model, ranks):
        hand_out([*model.parameters(), *model.buffers()], ranks, device)
    return model
