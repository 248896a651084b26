"""How a model and its batch are divided over ranks, in Megatron-Core's words."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import UsageError


def stage_sizes(layers: int, stages: int) -> list[int]:
    """Layers per stage, in the order in which they run; the last stages, which bear head and MTP block, get fewer."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


@dataclass(frozen=True)
class ParallelLayout:
    """Megatron-Core's parallel sizes; what is left of the ranks are data-parallel replicas.

    Attributes:
        tensor_model_parallel_size: ranks that share every matrix.
        pipeline_model_parallel_size: ranks that hold the layers one after the other.
        virtual_pipeline_model_parallel_size: chunks of layers that each of them holds, interleaved; None is one.
        context_parallel_size: ranks that share every row of tokens.
        expert_model_parallel_size: ranks that share the experts of a layer, out of the data- and context-parallel ones.
        sequence_parallel: norms and dropout take a share of the positions on each tensor-parallel rank.

    Raises:
        UsageError: on construction, a size is below 1, or one is asked for that another is needed for.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model"):
            size = getattr(self, f"{name}_parallel_size")
            if size is not None and size < 1:
                raise UsageError(f"{name}_parallel_size={size} must be at least 1")
        if self.chunks > 1 and self.pipeline_model_parallel_size == 1:
            raise UsageError(
                f"virtual_pipeline_model_parallel_size={self.chunks} divides pipeline stages further: set "
                "pipeline_model_parallel_size above 1, or leave it out"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise UsageError(
                "sequence_parallel=true divides positions over the tensor-parallel ranks: set "
                "tensor_model_parallel_size above 1, or leave it out"
            )

    @property
    def chunks(self) -> int:
        """Chunks of layers that each pipeline rank holds."""
        return self.virtual_pipeline_model_parallel_size or 1

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas that see batches of their own.

        Raises:
            UsageError: the ranks do not divide so.
        """
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        if world_size % model:
            raise UsageError(
                f"{world_size} ranks cannot be divided into tensor x pipeline x context parallel = {model}: start a "
                "multiple of that"
            )
        replicas = world_size // model
        shared = replicas * self.context_parallel_size * self.tensor_model_parallel_size
        experts = self.expert_model_parallel_size * self.tensor_model_parallel_size  # they are tensor-parallel, too
        if shared % experts:
            raise UsageError(
                f"expert_model_parallel_size={self.expert_model_parallel_size} does not divide the "
                f"{replicas * self.context_parallel_size} data- and context-parallel ranks: set it to one that does"
            )
        return replicas

    def stage_sizes(self, layers: int) -> list[int]:
        """See the function; of all chunks.

        Raises:
            UsageError: fewer layers than stages.
        """
        stages = self.pipeline_model_parallel_size * self.chunks
        if layers < stages:
            raise UsageError(
                f"{layers} layers cannot fill {stages} pipeline stages: lower pipeline_model_parallel_size or "
                "virtual_pipeline_model_parallel_size"
            )
        return stage_sizes(layers, stages)
