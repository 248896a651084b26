"""Is an engine's speculation lossless? One call that looks from outside, at any engine of the protocol.

What is exact is compared exactly: greedy texts, log-probabilities, counts, seeds. Whether sampled text has the target's
distribution can only be tested on samples:

- Given the model, every sampled token yields a number, the mass of all words that were more probable plus a random part
  of its own. If each token was drawn from the model's distribution after the text before it, these numbers are
  independent and uniform on [0, 1], over all positions and texts (Rosenblatt 1952). A fault that favours what the
  drafter favours moves mass between likely and unlikely words, and so bends them. A second number, from the mass of
  the words with smaller ids, shows a wrong use of the random numbers that choose along the vocabulary.
- Without the model, texts with and without drafting are compared: their tokens position by position, and the
  log-probability of each whole text. That needs far more samples.

Neither sees a few texts that share their random numbers: each alone has the right distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from transformers import PreTrainedModel

from forerun.errors import ForerunError, UsageError
from forerun.rollout.chi_square import POWER, ChiSquare, same_distribution, uniform_fit
from forerun.rollout.counts import ending_faults, statistics_faults, totals_faults
from forerun.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams, SpeculationTotals
from forerun.rollout.scoring import TokenScores, score_texts

# Positions whose tokens are compared one by one when there is no model to compare with.
_POSITIONS = 4
_BINS = 20
# So many drafts all refused is a fault of the drafter, not bad luck.
_DRAFTS_TO_JUDGE = 100


@dataclass(frozen=True)
class LosslessCheck:
    """One thing that was looked at; `detail` has the figures, or the reason."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str

    def __str__(self) -> str:
        return f"{self.outcome:7} {self.name}: {self.detail}"


@dataclass(frozen=True)
class LosslessReport:
    """What `check_lossless` found; as a string, one line per check."""

    checks: tuple[LosslessCheck, ...]

    @property
    def failed(self) -> tuple[LosslessCheck, ...]:
        return tuple(check for check in self.checks if check.outcome == "failed")

    def raise_for_failures(self) -> None:
        """Raise a `ForerunError` that names every failed check, if one failed."""
        if self.failed:
            found = "; ".join(f"{check.name}: {check.detail}" for check in self.failed)
            raise ForerunError(f"speculation is not lossless: {found}")

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks))


def check_lossless(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    *,
    model: PreTrainedModel | None = None,
    baseline: RolloutEngine | None = None,
    sampling: SamplingParams | None = None,
    samples: int = 512,
    log_prob_tolerance: float = 1e-3,
    false_alarm_rate: float = 1e-3,
    seeds: bool = True,
    seed: int = 0,
) -> LosslessReport:
    """Compare what an engine writes with drafting on with what its target alone would write.

    Args:
        engine: with num_speculative_tokens above 0. It is set to 0 for a while and back, if the engine allows that and
            no `baseline` is given.
        prompts: token ids. Without a `model`, few prompts with many samples each say most.
        model: the target, with the engine's weights. Texts and log-probabilities are then compared with its own.
        baseline: an engine with the same weights that does not draft.
        sampling: how to sample, and how long; default is temperature 1 and 16 tokens. Its own seed is not used.
        samples: sampled texts in all, shared out among the prompts.
        log_prob_tolerance: largest difference of a log-probability that rounding explains. A greedy token may lie
            twice as much below the model's best one.
        false_alarm_rate: how often a lossless engine may fail the test of its distribution.
        seeds: whether the engine promises that a seed fixes a request's text whatever else is in the batch.
        seed: from which the requests' seeds are counted up.

    Raises:
        UsageError: no prompt, no drafting, too few samples, greedy `sampling`, or a rate or tolerance that is none.
    """
    sampling = sampling or SamplingParams(max_tokens=16)
    if engine.num_speculative_tokens < 1:
        raise UsageError("check_lossless judges speculation: give an engine with num_speculative_tokens of at least 1")
    if not prompts:
        raise UsageError("check_lossless needs at least one prompt of token ids")
    if any(isinstance(prompt, str | int) for prompt in prompts):
        raise UsageError("check_lossless: `prompts` must hold a list of token ids for each prompt")
    if sampling.temperature == 0:
        raise UsageError("check_lossless always compares greedy texts: give `sampling` a temperature above 0")
    if not isinstance(samples, int) or samples < 10 * _BINS:
        raise UsageError(f"check_lossless: samples={samples!r} cannot judge a distribution, give at least {10 * _BINS}")
    if not 0 < false_alarm_rate < 1:
        raise UsageError(f"check_lossless: false_alarm_rate={false_alarm_rate} must lie between 0 and 1")
    if not 0 <= log_prob_tolerance < math.inf:
        raise UsageError(f"check_lossless: log_prob_tolerance={log_prob_tolerance} must be a number of at least 0")

    wanted = _requests("sampled", prompts, sampling, samples, seed if seeds else None)
    greedy = _requests("greedy", prompts, replace(sampling, temperature=0.0), len(prompts), None)
    before = engine.speculation_totals()
    on = _Texts(engine.generate(greedy), engine.generate(wanted))
    drafted = _difference(engine.speculation_totals(), before)
    answers = _check_answers(greedy + wanted, on.greedy + on.sampled)
    if answers.outcome == "failed":  # what follows takes texts for what they should be
        return LosslessReport((answers,))
    others = _requests("plain", prompts, sampling, samples, seed + samples if seeds else None)
    off, no_off = _without_drafting(engine, baseline, greedy, others)
    scores = None
    if model is not None:
        greedy_off = [] if off is None else off.greedy
        greedy_scores = score_texts(model, [*on.greedy, *greedy_off], greedy[0].sampling)
        scores = _Scores(greedy_scores, score_texts(model, on.sampled, sampling))
    return LosslessReport(
        (
            answers,
            _check_acceptance(on, drafted),
            _check_statistics(on, drafted, engine.num_speculative_tokens),
            _check_greedy(on, off, scores, 2 * log_prob_tolerance) or LosslessCheck("greedy text", "skipped", no_off),
            _check_log_probs(on, off, scores, log_prob_tolerance) or LosslessCheck("log-probs", "skipped", no_off),
            _check_distribution(on, off, scores, log_prob_tolerance, false_alarm_rate, seed)
            or LosslessCheck("distribution", "skipped", no_off),
            _check_seeds(engine, wanted, on, seeds),
        )
    )


