"""How the megatron engine trains, and what it cannot: known before megatron-core is imported or a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from forerun.engines.megatron.layout import ParallelLayout
from forerun.engines.megatron.version import check_recompute
from forerun.engines.optimizer import OptimizerConfig
from forerun.errors import UsageError
from forerun.mtp.config import MTPConfig


@dataclass
class MegatronEngineConfig:
    """How the engine trains.

    Attributes:
        optimizer, train_trunk, chunk_size, on_nonfinite: as `forerun.engines.torch_engine.TorchEngineConfig`.
        recompute_granularity: "full" keeps only layer inputs and runs each layer again in backward, "selective" does so
            with the attention's core.
        use_distributed_optimizer: cut optimizer state over data-parallel ranks.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train_trunk: bool = True
    chunk_size: int | None = None
    on_nonfinite: Literal["stop", "skip"] = "stop"
    recompute_granularity: Literal["full", "selective"] | None = None
    use_distributed_optimizer: bool = True


def check_settings(config: MegatronEngineConfig, mtp: MTPConfig | None, layout: ParallelLayout) -> None:
    """Refuse what the engine cannot train.

    Raises:
        UsageError: the line says why, and what to set.
    """
    if not config.train_trunk and (mtp is None or not mtp.enable_train):
        raise UsageError("nothing to train: the trunk is frozen and no MTP block has mtp.enable_train=true")
    if not config.train_trunk and layout.pipeline_model_parallel_size > 1:
        raise UsageError(
            "a frozen trunk sends no gradient from one pipeline stage to the next: set "
            "engine.megatron.pipeline_model_parallel_size=1, or train the trunk"
        )
    if mtp is None:
        return
    if mtp.loss_top_k is not None:
        raise UsageError(
            "mtp.loss_top_k needs the whole vocabulary on one rank: set it to null, or engine.strategy=torch"
        )
    check_recompute(config.recompute_granularity)
