"""The plan: what each depth would do to each batch size and to the whole rollout, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from forerun.errors import UsageError
from forerun.planner.cost import StepCost
from forerun.planner.timeline import Span

# A predicted gain below this is within the model's error, and no reason to turn anything on.
WORTH = 1.05
# Batch sizes above this are not searched for the break-even.
_LARGEST_BATCH = 4096


def survival(acceptance: Sequence[float], max_depth: int) -> list[float]:
    """Share of steps in which the drafts up to depth 1..max_depth are all accepted.

    Args:
        acceptance: accepted drafts per draft at each depth, as engines report it per position (a draft counts as
            accepted together with all before it). Depths past the last keep the last two's ratio.

    Raises:
        UsageError: empty, a share outside [0, 1], or one that rises with the depth.
    """
    if not acceptance or not all(0 <= share <= 1 for share in acceptance):
        raise UsageError("acceptance must be shares between 0 and 1, one per depth, as in 0.88,0.77,0.66")
    if any(later > earlier for earlier, later in pairwise(acceptance)):
        raise UsageError(
            "acceptance must not rise with the depth: give the share of drafts accepted at each position, "
            "which needs all before it accepted"
        )
    shares = list(acceptance[:max_depth])
    while len(shares) < max_depth:
        before = shares[-2] if len(shares) > 1 else 1.0
        shares.append(shares[-1] * (shares[-1] / before if before else 0.0))
    return shares


@dataclass(frozen=True)
class BatchPlan:
    """One batch size.

    Attributes:
        rows: rows.
        step_seconds: of a step at depth 0..max.
        speedups: tokens per second at depth 0..max over those without drafts.
        best_depth: depth of the largest.
    """

    rows: int
    step_seconds: list[float]
    speedups: list[float]
    best_depth: int


@dataclass(frozen=True)
class Plan:
    """What to expect of speculation.

    Attributes:
        batches: one for each number of rows in the timeline, the largest first.
        break_even: the smallest batch from which on one draft no longer pays; None where it pays at any size searched.
        run_speedups: of the whole timeline at a fixed depth 0..max.
        adaptive_speedup: with the best depth at every moment.
        best_depth: fixed depth of the largest run speed-up.
        tokens_per_step: expected tokens of a row's step at depth 0..max.
    """

    batches: list[BatchPlan]
    break_even: int | None
    run_speedups: list[float]
    adaptive_speedup: float
    best_depth: int
    tokens_per_step: list[float]

    @property
    def worth_it(self) -> bool:
        """Whether to draft at all: the best depth at every moment gains at least what any fixed one does."""
        return self.adaptive_speedup >= WORTH

    def sentence(self) -> str:
        """Whether to draft, and with which settings."""
        depth, gain = self.best_depth, self.run_speedups[self.best_depth]
        until = "however large the batch" if self.break_even is None else f"below {self.break_even} rows"
        if self.break_even == 1:
            until = "at no batch size"
        if depth and gain >= WORTH:
            return (
                f"Enable it: {depth} draft{'s' if depth > 1 else ''} per step should make this rollout {gain:.2f}x as "
                f"fast (one draft pays {until}); {settings(depth)}."
            )
        if self.worth_it:
            deepest = max(batch.best_depth for batch in self.batches)
            return (
                f"Enable it with depth control only, for {self.adaptive_speedup:.2f}x (no fixed depth is worth it, one "
                f"draft pays {until}): native: num_speculative_tokens={deepest} depth_control=auto; leave it off in "
                "vLLM and SGLang."
            )
        drafting = max(range(1, len(self.run_speedups)), key=self.run_speedups.__getitem__)
        gain = self.run_speedups[drafting]
        off = "vLLM: no --speculative-config; SGLang: no --speculative-algorithm; native: num_speculative_tokens=0"
        return (
            f"Leave it off: even the best depth, {drafting}, should make this rollout {gain:.2f}x as fast (one draft "
            f"pays {until}); {off}."
        )


def settings(depth: int) -> str:
    """The flags for `depth` drafts of each engine."""
    vllm = json.dumps({"method": "mtp", "num_speculative_tokens": depth})
    sglang = f"--speculative-num-steps {depth} --speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}"
    native = f"num_speculative_tokens={depth} depth_control=auto"
    return f"vLLM: --speculative-config '{vllm}'; SGLang: --speculative-algorithm EAGLE {sglang}; native: {native}"


def make_plan(cost: StepCost, acceptance: Sequence[float], timeline: Sequence[Span], max_depth: int) -> Plan:
    """Weigh depths 0..max_depth over a timeline.

    Args:
        cost: seconds of a step.
        acceptance: see `survival`.
        timeline: at least one span.
        max_depth: deepest depth considered, at least 1.

    Raises:
        UsageError: an acceptance that is none, or no depth to consider.
    """
    if max_depth < 1:
        raise UsageError(f"max_depth={max_depth} must be at least 1")
    tokens = [1.0]
    for share in survival(acceptance, max_depth):
        tokens.append(tokens[-1] + share)
    depths = range(max_depth + 1)
    totals = [0.0] * len(tokens)
    adaptive = 0.0
    per_rows: dict[int, list[float]] = {}
    weights: dict[int, float] = {}
    for span in timeline:
        seconds = [cost.seconds(span.rows, k, span.context) for k in depths]
        for_span = [s / n * span.tokens for s, n in zip(seconds, tokens, strict=True)]
        totals = [a + b for a, b in zip(totals, for_span, strict=True)]
        adaptive += min(for_span)
        sums = per_rows.setdefault(span.rows, [0.0] * len(tokens))
        per_rows[span.rows] = [a + b * span.tokens for a, b in zip(sums, seconds, strict=True)]
        weights[span.rows] = weights.get(span.rows, 0.0) + span.tokens
    batches = []
    for rows in sorted(per_rows, reverse=True):
        seconds = [s / weights[rows] for s in per_rows[rows]]
        speedups = [seconds[0] * n / s for s, n in zip(seconds, tokens, strict=True)]
        batches.append(BatchPlan(rows, seconds, speedups, max(depths, key=speedups.__getitem__)))
    run = [totals[0] / total for total in totals]
    total_tokens = sum(span.rows * span.tokens for span in timeline)
    context = sum(span.context * span.rows * span.tokens for span in timeline) / total_tokens
    return Plan(
        batches,
        _break_even(cost, tokens[1], context),
        run,
        totals[0] / adaptive,
        max(depths, key=run.__getitem__),
        tokens,
    )


def _break_even(cost: StepCost, tokens: float, context: float) -> int | None:
    """The batch above the largest at which one draft pays, if there is one among the powers of two and between."""

    def pays(rows: int) -> bool:
        return cost.seconds(rows, 0, context) * tokens > cost.seconds(rows, 1, context)

    sizes = [1 << power for power in range(_LARGEST_BATCH.bit_length())]
    paying = [rows for rows in sizes if pays(rows)]
    if not paying:
        return 1
    low = paying[-1]
    if low == sizes[-1]:
        return None
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high
