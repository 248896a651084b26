"""What the head of a checkpoint does when it runs: acceptance, controls that must fail, choices tried both ways.

A measure that cannot fail shows nothing, so each comes with its controls. The targets one token before and after the
right one must score less; the head with shuffled weights must fall to what knowing nothing is worth. The order of the
projection's input halves and what chained depths take are facts of the family's record; the other choice is run as
well, and reported where it is clearly the better one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from forerun.checkpoint.findings import Inspection
from forerun.doctor.forward import (
    Chaining,
    Row,
    Scores,
    constant_guess,
    other_trunk_hidden,
    score,
    shuffled,
    swapped_halves,
    trunk_rows,
)
from forerun.errors import ForerunError, UsageError, one_line
from forerun.models.carrier import MTPCarrier
from forerun.models.loading import load

# Every figure counts the same positions: those whose right target and both neighbours lie inside the row.
SHIFTS = (0, -1, 1)

ROW_LENGTH = 512
MAX_TOKENS = 8192

# A difference counts if it is beyond chance (standard errors) and large enough to matter.
STANDARD_ERRORS = 3.0
SMALLEST_DIFFERENCE = 0.02


def read_texts(file: Path | None) -> list[str]:
    """The texts to judge on: a file's, or the built-in ones.

    Raises:
        UsageError: the file cannot be read as UTF-8 text, or is empty.
    """
    if file is None:
        texts: list[str] = json.loads(resources.files("forerun.doctor").joinpath("prose.json").read_text("utf-8"))
        return texts
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read the text {file}: {reason}") from None
    if not text.strip():
        raise UsageError(f"{file} is empty: give some pages of text")
    return [text]


def load_rows(path: Path, texts: Sequence[str]) -> list[Tensor]:
    """Token ids of the texts, long [S] each, S <= ROW_LENGTH, MAX_TOKENS in all at most.

    Raises:
        UsageError: the checkpoint has no tokenizer that can be used, or the text is too short to judge on.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        encoded = [tokenizer(text)["input_ids"] for text in texts]
    except Exception as error:  # tokenizers raises bare Exceptions
        raise UsageError(
            f"--deep needs the model's tokenizer and {path} has none that can be used: copy the tokenizer files there "
            f"({one_line(error):.120})"
        ) from None
    rows = [
        torch.tensor(ids[start : start + ROW_LENGTH]) for ids in encoded for start in range(0, len(ids), ROW_LENGTH)
    ]
    rows = [row for row in rows if len(row) >= 8][: MAX_TOKENS // ROW_LENGTH]
    if sum(map(len, rows)) < 64:
        raise UsageError("the text is too short to judge on: give some pages with --text")
    return rows


def look_deep(path: Path, inspection: Inspection, text: Path | None) -> None:
    """Run the checkpoint on text and add what is found to `inspection`; its `deep` gets the figures.

    Nothing is run where there is no block, or where what is wrong already keeps the checkpoint from loading.

    Raises:
        UsageError: the text or the tokenizer cannot be used.
    """
    if inspection.declared_depth == 0 or inspection.present_depth == 0:
        inspection.notes.append("--deep has nothing to run: there is no MTP block")
        return
    rows = load_rows(path, read_texts(text))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        model = load(path)
        assert isinstance(model, MTPCarrier)
        model.eval().to(device)
        embedding: Any = model.get_input_embeddings()
        limit = embedding.weight.shape[0]
        if max(int(row.max()) for row in rows) >= limit:
            raise UsageError(f"the tokenizer makes ids that the embedding of {limit} tokens lacks: use the model's own")
        inspection.deep = judge(model, trunk_rows(model, [row.to(device) for row in rows]), inspection)
    except ForerunError as error:
        if inspection.problems:
            inspection.notes.append(f"not run, mend the problems first: {error}")
        else:
            inspection.report("does_not_run", f"the model cannot be run: {error}", "do what that says, and ask again")
        return
    inspection.checked.append("deep")
    inspection.deep |= {"text": "built-in" if text is None else str(text), "tokens": sum(map(len, rows))}


def judge(model: MTPCarrier, rows: Sequence[Row], inspection: Inspection) -> dict[str, Any]:
    """Measure every depth and its controls; returns the figures that docs/doctor.md lists and reports problems."""
    head: Any = model.get_output_embeddings()
    uniform = math.log(head.weight.shape[0])
    guess = constant_guess(rows)
    recurrence = model.mtp.recurrence
    scores = [score(model, rows, depth, recurrence, SHIFTS) for depth in range(1, model.mtp.num_depths + 1)]
    caused, choices = _first_depth_choices(model, rows, scores[0][0], inspection)
    depths = []
    for depth, (own, before, after) in enumerate(scores, start=1):
        with shuffled(model):
            broken = score(model, rows, depth, recurrence, SHIFTS)[0]
        depths.append(
            {
                "depth": depth,
                "positions": own.count,
                "acceptance": own.acceptance,
                "loss": own.mean_loss,
                "controls": {
                    "target_before": before.acceptance,
                    "target_after": after.acceptance,
                    "shuffled_head": broken.acceptance,
                },
            }
        )
        # What a cause explains is not reported again as a symptom.
        if not caused and not _report_shifted(depth, own, before, after, inspection):
            _report_symptoms(depth, own, broken, guess, uniform, inspection)
    return {
        "constant_guess": guess,
        "ln_vocabulary": uniform,
        "depths": depths,
        **choices,
        "recurrence": _recurrence(model, rows, inspection),
    }


def _first_depth_choices(
    model: MTPCarrier, rows: Sequence[Row], own: Scores, inspection: Inspection
) -> tuple[bool, dict[str, dict[str, Any]]]:
    """Depth 1 with the halves in the other order and with the trunk's other hidden; whether one of them was right.

    `own` is depth 1 as the record has it.
    """
    family = model.mtp_family
    with swapped_halves(model):
        swapped = score(model, rows, 1, model.mtp.recurrence, SHIFTS)[0]
    other_hidden: Scores | None
    try:
        with other_trunk_hidden(model):
            other_hidden = score(model, rows, 1, model.mtp.recurrence, SHIFTS)[0]
    except UsageError:  # no norm, or none that can be undone
        other_hidden = None
    caused = False
    if clearly_better(swapped, own):
        caused = True
        inspection.report(
            "concat_order",
            f"depth 1 takes the halves of its projection's input in the other order than {family.concat_order}: "
            f"acceptance {own.acceptance:.3f} as family {family.name} has it, {swapped.acceptance:.3f} swapped",
            "swap the halves of the projection's columns in the file (W[:, :d] and W[:, d:]), and mend what wrote it",
        )
    elif other_hidden is not None and clearly_better(other_hidden, own):
        caused = True
        place = "before" if family.trunk_hidden == "pre_norm" else "after"
        inspection.report(
            "trunk_hidden",
            f"depth 1 was trained on the other hidden than the one {place} the trunk's final norm: acceptance "
            f"{own.acceptance:.3f} as family {family.name} has it, {other_hidden.acceptance:.3f} with the other",
            "train the head on the hidden that the family's engines give it (forerun sft); folding the trunk norm's "
            "weight into hidden_norm's is a near start",
        )
    figures: dict[str, dict[str, Any]] = {
        "concat_order": {
            "record": family.concat_order,
            "acceptance": own.acceptance,
            "other_acceptance": swapped.acceptance,
        },
        "trunk_hidden": {
            "record": family.trunk_hidden,
            "acceptance": own.acceptance,
            "other_acceptance": None if other_hidden is None else other_hidden.acceptance,
        },
    }
    return caused, figures


def _report_shifted(depth: int, own: Scores, before: Scores, after: Scores, inspection: Inspection) -> bool:
    """Whether a neighbour of the right target fits better, which means labels rolled once too often or too seldom."""
    for where, rolled, other in (("before", "seldom", before), ("after", "often", after)):
        if clearly_better(other, own):
            inspection.report(
                "shifted_target",
                f"depth {depth} predicts the token {where} the one it is to predict: acceptance "
                f"{other.acceptance:.3f} there, {own.acceptance:.3f} at its own",
                f"its training rolled the labels once too {rolled}: train the head again with the right targets",
            )
            return True
    return False


def _report_symptoms(
    depth: int, own: Scores, broken: Scores, guess: float, uniform: float, inspection: Inspection
) -> None:
    """Signs that always mean a fault, where no cause was found."""
    if own.mean_loss > uniform:
        inspection.report(
            "mtp_loss_above_uniform",
            f"depth {depth}: MTP loss {own.mean_loss:.2f} is above ln(vocabulary) = {uniform:.2f}, worse than a guess",
            "if the head was trained, its tensors are not the trained ones: export them again; else train it first "
            "(forerun sft)",
        )
    nothing = max(guess, broken.acceptance)
    if own.acceptance - nothing <= max(SMALLEST_DIFFERENCE, STANDARD_ERRORS * own.error):
        inspection.report(
            "no_acceptance",
            f"depth {depth}: acceptance {own.acceptance:.3f} is what knowing nothing is worth (one token always: "
            f"{guess:.3f}, shuffled head: {broken.acceptance:.3f})",
            "if the head was trained, its tensors are not the trained ones: export them again; else train it first "
            "(forerun sft)",
        )


def _recurrence(model: MTPCarrier, rows: Sequence[Row], inspection: Inspection) -> dict[str, Any]:
    """Depth 2 with each way of chaining. A block of one depth was never trained on it, so there it is only noted."""
    trained = model.mtp.num_depths > 1
    own: Chaining = model.mtp.recurrence
    ways: list[Chaining] = ["post_norm", "pre_norm"]
    if len(model.mtp.layers) > 1:  # a repeated layer is trained on the trunk's hidden by its first depth
        ways.append("trunk")
    found = {way: score(model, rows, 2, way, SHIFTS)[0] for way in ways}
    for way in ways:
        if way == own or not clearly_better(found[way], found[own]):
            continue
        takes = "the trunk's hidden again" if way == "trunk" else f"the {way} hidden of depth 1"
        message = (
            f"depth 2 does better on {takes} than on the {own} hidden that the family's record chains: acceptance "
            f"{found[way].acceptance:.3f} against {found[own].acceptance:.3f}"
        )
        if trained:
            inspection.report("recurrence", message, f"train the depths chained by the {own} hidden, or use one depth")
        else:
            inspection.notes.append(f"{message}; the block has one depth, so this concerns drafting further only")
    return {
        "record": own,
        "depth": 2,
        "trained": trained,
        "acceptance": {way: scores.acceptance for way, scores in found.items()},
    }


def clearly_better(one: Scores, other: Scores) -> bool:
    """Whether the first has the larger acceptance beyond chance, and the smaller loss."""
    difference = one.acceptance - other.acceptance
    beyond_chance = STANDARD_ERRORS * math.hypot(one.error, other.error)
    return difference > max(SMALLEST_DIFFERENCE, beyond_chance) and one.mean_loss < other.mean_loss
