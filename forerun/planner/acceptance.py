"""Acceptance per depth of a checkpoint's own MTP block, teacher-forced on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.errors import UsageError, one_line

ROW_LENGTH = 512
MAX_TOKENS = 8192


def measure_acceptance(model_dir: Path, text: Path, temperature: float = 0.0) -> list[float]:
    """Share of positions at which the drafts of depths 1..k would all be accepted, for each depth k of the block.

    Args:
        model_dir: a checkpoint with an MTP block and a tokenizer.
        text: UTF-8 text like what the model writes in the rollouts; the first 8,192 tokens are used.
        temperature: 0 counts agreement with the trunk's greedy choice along the chain. Above 0 it is the product of
            the depths' expected acceptances under rejection sampling, sum min(p, q), as if they were independent.

    Raises:
        UsageError: no MTP block, no tokenizer, or a text that cannot be read or is too short.
    """
    import torch

    from forerun.models.carrier import MTPCarrier
    from forerun.models.loading import load
    from forerun.models.training import mtp_forward
    from forerun.models.trunk import base_model
    from forerun.mtp.stats import FIELDS, MTPStats

    words = read_text(text)
    model = load(model_dir).eval()
    if not isinstance(model, MTPCarrier):
        raise UsageError(f"{model_dir} carries no MTP block to measure: give --acceptance, as in 0.88,0.77,0.66")
    ids = load_tokenizer(model_dir)(words)["input_ids"][:MAX_TOKENS]
    if len(ids) < 64:
        raise UsageError(f"{text} is too short to measure on: give some pages of what the model writes")
    stats = MTPStats.zeros(model.mtp.num_depths)
    with torch.no_grad():
        for start in range(0, len(ids), ROW_LENGTH):
            input_ids = torch.tensor([ids[start : start + ROW_LENGTH]])
            hidden_states = base_model(model)(input_ids=input_ids, use_cache=False).last_hidden_state
            output = mtp_forward(
                model,
                hidden_states,
                input_ids=input_ids,
                position_ids=torch.arange(input_ids.shape[1])[None],
                document_ids=torch.zeros_like(input_ids),
                loss_mask=torch.ones_like(input_ids, dtype=torch.bool),
                temperature=temperature or 1.0,
                compare_with_trunk=True,
            )
            stats = stats.merge(output.stats)
    shares, product = [], 1.0
    for row in stats.sums.tolist():
        sums = dict(zip(FIELDS, row, strict=True))
        product *= sums["overlap"] / max(sums["teacher_count"], 1)
        shares.append(product if temperature else sums["chain_hits"] / max(sums["chain_count"], 1))
    # Deeper chains are counted over fewer positions, at the ends of rows: keep noise from making them rise.
    return [min(shares[: k + 1]) for k in range(len(shares))]


def read_text(file: Path) -> str:
    """A file's text, which has to hold some.

    Raises:
        UsageError: it cannot be read as UTF-8 text, or is empty.
    """
    try:
        words = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the text {file}: {reason}") from None
    if not words.strip():
        raise UsageError(f"{file} is empty: give some pages of what the model writes")
    return words


def load_tokenizer(model_dir: str | Path) -> Any:
    """The model's tokenizer.

    Raises:
        UsageError: there is none that can be used.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise UsageError(
            f"measuring needs the model's tokenizer, and {model_dir} has none that can be used: copy the tokenizer "
            f"files there ({one_line(error):.120})"
        ) from None
