"""What every training engine takes and gives. A trainer knows this module and no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor
from transformers import PreTrainedModel

from forerun.data.batch import Batch
from forerun.errors import ForerunError
from forerun.mtp.config import MaskRule
from forerun.mtp.shift import depth_counts

if TYPE_CHECKING:
    from forerun.engines.ranks import RankGroup

LossFn = Callable[[Tensor, Batch], tuple[Tensor, Mapping[str, Tensor | float]]]
"""The main loss of one micro-batch.

Called with log_probs (float32 [B, S]; entry j is log p(t_j | t_<j) where `predicted_mask(batch)` is true, else 0) and
the micro-batch. Returns the loss and metrics. The losses of all micro-batches are *summed* into the step's loss, so a
loss function divides by a count of the whole step (all micro-batches, all ranks), which it knows before the step: then
any split of the batch has the gradient of the whole. Metrics are sums, added up over micro-batches; those whose name
ends in `_max` are merged by maximum.
"""


MainLoss = Callable[[Tensor, Tensor, Batch], tuple[Tensor, Mapping[str, Tensor | float]]]
"""(log_probs, entropies, micro-batch) -> (loss, metrics): both terms of the main loss, see `main_loss`."""


class NonFiniteError(ForerunError):
    """A loss or a gradient is NaN or infinite. The weights are those of the last good step."""


def predicted_mask(batch: Batch) -> Tensor:
    """bool [B, S]: token j is a supervised target with a predecessor in its document, so it has a log-probability."""
    return batch.target_mask.roll(1, dims=1)  # target_mask is False at the last position, so nothing wraps round


def main_loss(loss_fn: LossFn, entropy_loss_fn: LossFn | None = None) -> MainLoss:
    """The main loss out of its one or two terms, with the metrics that every engine adds to theirs."""

    def both(log_probs: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        loss, metrics = loss_fn(log_probs, batch)
        if entropy_loss_fn is not None:
            term, more = entropy_loss_fn(entropy, batch)
            loss, metrics = loss + term, {**metrics, **more}
        sums = {"loss": loss.detach(), "entropy_sum": entropy.detach().sum()}
        return loss, {**sums, "target_count": float(batch.num_targets), **metrics}

    return both


def merge_metrics(total: dict[str, float], new: Mapping[str, Tensor | float]) -> None:
    """Add `new` into `total` in place: `*_max` by maximum, everything else by sum."""
    for name, value in new.items():
        number = float(value)
        if name not in total:
            total[name] = number
        elif name.endswith("_max"):
            total[name] = max(total[name], number)
        else:
            total[name] += number


def step_depth_counts(batches: Sequence[Batch], num_depths: int, rule: MaskRule) -> list[int]:
    """N_k of a whole step, depth 1 first, so that every micro-batch of it divides by the same numbers."""
    totals = [0] * num_depths
    for batch in batches:
        counts = depth_counts(batch.document_ids, batch.loss_mask, num_depths, rule)
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
    return totals


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

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Trunk and MTP weights under Hugging Face names; what a rollout engine's `update_weights` takes."""
        ...

    def drafter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The MTP part of `named_weights` alone; empty without an MTP block."""
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
