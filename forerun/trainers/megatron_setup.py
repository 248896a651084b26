"""The megatron engine of a run's configuration. Nothing here imports megatron-core before it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forerun.config import RLConfig, SFTConfig
from forerun.engines.megatron.settings import MegatronEngineConfig, check_settings
from forerun.engines.optimizer import OptimizerConfig
from forerun.errors import UsageError
from forerun.mtp.config import MTPConfig

if TYPE_CHECKING:
    from forerun.engines.megatron.engine import MegatronEngine


def check_megatron(config: SFTConfig | RLConfig, num_ranks: int, device: torch.device) -> None:
    """Check a configuration with engine.strategy=megatron, before any model is loaded.

    Raises:
        UsageError: the device is no GPU, the ranks do not divide as asked, or a setting that the engine does not have.
    """
    if device.type != "cuda":
        raise UsageError("engine.strategy=megatron computes on CUDA devices only: set engine.strategy=torch")
    layout = config.engine.megatron.layout()
    layout.data_parallel_size(num_ranks)
    check_settings(_settings(config, OptimizerConfig(), _trains_trunk(config)), _block(config.mtp), layout)
    if isinstance(config, SFTConfig) and config.cache_hiddens:
        raise UsageError("cache_hiddens=true is of engine.strategy=torch: set it to false")


def make_megatron_engine(config: SFTConfig | RLConfig, optimizer: OptimizerConfig) -> MegatronEngine:
    """The engine of this rank, or of this process alone.

    Raises:
        UsageError: the checkpoint carries no MTP block where one is asked for, or megatron-core cannot be this model.
    """
    from forerun.engines.megatron.start import start_engine

    return start_engine(
        config.model.path,
        config.mtp,
        config.engine.megatron.layout(),
        _settings(config, optimizer, _trains_trunk(config)),
        dtype=getattr(torch, config.model.dtype),
        override_config=config.model.override_config,
        seed=config.trainer.seed,
        timeout_s=config.distributed.timeout_s,
    )


def _settings(config: SFTConfig | RLConfig, optimizer: OptimizerConfig, train_trunk: bool) -> MegatronEngineConfig:
    megatron = config.engine.megatron
    return MegatronEngineConfig(
        optimizer=optimizer,
        train_trunk=train_trunk,
        chunk_size=config.mtp.chunk_size,
        on_nonfinite=config.engine.on_nonfinite,
        recompute_granularity=megatron.recompute_granularity,
        use_distributed_optimizer=megatron.use_distributed_optimizer,
    )


def _trains_trunk(config: SFTConfig | RLConfig) -> bool:
    return not (isinstance(config, SFTConfig) and config.freeze_trunk)


def _block(mtp: MTPConfig) -> MTPConfig | None:
    return mtp if mtp.enable else None
