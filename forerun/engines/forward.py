"""Batches through a model of PyTorch's: the trunk's hiddens, log-probabilities, the MTP loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.data.batch import Batch
from forerun.engines.data_parallel import DataParallel
from forerun.engines.division import Part, division_for, put_back
from forerun.engines.hidden_cache import HiddenCache
from forerun.engines.shared_rows import Rows
from forerun.models.carrier import MTPCarrier
from forerun.models.training import MTPOutput, mtp_forward
from forerun.models.trunk import base_model, project
from forerun.mtp.log_probs import chunked_log_probs
from forerun.mtp.shift import LookAhead, look_ahead_in_rows


class MTPLossFn(Protocol):
    """An MTP objective: trunk hiddens [B, S, d] of a micro-batch -> the scaled loss and its statistics.

    `counts` are N_k of the whole step (None: divide by the micro-batch's own); micro-batches' losses are summed.
    """

    def __call__(
        self,
        model: MTPCarrier,
        hidden_states: Tensor,
        batch: Batch,
        counts: Sequence[int] | None,
        *,
        temperature: float = 1.0,
        compare_with_trunk: bool = False,
    ) -> MTPOutput: ...


def default_mtp_loss(
    model: MTPCarrier,
    hidden_states: Tensor,
    batch: Batch,
    counts: Sequence[int] | None,
    *,
    temperature: float = 1.0,
    compare_with_trunk: bool = False,
    vocabulary: Tensor | None = None,
    attention_mask: Tensor | None = None,
    look_ahead: LookAhead = look_ahead_in_rows,
) -> MTPOutput:
    """The objective that the model's own MTPConfig describes; the last three as in `models.training.mtp_forward`."""
    return mtp_forward(
        model,
        hidden_states,
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        document_ids=batch.document_ids,
        loss_mask=batch.loss_mask,
        counts=counts,
        temperature=temperature,
        compare_with_trunk=compare_with_trunk,
        vocabulary=vocabulary,
        attention_mask=attention_mask,
        look_ahead=look_ahead,
    )


class Forward:
    """What the model makes of rows; every rank calls the same.

    Args:
        model: as `ranks` has it.
        ranks: those that share it.
        mtp_loss: the MTP objective.
        hidden_cache: keeps the hiddens of a frozen trunk.
        frozen_trunk: hiddens have no graph.
        chunk_size, autocast: as in `forerun.engines.torch_engine.TorchEngineConfig`.

    Attributes:
        parts: a micro-batch, divided as the trunk's layers want it (see `engines.division`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: DataParallel,
        mtp_loss: MTPLossFn,
        hidden_cache: HiddenCache | None,
        *,
        frozen_trunk: bool,
        chunk_size: int | None,
        autocast: str | None,
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.mtp_loss = mtp_loss
        self.hidden_cache = hidden_cache
        self.frozen_trunk = frozen_trunk
        self.chunk_size = chunk_size
        self._autocast = None if autocast is None else getattr(torch, autocast)
        self._device_type = (ranks.device or next(model.parameters()).device).type
        self.parts = division_for(model)

    def divided(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """What goes through the trunk for these, one after the other."""
        return (part.batch for batch in batches for part in self.parts(batch))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=self._autocast)

    @torch.no_grad()
    def whole_hidden_states(self, batch: Batch) -> Tensor:
        """[B, S, d] of whole rows, without a graph."""

        def one(part: Part) -> Tensor:
            rows = self.ranks.rows(part.batch)
            with self.autocast():
                return rows.whole(self.ranks.run(lambda: self.hidden_states(part.batch, rows)))

        parts = self.parts(batch)
        return put_back(parts, (one(part) for part in parts), batch)

    def hidden_states(self, batch: Batch, rows: Rows) -> Tensor:
        """The trunk's hiddens of the tokens that this rank holds, [B, S here, d], as its LM head takes them."""
        with torch.no_grad() if self.frozen_trunk else contextlib.nullcontext():
            if self.hidden_cache is not None:
                return rows.take(self.hidden_cache.get(batch, self._whole_rows))
            return self._run_trunk(rows)

    def _whole_rows(self, batch: Batch) -> Tensor:
        rows = self.ranks.rows(batch)
        return rows.whole(self._run_trunk(rows))

    def _run_trunk(self, rows: Rows) -> Tensor:
        batch, mask = rows.batch, rows.attention_mask
        trunk = base_model(self.model)
        out = trunk(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=mask, use_cache=False)
        return out.last_hidden_state

    def mtp(self, hidden_states: Tensor, rows: Rows, counts: Sequence[int] | None, **more: Any) -> MTPOutput:
        """The MTP objective on the tokens that this rank holds."""
        assert isinstance(self.model, MTPCarrier)
        if rows.attention_mask is not None:
            more |= {"attention_mask": rows.attention_mask, "look_ahead": rows.look_ahead}
        return self.mtp_loss(self.model, hidden_states, rows.batch, counts, **more)

    def log_probs(self, hidden_states: Tensor, batch: Batch, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
        """(log_probs, entropy), float32 [B, S] aligned to tokens, zero where nothing is predicted; of whole rows."""
        positions, following = rows.take(batch.target_mask), rows.take(batch.input_ids.roll(-1, dims=1))
        values, entropies = chunked_log_probs(
            hidden_states[positions],
            following[positions],
            lambda hidden: project(self.model, hidden),
            self.chunk_size,
            temperature,
        )
        blank = torch.zeros(positions.shape, dtype=values.dtype, device=values.device)
        # Position i predicts token i + 1; the last one predicts nothing.
        log_probs, entropy = (
            rows.whole(blank.masked_scatter(positions, found)).roll(1, dims=1) for found in (values, entropies)
        )
        return log_probs, entropy
