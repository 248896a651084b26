"""What a training run is, as far as its memory and traffic go: model, layout over ranks, batch, precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.errors import UsageError
from forerun.planner.shape import ModelShape

Engine = Literal["torch", "megatron"]
Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Layout:
    """How a model lies over ranks.

    Attributes:
        engine: torch (FSDP2, HSDP) or megatron.
        ranks: all of them.
        shards: torch: ranks to one copy of the model; 1 is whole weights on every rank.
        tensor, pipeline, context: megatron's parallel sizes; context also torch's.
        expert: megatron: ranks that the experts are dealt to, out of the data- and context-parallel ones; each expert
            is tensor-parallel as the rest is.
        sequence: megatron: norms take a share of the positions on each tensor-parallel rank.
        chunks: megatron: chunks of layers on each pipeline rank (virtual pipeline).
        state_cut: megatron: optimizer state is cut over the data-parallel ranks.
        reshard: torch: free a layer's gathered weights after its forward pass.
        offload: torch: weights, gradients and optimizer state lie in host memory.
    """

    engine: Engine = "torch"
    ranks: int = 1
    shards: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = True
    chunks: int = 1
    state_cut: bool = True
    reshard: bool = True
    offload: bool = False

    def __post_init__(self) -> None:
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context, "expert": self.expert}
        for name, size in {"ranks": self.ranks, "shards": self.shards, **sizes}.items():
            if size < 1:
                raise UsageError(f"{name}={size} ranks: give at least 1")
        whole = self.shards if self.engine == "torch" else self.tensor * self.pipeline * self.context
        if self.ranks % whole:
            raise UsageError(f"{self.ranks} ranks are no multiple of the {whole} that share one copy of the model")
        if self.ranks % (self.tensor * self.pipeline * self.expert):
            raise UsageError(f"expert={self.expert} must divide the ranks of a pipeline stage")

    @property
    def data(self) -> int:
        """Ranks, or groups of them, that each run micro-batches of their own."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    def __str__(self) -> str:
        if self.engine == "torch":
            if self.ranks == 1:
                name = "one process"
            elif self.shards == self.ranks:
                name = f"FSDP2 x {self.ranks}"
            else:
                name = f"HSDP {self.ranks // self.shards} x {self.shards}"
            return name + (f", CP {self.context}" if self.context > 1 else "") + (", offload" if self.offload else "")
        parts = [f"TP {self.tensor}", f"PP {self.pipeline}", f"EP {self.expert}", f"CP {self.context}"]
        kept = [part for part in parts if not part.endswith(" 1")]
        return " x ".join([*kept, f"DP {self.data}"])


@dataclass(frozen=True)
class TrainingRun:
    """One run.

    Attributes:
        shape: the model.
        layout: over ranks.
        depths: MTP layers that are there; repeated ones count once.
        chained: depths that the loss runs; more than `depths` where a layer repeats.
        train_trunk, train_mtp: what learns.
        isolated: the MTP loss reaches the MTP layers alone (mtp.detach_encoder).
        soft: the MTP loss compares with the trunk's distribution.
        rows, row_length: of a micro-batch.
        document_length: where rows are packed by tokens (ppo_max_token_len_per_gpu): of the longest, which bounds them.
        packed: a row may hold several documents, so attention gets a mask.
        micro_batches: of an optimizer step, over all ranks.
        chunk: positions whose logits exist at once.
        recompute: keep layer inputs only.
        weight_bytes: of a stored weight; gradients and optimizer moments are the same.
        compute_bytes: of a weight as it is gathered, and of an activation.
        reduce_bytes: of a gradient as it is summed over ranks.
        autocast: weights are cast for every product, and the hidden state stays as wide as they are.
        reference: a frozen copy of the policy is kept (KL terms).
        device: on "cuda" the optimizer's step takes no memory of its own.
    """

    shape: ModelShape
    layout: Layout = Layout()
    depths: int = 0
    chained: int = 0
    train_trunk: bool = True
    train_mtp: bool = False
    isolated: bool = False
    soft: bool = False
    rows: int = 1
    row_length: int = 1024
    document_length: int | None = None
    packed: bool = True
    micro_batches: int = 1
    chunk: int = 1024
    recompute: bool = False
    weight_bytes: float = 4
    compute_bytes: float = 4
    reduce_bytes: float = 4
    autocast: bool = False
    reference: bool = False
    device: Device = "cuda"

    @property
    def tokens(self) -> float:
        """Of a micro-batch on one rank."""
        return self.rows * self.row_length / self.layout.context

    @property
    def rounds(self) -> int:
        """Micro-batches that the busiest rank runs for an optimizer step."""
        return -(-self.micro_batches // self.layout.data)

    @property
    def trunk_parameters(self) -> int:
        """See `ModelShape.trunk`."""
        return self.shape.trunk

    @property
    def mtp_parameters(self) -> int:
        """Of the MTP layers and their projections."""
        return self.depths * self.shape.drafter.parameters

    @property
    def parameters(self) -> int:
        return self.trunk_parameters + self.mtp_parameters

    @property
    def trained_parameters(self) -> int:
        """Those with gradients and optimizer state."""
        return self.train_trunk * self.trunk_parameters + self.train_mtp * self.mtp_parameters
