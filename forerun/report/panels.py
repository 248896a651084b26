"""Which curves a report shows together, and under what headings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """A chart: a title, and patterns of the metrics that are drawn in it."""

    title: str
    patterns: tuple[str, ...]

    def names(self, logged: Iterable[str]) -> list[str]:
        """The logged metrics that belong here, by pattern and then by name."""
        logged = sorted(logged, key=_natural)
        return [name for pattern in self.patterns for name in logged if re.fullmatch(pattern, name)]


SECTIONS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Reward",
        (
            Panel("Reward", ("reward_mean", r"[^/]+/reward_mean")),
            Panel("Parts of the reward", (r"reward/.+", "overlong_penalty_mean", "reward_kl_penalty")),
            Panel("Groups to learn from", ("informative_groups", "kept_groups")),
        ),
    ),
    (
        "Acceptance",
        (
            Panel("Acceptance length", ("acceptance_length", "mtp/acceptance_length", r"val/acceptance_length")),
            Panel("Held-out acceptance length", (r"[^/]+/mtp/acceptance_length",)),
            Panel("Acceptance by depth", (r"acceptance/depth_\d+",)),
            Panel("Agreement with the trunk by depth", (r"mtp/depth_\d+/trunk_top1",)),
            Panel("Expected acceptance by depth", (r"mtp/depth_\d+/expected_acceptance",)),
        ),
    ),
    (
        "Losses",
        (
            Panel("Main loss", ("loss", "pg_loss", "kl_loss")),
            Panel("MTP loss by depth", (r"mtp/depth_\d+/loss",)),
            Panel("Held-out loss", (r"[^/]+/loss",)),
            Panel("Held-out MTP loss", (r"[^/]+/mtp/depth_\d+/loss",)),
        ),
    ),
    (
        "Policy",
        (
            Panel("Entropy", ("entropy", "entropy_loss")),
            Panel("Log-prob gap, trainer and rollout", ("log_prob_gap_mean", "log_prob_gap_max")),
            Panel("KL of rollout, and of the update", ("rollout_kl", "ppo_kl")),
            Panel("Clipped or left out", ("pg_clipfrac", "pg_clipfrac_lower", "rollout_rs_masked_fraction")),
            Panel("Response length", ("response_length_mean", "response_length_max")),
        ),
    ),
    (
        "Asynchronous training",
        (
            Panel("Staleness of tokens", ("staleness_mean", "staleness_max")),
            Panel("Responses of several versions", ("partial_rollout_fraction",)),
            Panel("Groups ready for later steps", ("queue_depth",)),
            Panel("Rollout workers", ("rollout_workers",)),
            Panel("Requests handed out again", ("requests_reissued",)),
        ),
    ),
    (
        "Speed",
        (
            Panel("Time by phase", ("time/step", r"time/.+(?<!/step)")),
            Panel("Tokens per second", ("tokens_per_second", "rollout_tokens_per_second")),
        ),
    ),
    (
        "Optimizer",
        (
            Panel("Gradient norm", ("grad_norm", "mtp_grad_norm", "mtp/grad_norm")),
            Panel("Learning rate", ("lr", "mtp_lr")),
        ),
    ),
)


def _natural(name: str) -> list[tuple[int, str]]:
    """depth_2 before depth_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
