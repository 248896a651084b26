"""What an asynchronous step logs beyond a synchronous one."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.rollout.protocol import Completion

Figures = dict[str, float | None]


def staleness_figures(completions: Sequence[Completion], version: int) -> Figures:
    """How old the weights were that sampled these tokens, in steps, seen from weights of `version` steps.

    staleness_mean and staleness_max over all tokens, and partial_rollout_fraction, the share of responses that more
    than one version wrote.
    """
    ages = [version - sampled for completion in completions for sampled in completion.weight_versions]
    pieces = [len(set(completion.weight_versions)) > 1 for completion in completions]
    return {
        "staleness_mean": sum(ages) / len(ages) if ages else None,
        "staleness_max": float(max(ages)) if ages else None,
        "partial_rollout_fraction": sum(pieces) / len(pieces) if pieces else None,
    }
