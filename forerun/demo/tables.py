"""The end of a demo run, readable: what the head foresees, what that is worth in decoding, and how RL went."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from forerun.report.progress import duration
from forerun.report.summary import Summary
from forerun.trainers.setup import EXPORTED

STAGES = (("attached", "attached"), ("fitted", "closed-form fit"), ("trained", "trained"))


def print_report(summary: Summary) -> None:
    """One table per phase on stdout, where all figures are, and what to do next."""
    console = Console()
    figures = summary.figures
    for table in (
        _held_out(figures["sft"]),
        _decoding(figures["rollout"]),
        _reinforcement(figures["rl"]),
        _times(summary.wall_seconds),
    ):
        console.print(table)
    export = figures["export"]
    model = shlex.quote(str(summary.path.parent / EXPORTED))
    same = "the same" if export["same_digest"] and export["same_acceptance"] else "NOT the same"
    console.print(
        f"Exported with {export['mtp_tensors']} MTP tensors; a new process finds {same} digest and acceptance "
        f"({_number(export['acceptance'], '.3f')}).\nAll figures: {summary.path}\n"
        f'next: forerun generate --model {model} --prompt "What is 12 * 7?"',
        highlight=False,
        soft_wrap=True,
    )


def _held_out(sft: Mapping[str, Any]) -> Table:
    table = _table(
        "Held-out acceptance at depth 1: the head's first choice is the trunk's (expected acceptance at temperature 1)",
        "text",
        *(label for _, label in STAGES),
    )
    held_out = sft["held_out_acceptance"]
    for source in sorted(held_out["trained"], key=lambda name: (name == "all", name)):
        cells = (held_out.get(stage, {}).get(source) for stage, _ in STAGES)
        table.add_row(
            source,
            *(f"{c['top1_agreement']:.3f} ({c['expected_acceptance']:.3f})" if c else "earlier run" for c in cells),
        )
    return table


def _decoding(rollout: Mapping[str, Any]) -> Table:
    table = _table(
        f"Greedy decoding of {rollout['prompts']} held-out prompts, drafts from {rollout['draft_vocabulary']:,} tokens",
        *("batch", "drafts", "tokens/s", "same text", "acceptance length", "speed-up", "ideal"),
    )
    for name, batch in rollout.items():
        if not name.startswith("batch_"):
            continue
        size = name.removeprefix("batch_")
        table.add_row(size, "0", f"{batch['plain_tokens_per_second']:.1f}", "", "", "1.00", "")
        for drafts, found in batch.items():
            if drafts.startswith("drafts_"):
                table.add_row(
                    size,
                    drafts.removeprefix("drafts_"),
                    f"{found['tokens_per_second']:.1f}",
                    "yes" if found["identical_greedy_text"] else "NO",
                    _number(found["acceptance_length"], ".2f"),
                    _number(found["speed_up"], ".2f"),
                    _number(found["ideal_speed_up"], ".2f"),
                )
    return table


def _reinforcement(rl: Mapping[str, Any]) -> Table:
    table = _table(
        "GRPO with speculative rollouts at temperature 1",
        *(
            "step",
            "reward",
            "acceptance length",
            "accepted / drafted",
            "verify steps",
            "log-prob gap",
            "drafter in sync",
        ),
    )
    for name, step in rl["steps"].items():
        table.add_row(
            name.removeprefix("step_"),
            _number(step["reward_mean"], ".3f"),
            _number(step["acceptance_length"], ".2f"),
            f"{_number(step['spec_num_accepted_tokens'], '.0f')} / {_number(step['spec_num_draft_tokens'], '.0f')}",
            _number(step["spec_num_verify_steps"], ".0f"),
            _number(step["log_prob_gap_mean"], ".1e"),
            "yes" if step["drafter_in_sync"] else "NO",
        )
    return table


def _times(wall_seconds: Mapping[str, float]) -> Table:
    table = _table("Wall time", *wall_seconds, "all")
    table.add_row(*(duration(seconds) for seconds in (*wall_seconds.values(), sum(wall_seconds.values()))))
    return table


def _number(value: float | None, form: str) -> str:
    """None is what could not be known: no verify step, no token."""
    return "-" if value is None else format(value, form)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table
