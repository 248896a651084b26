"""From a checkpoint directory to a megatron engine: process groups, this rank's part of the model, its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forerun.checkpoint.ambiguity import refuse_ambiguous
from forerun.checkpoint.dequantise import refuse_quantised
from forerun.checkpoint.reader import CheckpointReader
from forerun.engines.megatron.engine import MegatronEngine
from forerun.engines.megatron.layout import ParallelLayout
from forerun.engines.megatron.model import build_model
from forerun.engines.megatron.objective import MTPModel
from forerun.engines.megatron.parallel import initialise
from forerun.engines.megatron.settings import MegatronEngineConfig, check_settings
from forerun.engines.megatron.weights import load_weights
from forerun.families import family_of, present_depth, trunk_layers
from forerun.models.config_overrides import overridden_config
from forerun.mtp.config import MTPConfig


def start_engine(
    path: str | Path,
    mtp: MTPConfig,
    layout: ParallelLayout,
    config: MegatronEngineConfig,
    *,
    dtype: torch.dtype = torch.float32,
    override_config: Mapping[str, Any] | None = None,
    seed: int = 0,
    timeout_s: float = 1800.0,
) -> MegatronEngine:
    """The engine of this rank. Every rank of the default process group calls it.

    Args:
        path: a Hugging Face checkpoint directory, with an MTP block if `mtp.enable` asks for one.
        dtype: of the weights; bfloat16 ones are updated in float32.
        override_config: see `forerun.models.config_overrides.overridden_config`.

    Raises:
        UsageError: what cannot be built or trained, with the reason; see `checkpoint.ambiguity` for files that are of
            two models, `checkpoint.dequantise` for quantised ones.
    """
    block = mtp if mtp.enable else None
    check_settings(config, block, layout)
    source = CheckpointReader(path)
    refuse_quantised(source)
    if override_config:
        source.config = overridden_config(source, override_config)
    family = family_of(source.config)
    depth, layers = present_depth(family, source.config, source.tensor_names), trunk_layers(source.config)
    refuse_ambiguous(source, lambda name: family.owns(name, depth, layers))
    initialise(layout, seed, timeout_s)
    chunks: Any = build_model(source.config, mtp, layout, model_class=MTPModel, dtype=dtype)
    load_weights(chunks, source)
    return MegatronEngine(chunks, block, config, source)
