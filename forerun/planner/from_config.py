"""A training configuration as the planner sees it: what it trains, on how many ranks, and what its rollouts hold.

What a run would refuse for its configuration is refused here, by the same checks. What depends on this machine is not:
whether it has the devices, the data, the weights, and the output directory is the run's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.generic import is_flash_attention_requested

from forerun.config import ModelConfig, RLConfig, SFTConfig
from forerun.config_file import load_config, settings_of_one
from forerun.engines.context_parallel import check_attention_kinds
from forerun.models.config_overrides import ConfigFile, overridden_config, settings
from forerun.mtp.losses import default_chunk_size
from forerun.planner.hardware import BYTES, Hardware, Precision
from forerun.planner.serving_memory import Serving, serving
from forerun.planner.shape import FoundConfig, ModelShape, find_config, shape_of
from forerun.planner.training import Device, Layout, TrainingRun
from forerun.trainers.checks import check_context, check_layout
from forerun.trainers.setup import named_device


@dataclass(frozen=True)
class Job:
    """What is planned.

    Attributes:
        run: the training.
        rollout: what the rollout engine holds on a rank's device; None for SFT, or where a server that runs already
            is used.
        rollout_stays: bytes of it that stay while training: its weights, where it only drops its cache (native), or
            all of it.
        rollout_share: of a device's memory, which an engine that is started beside takes whatever it needs.
    """

    run: TrainingRun
    rollout: Serving | None = None
    rollout_stays: float = 0.0
    rollout_share: float | None = None


def read_config(path: Path | None, overrides: Sequence[str], model: str | None) -> SFTConfig | RLConfig:
    """The configuration of `forerun sft` or `forerun rl`, which of them by the settings that only one has.

    Args:
        model: stands in for model.path, which then need not be there.

    Raises:
        UsageError: as `load_config`.
    """
    if model is not None:
        overrides = [*overrides, f"model.path={model}"]
    is_rl = settings_of_one(RLConfig, SFTConfig, path, overrides)
    cls: type[SFTConfig | RLConfig] = RLConfig if is_rl else SFTConfig
    return load_config(cls, path, overrides)


def job_of(config: SFTConfig | RLConfig, hardware: Hardware | None) -> Job:
    """What a configuration amounts to, without its data or weights.

    A row counts as long as it may be: data.max_length, or prompt and response at their limits.

    Args:
        config: a checked one.
        hardware: what it would run on; None is a GPU, unless `engine.device` says otherwise.

    Raises:
        UsageError: model.path has no config.json and is no model that the planner knows; a run would refuse the layout
            or an override of config.json.
    """
    on_cpu = hardware is not None and hardware.name == "cpu"
    named = named_device(config.engine)
    device: Device = "cpu" if on_cpu or (named is not None and named.type == "cpu") else "cuda"
    check_layout(config, _num_ranks(config), torch.device(device))
    name, found = _config_file(config.model)
    check_context(config, found)
    shape = shape_of(found, name)
    if config.engine.strategy == "megatron":
        config.engine.megatron.layout().stage_sizes(len(shape.layers))
    elif config.engine.context_parallel_size > 1:
        linear = {"linear_attention"} if any(layer.state for layer in shape.layers) else set()
        sliding = {"sliding_attention"} if any(layer.window for layer in shape.layers) else set()
        check_attention_kinds(shape.name, linear | sliding)
    weight_bytes = BYTES[config.model.dtype]
    shape = replace(shape, precision=config.model.dtype)
    depths, chained = _depths(config, shape)
    layout = _layout(config)
    mixed = layout.shards > 1 and config.engine.param_dtype is not None
    autocast = config.engine.autocast != "none"
    compute = 2 if mixed or autocast else weight_bytes
    # Flash attention knows documents by their bounds: no mask, and keys and values are not repeated.
    masked = not is_flash_attention_requested(requested_attention_implementation=config.model.attn_implementation)
    common: dict[str, Any] = {
        "shape": shape,
        "layout": layout,
        "depths": depths,
        "chained": chained,
        "train_mtp": config.mtp.enable_train,
        "isolated": config.mtp.detach_encoder,
        "soft": config.mtp.loss != "ce",
        "chunk": config.mtp.chunk_size or default_chunk_size(device),
        "recompute": _recompute(config),
        "weight_bytes": weight_bytes,
        "compute_bytes": compute,
        "reduce_bytes": BYTES[config.engine.reduce_dtype] if config.engine.reduce_dtype else compute,
        "autocast": autocast,
        "device": device,
    }
    if isinstance(config, SFTConfig):
        rows = config.micro_batch_size
        return Job(
            TrainingRun(
                **common,
                train_trunk=not config.freeze_trunk,
                rows=rows,
                row_length=config.data.max_length,
                packed=masked and (config.data.packing or rows > 1),  # padding is a document of its own
                micro_batches=-(-config.train_batch_size // rows),
            )
        )
    limits = config.rollout.max_prompt_length + config.rollout.max_response_length
    row_length, responses = config.max_row_length, config.micro_batch_size
    by_tokens = row_length is not None
    if row_length is not None:
        responses = row_length // limits
    run = TrainingRun(
        **common,
        rows=1 if by_tokens else responses,
        row_length=row_length or limits,
        document_length=limits if by_tokens else None,
        packed=masked and responses > 1,
        micro_batches=-(-config.ppo_mini_batch_size * config.rollout.n // responses),
        reference=config.algorithm.needs_reference,
    )
    drafts = config.mtp.enable_rollout
    parallel = config.async_training
    if config.rollout.base_url is not None or (parallel.enable and config.launch == "ray"):
        return Job(run)  # what rolls out has devices of its own
    native = config.rollout.engine == "native"
    precision: Precision = shape.precision
    if config.rollout.dtype != "auto":
        precision = "float32" if config.rollout.dtype == "float32" else "bfloat16"
    held = serving(
        replace(shape, precision=precision),
        config.rollout.max_num_seqs,
        limits,
        cache=precision,
        devices=1 if native else config.rollout.tensor_model_parallel_size,
        depths=depths if drafts else 0,
    )
    share = None if native else config.rollout.gpu_memory_utilization
    if parallel.enable:  # it goes on while training
        return Job(run, held, parallel.num_workers * held.total, share)
    return Job(run, held, held.weights if native else held.total, share)


def _config_file(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The model's name, and its config.json with the run's overrides."""
    found = find_config(model.path)
    config = found.config
    if model.override_config and found.directory is not None:
        config = overridden_config(ConfigFile(found.directory, config), model.override_config, model.trust_remote_code)
    elif model.override_config:
        config = _with_sizes(found, model)
    return found.name, config


