"""What a run refuses before it loads anything, and `forerun plan train` as well.

`check_config` reads configuration files at most. `check_ranks` asks for what a run of so many ranks needs on this
machine; `check_layout` is the part of it that holds on any.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forerun.checkpoint.reader import CheckpointReader
from forerun.config import EngineConfig, RLConfig, SFTConfig
from forerun.config_check import check
from forerun.config_rollout import check_ranks_to_an_engine
from forerun.engines.megatron.version import megatron_version
from forerun.errors import UsageError
from forerun.families import text_section
from forerun.models.config_overrides import overridden_config
from forerun.trainers.megatron_setup import check_megatron
from forerun.trainers.setup import resolve_device

logger = logging.getLogger(__name__)

# Rotary scalings that transformers computes from max_position_embeddings where no original_max_position_embeddings is.
_FROM_CONTEXT = ("yarn", "llama3", "longrope")


def check_config(config: SFTConfig | RLConfig, has_data: bool, has_model: bool) -> None:
    """Check a configuration; objects that the caller brings stand in for the paths that name them.

    Raises:
        UsageError: see `config_check.check`; the output directory is a file; model.path is no checkpoint; an override
            of a key that the model's config.json does not have; rollouts longer than the model's context.
    """
    model = replace(config.model, path=config.model.path or ("given" if has_model else ""))
    data = replace(config.data, train_files=config.data.train_files or (["given"] if has_data else []))
    check(replace(config, model=model, data=data))
    output = Path(config.trainer.output_dir)
    for place in (output, *output.parents):
        if place.exists() and not place.is_dir():
            raise UsageError(f"trainer.output_dir={output}: {place} is a file, name a directory")
    if has_model:
        return
    try:
        reader = CheckpointReader(config.model.path)
    except UsageError as error:
        raise UsageError(f"model.path: {error}") from None
    found = reader.config
    if config.model.override_config:
        found = overridden_config(reader, config.model.override_config, config.model.trust_remote_code)
    check_context(config, found)


def check_context(config: SFTConfig | RLConfig, found: Mapping[str, Any]) -> None:
    """Refuse rollouts that are longer than what a model reads.

    Args:
        found: its config.json. Engines other than native stretch its context by the factor of its rotary scaling, as
            vLLM does.

    Raises:
        UsageError
    """
    text = text_section(found)
    context = text.get("max_position_embeddings")
    if isinstance(config, SFTConfig) or not isinstance(context, int):
        return
    advice = f"set model.override_config.{'' if text is found else 'text_config.'}max_position_embeddings"
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    original = "original_max_position_embeddings"
    if rope.get("rope_type", rope.get("type")) in _FROM_CONTEXT and original not in {**text, **rope}:
        advice += f", and there rope_scaling.{original}={context}, which keeps its positions as they are,"
    if config.rollout.engine != "native" and isinstance(rope.get("factor"), int | float):
        context = int(context * max(1.0, rope["factor"]))
    longest = config.rollout.max_prompt_length + config.rollout.max_response_length
    if longest > context:
        raise UsageError(
            f"rollout.max_prompt_length + rollout.max_response_length = {longest} is more than the model's context of "
            f"{context}: lower one, or {advice} if the model can do more"
        )


def check_ranks(config: SFTConfig | RLConfig, num_ranks: int | None) -> None:
    """Check what a configuration says of ranks against their number; None is one process that shares with nobody.

    Raises:
        UsageError: see `check_layout` and `check_ranks_to_an_engine`; `engine.device` is not on this machine, or
            megatron-core is missing.
    """
    if config.engine.strategy == "megatron":
        megatron_version()
    here = os.environ.get("LOCAL_WORLD_SIZE", "")  # an outer torchrun's
    if isinstance(config, RLConfig) and config.starts_engines and here.isdecimal():
        check_ranks_to_an_engine(int(here), config.rollout.num_devices)
    check_layout(config, num_ranks, resolve_device(config.engine))


def warn_of_float32(config: SFTConfig | RLConfig, num_ranks: int, device: torch.device) -> None:
    """Say so where a GPU computes in float32, the default, which is exact and a small part of its speed."""
    engine = config.engine
    if device.type != "cuda" or config.model.dtype != "float32":
        return
    if engine.strategy == "megatron":
        setting = "model.dtype=bfloat16"
    elif engine.autocast != "none" or engine.param_dtype is not None:
        return
    else:
        setting = "engine.param_dtype=bfloat16" if num_ranks > 1 else "engine.autocast=bfloat16"
    logger.warning("training computes in float32, many times slower than in bfloat16: set %s", setting)


def check_layout(config: SFTConfig | RLConfig, num_ranks: int | None, device: torch.device) -> None:
    """Check what a configuration says of ranks that each have such a device.

    Raises:
        UsageError: a setting that would have no effect, or that several ranks cannot do.
    """
    engine = config.engine
    if isinstance(config, RLConfig) and config.rollout.weight_transport == "nccl" and device.type == "cpu":
        raise UsageError(
            "rollout.weight_transport=nccl is between GPUs, and this run trains on the CPU: set request, or auto"
        )
    if engine.strategy == "megatron":
        check_megatron(config, num_ranks or 1, device)
        return
    if num_ranks is None:
        unused = EngineConfig()
        names = (
            "fsdp_size",
            "param_dtype",
            "reduce_dtype",
            "reshard_after_forward",
            "context_parallel_size",
            "cpu_offload",
        )
        for name in names:
            if (value := getattr(engine, name)) != getattr(unused, name):
                raise UsageError(
                    f"engine.{name}={str(value).lower()} is for ranks that share the model: unset it, or set "
                    "launch=torchrun"
                )
        return
    if engine.fsdp_size is not None and num_ranks % engine.fsdp_size:
        raise UsageError(f"engine.fsdp_size={engine.fsdp_size} must divide the number of ranks, {num_ranks}")
    if num_ranks % (size := engine.context_parallel_size):
        raise UsageError(f"engine.context_parallel_size={size} must divide the number of ranks, {num_ranks}")
    if ":" in engine.device:
        raise UsageError(f"engine.device={engine.device} would put every rank there: use auto, cpu or cuda")
    if engine.cpu_offload and device.type == "cpu":
        raise UsageError("engine.cpu_offload=true, and engine.device is the CPU already: unset one of them")
    if isinstance(config, SFTConfig) and config.cache_hiddens:
        raise UsageError(
            "cache_hiddens=true is for one process, and ranks run the trunk together: set cache_hiddens=false"
        )
