"""Sample completions of a run, with accepted drafts marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from forerun.report.elements import tag
from forerun.report.numbers import shown
from forerun.report.run_files import RunFiles, SampleRow

# Steps whose samples are shown, spread over the run, the last included.
MOST_STEPS = 8
# Longest text that is shown of one response or prompt, in characters.
MOST_CHARACTERS = 20_000


def sample_section(run: RunFiles, headed: bool) -> Iterator[Element]:
    """What a run wrote, step by step; the last step is open. `headed` names the run above it."""
    if not run.samples:
        return
    if headed:
        yield tag("h3", run.name)
    steps = list(run.samples)
    chosen = _spread(steps, MOST_STEPS)
    if any(row.accepted_draft is not None for rows in run.samples.values() for row in rows):
        yield tag("p", tag("mark", "Marked"), " tokens were drafted and accepted; all others are the target's own.")
    if len(chosen) < len(steps):
        yield tag("p", f"{len(chosen)} of {len(steps)} steps; samples.jsonl has them all.", class_="muted")
    for step in chosen:
        rows = run.samples[step]
        what = f"Step {step:,}: {len(rows)} {'completion' if len(rows) == 1 else 'completions'}"
        opened = "open" if step == chosen[-1] else None
        yield tag("details", tag("summary", what), *(_sample(row) for row in rows), open=opened)


def _spread(steps: Sequence[int], most: int) -> list[int]:
    if len(steps) <= most:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def _sample(row: SampleRow) -> Element:
    facts = [f"reward {shown(row.reward)}"]
    if row.event is not None:
        facts.append(f"reward failed: {row.event}")
    if row.acceptance_length is not None:
        facts.append(f"acceptance length {row.acceptance_length:.2f}")
    if row.accepted_draft is None:
        facts.append("accepted drafts not known")
    else:
        facts.append(f"{sum(row.accepted_draft)} of {len(row.accepted_draft)} tokens accepted drafts")
    return tag(
        "article",
        tag("h4", "Prompt"),
        tag("pre", _cut(row.prompt), tabindex="0"),
        tag("h4", f"Response: {', '.join(facts)}"),
        tag("pre", *_pieces(row), tabindex="0"),
        class_="sample",
    )


def _pieces(row: SampleRow) -> Iterator[Element | str]:
    """The response; an accepted draft that completes no character has no text to mark."""
    if row.tokens is None or row.accepted_draft is None:
        yield _cut(row.response)
        return
    left = MOST_CHARACTERS
    for piece, accepted in zip(row.tokens, row.accepted_draft, strict=True):
        if left <= 0:
            yield _rest(len(row.response) - MOST_CHARACTERS)
            return
        shown_piece = piece[:left]
        left -= len(piece)
        if shown_piece:
            yield tag("mark", shown_piece) if accepted else shown_piece


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + _rest(len(text) - MOST_CHARACTERS)


def _rest(count: int) -> str:
    return f" [... {count:,} more characters in samples.jsonl]"