def _with_sizes(found: FoundConfig, model: ModelConfig) -> dict[str, Any]:
    """A known model's sizes with the overrides. Its other keys are not known here, so none is refused."""
    config = copy.deepcopy(found.config)
    for key, value in settings(model.override_config):
        *sections, last = key.removeprefix("text_config.").split(".")  # known sizes stand in no such section
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return config


def _num_ranks(config: SFTConfig | RLConfig) -> int | None:
    """Ranks that share the run; None is one process."""
    return None if config.launch == "local" else config.distributed.num_ranks


def _depths(config: SFTConfig | RLConfig, shape: ModelShape) -> tuple[int, int]:
    """MTP layers with weights of their own, and depths that the loss runs."""
    if not config.mtp.enable:
        return 0, 0
    if config.mtp.repeat_layer:
        return 1, config.mtp.num_layers
    depths = shape.depths or config.mtp.num_layers
    return depths, depths


def _layout(config: SFTConfig | RLConfig) -> Layout:
    engine, ranks = config.engine, _num_ranks(config) or 1
    if engine.strategy == "megatron":
        sizes = engine.megatron
        return Layout(
            "megatron",
            ranks,
            tensor=sizes.tensor_model_parallel_size,
            pipeline=sizes.pipeline_model_parallel_size,
            context=sizes.context_parallel_size,
            expert=sizes.expert_model_parallel_size,
            sequence=sizes.sequence_parallel,
            chunks=sizes.virtual_pipeline_model_parallel_size or 1,
            state_cut=sizes.use_distributed_optimizer,
        )
    shards = 1 if config.launch == "local" else engine.fsdp_size or ranks
    return Layout(
        ranks=ranks,
        shards=shards,
        context=engine.context_parallel_size,
        reshard=engine.reshard_after_forward,
        offload=engine.cpu_offload,
    )


def _recompute(config: SFTConfig | RLConfig) -> bool:
    if config.engine.strategy == "megatron":  # "selective" runs the attention's core again, which fused keeps little
        return config.engine.megatron.recompute_granularity == "full"
    return config.engine.activation_recompute