class _Texts(NamedTuple):
    greedy: list[Completion]
    sampled: list[Completion]


def _requests(
    name: str, prompts: Sequence[Sequence[int]], sampling: SamplingParams, count: int, seed: int | None
) -> list[Request]:
    """`count` requests, the prompts in turn."""
    return [
        Request(f"{name}-{i}", prompts[i % len(prompts)], replace(sampling, seed=None if seed is None else seed + i))
        for i in range(count)
    ]


def _difference(after: SpeculationTotals | None, before: SpeculationTotals | None) -> SpeculationTotals | None:
    if after is None or before is None:
        return None
    earlier = before.accepted_per_depth + [0] * (len(after.accepted_per_depth) - len(before.accepted_per_depth))
    return SpeculationTotals(
        after.num_verify_steps - before.num_verify_steps,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
        [a - b for a, b in zip(after.accepted_per_depth, earlier, strict=True)],
    )


def _without_drafting(
    engine: RolloutEngine, baseline: RolloutEngine | None, greedy: list[Request], sampled: list[Request]
) -> tuple[_Texts | None, str]:
    """Texts without drafting, or why there are none."""
    if baseline is not None:
        return _Texts(baseline.generate(greedy), baseline.generate(sampled)), ""
    depth = engine.num_speculative_tokens
    try:
        engine.num_speculative_tokens = 0
    except (AttributeError, ForerunError) as error:
        return None, f"no model and no baseline were given, and drafting cannot be switched off ({error})"
    try:
        before = engine.speculation_totals()
        off = _Texts(engine.generate(greedy), engine.generate(sampled))
        drafted = _difference(engine.speculation_totals(), before)
    finally:
        engine.num_speculative_tokens = depth
    if drafted is not None and drafted.num_draft_tokens:
        return None, "the engine went on drafting with num_speculative_tokens=0; give a model or a baseline"
    return off, ""


class _Scores(NamedTuple):
    """`greedy`: of the drafting engine's texts, then of those without drafting."""

    greedy: list[TokenScores]
    sampled: list[TokenScores]


# The checks


def _check_answers(requests: Sequence[Request], completions: Sequence[Completion]) -> LosslessCheck:
    """Drafts must not carry a text past where it ends."""
    faults = list(ending_faults(requests, completions))
    if faults:
        return LosslessCheck("answers", "failed", f"{faults[0]} ({len(faults)} such)")
    return LosslessCheck("answers", "passed", f"{len(requests)} requests were answered in turn, and ended as they say")


