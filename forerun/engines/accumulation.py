"""How an optimizer step adds up over micro-batches: loss functions, metrics, counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from forerun.data.batch import Batch
from forerun.mtp.config import MaskRule
from forerun.mtp.shift import depth_counts

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
