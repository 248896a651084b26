"""Give a newly attached head its closed-form start from training rows, whatever its depth."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from forerun.data.batch import Batch
from forerun.engines.torch_engine import TorchEngine
from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier
from forerun.models.init import fit_projection
from forerun.report.progress import ProgressBar

logger = logging.getLogger(__name__)

# More tokens than the fit has unknowns per output (2d), for any trunk up to d = 8192, at the cost of one prefill.
FIT_TOKENS = 16_384


def fit_new_head(engine: TorchEngine, rows: Sequence[Batch], max_tokens: int = FIT_TOKENS) -> float:
    """Fit the projection to the trunk's hiddens of the first rows (see `models.init.fit_projection`), in place.

    Args:
        engine: of a model attached with init="carry".
        rows: training rows, of which as many are read as hold max_tokens.

    Returns:
        share of the target's variance that the fit explains.
    """
    model = engine.model
    if not isinstance(model, MTPCarrier):
        raise UsageError("the model carries no MTP block to initialise: attach one with forerun.attach(model, mtp)")
    chosen: list[Batch] = []
    tokens = 0
    for row in rows:
        if tokens >= max_tokens:
            break
        chosen.append(row)
        tokens += int((row.document_ids >= 0).sum())
    with ProgressBar("fit head", len(chosen), "rows") as progress:

        def trunk_hidden(index: int) -> Tensor:
            hidden = engine.trunk_hidden_states(chosen[index])
            progress.advance(1)
            return hidden

        rows_read = [(row.input_ids, row.document_ids) for row in chosen]
        # Every rank reads all rows: that is little work, and their heads start the same.
        explained = engine.ranks.rewrite(model.mtp.layers, partial(fit_projection, model, rows_read, trunk_hidden))
    logger.info("fitted the new head to %d tokens: %.0f %% of the variance explained", tokens, 100 * explained)
    return explained