def _check_acceptance(on: _Texts, drafted: SpeculationTotals | None) -> LosslessCheck:
    completions = on.greedy + on.sampled
    if all(c.spec_num_draft_tokens is not None for c in completions):
        drafts = sum(c.spec_num_draft_tokens or 0 for c in completions)
        accepted = sum(c.spec_num_accepted_tokens or 0 for c in completions)
        steps = sum(c.spec_num_verify_steps or 0 for c in completions)
    elif drafted is not None:
        drafts, accepted, steps = drafted.num_draft_tokens, drafted.num_accepted_tokens, drafted.num_verify_steps
    else:
        return LosslessCheck("acceptance", "skipped", "the engine does not report what it drafted")
    figures = f"{accepted} of {drafts} drafts accepted"
    if drafts == 0:
        return LosslessCheck("acceptance", "failed", "nothing was drafted")
    if steps:
        figures += f", acceptance length {1 + accepted / steps:.2f}"
    if accepted == 0 and drafts >= _DRAFTS_TO_JUDGE:
        return LosslessCheck("acceptance", "failed", f"{figures}: the drafter is broken, or not of these weights")
    return LosslessCheck("acceptance", "passed", figures)


def _check_statistics(on: _Texts, drafted: SpeculationTotals | None, depth: int) -> LosslessCheck:
    completions = on.greedy + on.sampled
    faults = [f"{c.request_id}: {fault}" for c in completions for fault in statistics_faults(c, depth)]
    if drafted is not None:
        faults += totals_faults(completions, drafted)
    if faults:
        return LosslessCheck("statistics", "failed", f"{faults[0]} ({len(faults)} such)")
    reported = sum(c.spec_num_draft_tokens is not None for c in completions)
    totals = "no totals" if drafted is None else "totals"
    return LosslessCheck("statistics", "passed", f"counts of {reported} of {len(completions)} texts, and {totals}")


def _check_greedy(on: _Texts, off: _Texts | None, scores: _Scores | None, tolerance: float) -> LosslessCheck | None:
    name = "greedy text"
    pairs = [] if off is None else list(zip(on.greedy, off.greedy, strict=True))
    differ = [ours.request_id for ours, theirs in pairs if ours.token_ids != theirs.token_ids]
    if scores is not None:
        regret = torch.cat([score.regret for score in scores.greedy])
        figures = f"{len(regret)} tokens, at most {float(regret.max()):.2g} below the model's best logit"
        if off is not None:
            figures += f"; {len(differ)} of {len(pairs)} texts part from those without drafting"
        return LosslessCheck(name, "passed" if bool((regret <= tolerance).all()) else "failed", figures)
    if off is None:
        return None
    if differ:
        first = f"{len(differ)} of {len(pairs)} texts differ without drafting, first {differ[0]}"
        return LosslessCheck(name, "failed", f"{first} (give the model to tell ties apart)")
    return LosslessCheck(name, "passed", f"{len(pairs)} texts are the same without drafting")


def _check_log_probs(on: _Texts, off: _Texts | None, scores: _Scores | None, tolerance: float) -> LosslessCheck | None:
    ours: list[float] = []
    theirs: list[float] = []
    if scores is not None:
        source = "the model's"
        for c, score in zip(on.greedy + on.sampled, scores.greedy[: len(on.greedy)] + scores.sampled, strict=True):
            if c.raw_log_probs is not None and len(c.raw_log_probs) == len(c.token_ids):
                ours += c.raw_log_probs
                theirs += score.raw.tolist()
        for c, score in zip(on.sampled, scores.sampled, strict=True):
            if len(c.log_probs) == len(c.token_ids):
                # A token that only rounding keeps in or out of the sampled set is the distribution's matter.
                inside = [i for i, value in enumerate(score.log_prob.tolist()) if value > -math.inf]
                ours += [c.log_probs[i] for i in inside]
                theirs += score.log_prob[inside].tolist()
        if not ours:
            return LosslessCheck("log-probs", "failed", "no text has one log-prob per token")
    elif off is not None:
        source = "those without drafting"
        for c, plain in zip(on.greedy, off.greedy, strict=True):
            if c.token_ids == plain.token_ids and c.raw_log_probs is not None and plain.raw_log_probs is not None:
                ours += c.raw_log_probs
                theirs += plain.raw_log_probs
        if not ours:
            return LosslessCheck("log-probs", "skipped", "no model, and no greedy text in common without drafting")
    else:
        return None
    gap = (torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)).abs()
    figures = f"{len(gap)} values, at most {float(gap.max()):.2g} from {source}"
    return LosslessCheck("log-probs", "passed" if bool((gap <= tolerance).all()) else "failed", figures)


