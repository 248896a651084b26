"""The section `engine.megatron`: how megatron-core divides a model and its batches over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.config_check import bounded
from forerun.engines.megatron.layout import ParallelLayout
from forerun.errors import UsageError


@dataclass
class MegatronConfig:
    """Megatron-Core's own names; what the sizes leave of the ranks are data-parallel replicas."""

    tensor_model_parallel_size: int = bounded(1, ge=1)
    pipeline_model_parallel_size: int = bounded(1, ge=1)
    # Chunks of layers on each pipeline rank, interleaved; null is one.
    virtual_pipeline_model_parallel_size: int | None = bounded(None, ge=1)
    context_parallel_size: int = bounded(1, ge=1)
    expert_model_parallel_size: int = bounded(1, ge=1)
    sequence_parallel: bool = False
    # Cut optimizer state over data-parallel ranks.
    use_distributed_optimizer: bool = True
    # Run again in backward: whole layers, or the attention's core; null keeps all activations.
    recompute_granularity: Literal["full", "selective"] | None = None

    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            sequence_parallel=self.sequence_parallel,
        )

    def validate(self, prefix: str) -> None:
        try:
            self.layout()
        except UsageError as error:
            raise UsageError(f"{prefix}{error}") from None
