"""What every training engine takes and gives. A trainer knows this module and no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from transformers import PreTrainedModel

from forerun.data.batch import Batch
from forerun.engines.accumulation import LossFn
from forerun.engines.ranks import RankGroup
from forerun.errors import ForerunError
from forerun.models.weight_stream import WeightStream


class NonFiniteError(ForerunError):
    """A loss or a gradient is NaN or infinite. The weights are those of the last good step."""


class ReferencePolicy(Protocol):
    """What KL terms compare with: any training engine whose weights stay as they are."""

    def log_probs(self, batches: Sequence[Batch], temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        """As `TrainingEngine.log_probs`."""
        ...


@runtime_checkable
class TrainingEngine(Protocol):
    """Owns the model's trainable state: weights, optimizer, schedule, random numbers, step count."""

    global_step: int

    @property
    def model(self) -> PreTrainedModel | None:
        """What is trained, or this rank's shards of it; None if that is no Hugging Face model."""
        ...

    @property
    def ranks(self) -> RankGroup:
        """Those that share its steps."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens that the model has."""
        ...

    @property
    def max_position_embeddings(self) -> int | None:
        """How many tokens it reads at once; None if that is not known."""
        ...

    def forward_backward(
        self,
        batches: Sequence[Batch],
        loss_fn: LossFn,
        temperature: float = 1.0,
        entropy_loss_fn: LossFn | None = None,
    ) -> dict[str, float]:
        """Accumulate the gradient of the summed main loss and the grafted MTP loss over all micro-batches.

        `temperature` divides the logits behind the log-probabilities (RL: the rollout's). The MTP loss is
        divided by N_k of *all* these micro-batches, so they must be exactly one optimizer step's. `entropy_loss_fn` is
        a further term of the main loss, called as `loss_fn` is, with the entropies of the distributions at each token
        (nats, at that temperature, differentiable) in place of the log-probabilities.

        Returns:
            loss (main, summed), entropy_sum and target_count, the loss function's own metrics, and mtp/* (loss and
            per-depth statistics, None-valued ones left out).

        Raises:
            UsageError: no micro-batches, or none with a target.
            NonFiniteError: a loss is NaN or infinite and the engine is set to stop on that.
        """
        ...

    def step(self) -> dict[str, float]:
        """Clip, update, advance the schedule, clear gradients.

        Returns:
            grad_norm (trunk), mtp_grad_norm, lr, mtp_lr, skipped (1.0 when a non-finite gradient was dropped).

        Raises:
            NonFiniteError: as in `forward_backward`.
        """
        ...

    def log_probs(self, batches: Sequence[Batch], temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        """Teacher-forced (log_probs, entropy), each float32 [B, S] aligned to tokens, without a graph."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Held-out figures: loss (mean negative log-probability per target) and mtp/* per depth."""
        ...

    def frozen_copy(self) -> ReferencePolicy:
        """The policy as it is now: a second copy of the model on the same device, which is never updated.

        Raises:
            UsageError: it cannot be copied in this process.
        """
        ...

    def named_weights(self) -> WeightStream:
        """Trunk and MTP weights under Hugging Face names, the trunk's first; what a rollout engine's `update_weights`
        takes. Every rank calls it, and then reads as many."""
        ...

    def drafter_weights(self) -> WeightStream:
        """The MTP part of `named_weights` alone, without making the rest; empty without an MTP block."""
        ...

    def export(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory, MTP tensors included. A file of it is in memory at once.

        Raises:
            ForerunError: it could not be written; what was there stays.
        """
        ...

    def save(self, directory: Path, extra: Mapping[str, Any] | None = None, wait: bool = True) -> None:
        """Write everything a resume needs, whole or not at all; `extra` is JSON the trainer wants back.

        With `wait` off it returns as soon as the state as it is now is copied, and is written while training goes on:
        `finish_saves`, or the next save, waits for it and raises what went wrong.

        Raises:
            ForerunError: this checkpoint or the one before could not be written.
        """
        ...

    def finish_saves(self) -> None:
        """Wait for a checkpoint that is still being written.

        Raises:
            ForerunError: it could not be.
        """
        ...

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore what `save` wrote and return its `extra`.

        Raises:
            ForerunError: not a checkpoint of this model; the message names what is missing.
        """
        ...