def _check_distribution(
    on: _Texts, off: _Texts | None, scores: _Scores | None, tolerance: float, level: float, seed: int
) -> LosslessCheck | None:
    name = "distribution"
    if scores is not None:
        outside = torch.cat([score.outside for score in scores.sampled])
        if bool((outside > 2 * tolerance).any()):
            wrong = int((outside > 2 * tolerance).sum())
            return LosslessCheck(name, "failed", f"{wrong} of {len(outside)} tokens should never have been sampled")
        mass = torch.cat([score.log_prob for score in scores.sampled]).exp()
        inside = mass * torch.rand(len(mass), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        by_rank = torch.cat([score.before_rank for score in scores.sampled]) + inside
        by_id = torch.cat([score.before_id for score in scores.sampled]) + inside
        tests = [uniform_fit(numbers.clamp(0, 1), level / 2, _BINS) for numbers in (by_rank, by_id)]
        return _verdict(name, tests, level, f"{len(mass)} tokens against the model")
    if off is None:
        return None
    prompts = min(len(on.greedy), len(on.sampled))
    pairs = [(on.sampled[prompt :: len(on.greedy)], off.sampled[prompt :: len(on.greedy)]) for prompt in range(prompts)]
    positions = min(_POSITIONS, max(len(c.token_ids) for c in on.sampled))
    views = [[(_tokens_at(i, ours), _tokens_at(i, plain)) for ours, plain in pairs] for i in range(positions)]
    views.append([_likelihood_bins(ours, plain) for ours, plain in pairs])
    tests = [same_distribution(view, level / len(views)) for view in views]
    what = f"{len(on.sampled)} texts and {len(off.sampled)} without drafting"
    return _verdict(name, tests, level, what)


def _tokens_at(position: int, completions: list[Completion]) -> torch.Tensor:
    """Long [N]: each text's token at a position, plus one; 0 if it ended before."""
    return torch.tensor([c.token_ids[position] + 1 if len(c.token_ids) > position else 0 for c in completions])


def _likelihood_bins(ours: list[Completion], plain: list[Completion]) -> tuple[torch.Tensor, torch.Tensor]:
    """Long [N], [M]: in which tenth of all these texts, by log-probability, each of them lies."""
    totals = torch.tensor([sum(c.log_probs) for c in (*ours, *plain)], dtype=torch.float64)
    bins = torch.bucketize(totals, totals.quantile(torch.arange(0.1, 0.95, 0.1, dtype=torch.float64)))
    return bins[: len(ours)], bins[len(ours) :]


def _verdict(name: str, tests: list[ChiSquare], level: float, what: str) -> LosslessCheck:
    """Of several tests, each made at level / len(tests): one alarm in any is an alarm (Bonferroni)."""
    if all(math.isnan(test.detectable) for test in tests):
        why = "too few texts of each prompt, or always the same one, so that nothing can differ: give more samples"
        return LosslessCheck(name, "skipped", why)
    worst = min(tests, key=lambda test: test.p_value)
    p_value = min(1.0, len(tests) * worst.p_value)
    figures = (
        f"{what}, p = {p_value:.2g} (an alarm below {level:g}; moving {worst.detectable:.1%} of the mass between what "
        f"is told apart would raise one with probability {POWER:g})"
    )
    return LosslessCheck(name, "passed" if p_value >= level else "failed", figures)


def _check_seeds(engine: RolloutEngine, wanted: list[Request], on: _Texts, seeds: bool) -> LosslessCheck:
    if not seeds:
        return LosslessCheck("seeds", "skipped", "the engine does not promise them")
    # Every third, in another order: other neighbours, and fewer.
    picked = list(range(0, len(wanted), 3))[::-1]
    again = engine.generate([wanted[i] for i in picked])
    changed = sum(c.token_ids != on.sampled[i].token_ids for i, c in zip(picked, again, strict=True))
    return LosslessCheck(
        "seeds", "failed" if changed else "passed", f"{changed} of {len(picked)} texts changed in another batch"
    )
