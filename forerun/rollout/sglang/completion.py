"""A /generate answer as a `Completion`, with what it says of drafting.

The names of the drafting counts were read in SGLang 0.5.23; older versions call them otherwise, or tell the number of
verifications alone, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import ForerunError, one_line
from forerun.rollout.protocol import Completion, FinishReason, Request, SpeculationTotals
from forerun.rollout.sglang.sampling import raw_log_probs, sampled_log_probs
from forerun.rollout.sglang.server import ServerFacts

_STEPS = ("spec_verify_ct",)
_ACCEPTED = ("spec_num_correct_drafts", "spec_accept_token_num")
_DRAFTED = ("spec_num_proposed_drafts", "spec_draft_token_num")
_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def aborted(request: Request) -> Completion:
    """A request that was aborted before the server saw it."""
    return Completion(request.request_id, list(request.prompt_token_ids), [], [], None, "abort", [])


def to_completion(request: Request, answer: Any, facts: ServerFacts, version: int) -> Completion:
    """Read an answer.

    Args:
        request: what was asked.
        answer: the JSON.
        facts: the server's settings.
        version: of the weights, where the answer names none that we gave.

    Raises:
        ForerunError: the answer is not one to /generate with log-probs.
    """
    try:
        return _read(request, answer, facts, version)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ForerunError(
            f"request {request.request_id!r}: SGLang {facts.version} gave an answer of another form "
            f"({type(error).__name__}: {one_line(error):.200}): use a version named in docs/rollout_sglang.md"
        ) from None


def _read(request: Request, answer: Any, facts: ServerFacts, version: int) -> Completion:
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    finish = _REASONS[reason["type"]]
    entries = meta.get("output_token_logprobs") or []
    tokens = [int(token) for token in answer.get("output_ids") or [entry[1] for entry in entries]]
    reported = [float(entry[0]) for entry in entries]
    top = [[float(entry[0]) for entry in position] for position in meta.get("output_top_logprobs") or []]
    if finish == "abort":  # one that was still waiting has neither
        del tokens[len(reported) :]
    if len(tokens) != len(reported):
        raise ForerunError(
            f"request {request.request_id!r}: SGLang {facts.version} gave {len(tokens)} tokens and {len(reported)} "
            "log-probs: use a version named in docs/rollout_sglang.md"
        )
    completion = Completion(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        token_ids=tokens,
        log_probs=sampled_log_probs(request.sampling, reported, top),
        raw_log_probs=raw_log_probs(request.sampling, reported),
        finish_reason=finish,
        weight_versions=_weight_versions(meta, len(tokens), version),
        stop_reason=reason.get("matched") if finish == "stop" else None,
    )
    _fill_statistics(completion, meta, facts)
    return completion


def _weight_versions(meta: Mapping[str, Any], count: int, version: int) -> list[int]:
    """Per token; newer versions tell which span of the text each version of the weights sampled."""
    versions = [_number(meta.get("weight_version"), version)] * count
    for span in meta.get("weight_versions") or ():
        for i in range(span["start"], min(span["end"], count)):
            versions[i] = _number(span["version"], version)
    return versions


def _number(name: object, otherwise: int) -> int:
    """A version that we gave; before the first update a server goes by a name of its own."""
    return int(name) if isinstance(name, str) and name.isdecimal() else otherwise


def _fill_statistics(completion: Completion, meta: Mapping[str, Any], facts: ServerFacts) -> None:
    depth = facts.num_steps
    steps = _first(meta, _STEPS)
    # A text that ended with the prompt's own forward was never verified, and has no counts.
    if not facts.drafts or (steps is None and len(completion.token_ids) <= 1):
        completion.spec_num_verify_steps = completion.spec_num_draft_tokens = completion.spec_num_accepted_tokens = 0
        completion.drafted_per_depth, completion.accepted_per_depth = [0] * depth, [0] * depth
        return
    accepted, drafted = _first(meta, _ACCEPTED), _first(meta, _DRAFTED)
    histogram = next(([int(count) for count in meta[name]] for name in _HISTOGRAM if meta.get(name) is not None), None)
    per_depth = [steps] * depth if steps is not None and facts.topk == 1 else None  # a tree has several at a depth
    behind = 0
    if steps is not None and accepted is not None and completion.finish_reason != "abort":
        # One token per prefill, and one per step beside the drafts; SGLang counts what it cut off at the end, too.
        behind = 1 + meta.get("num_retractions", 0) + accepted + steps - len(completion.token_ids)
    if accepted is not None and behind > 0:
        accepted -= behind
        histogram, last = _cut_last_step(histogram, behind)
        if last is not None and per_depth is not None and drafted is not None:
            per_depth = [count - (d > last) for d, count in enumerate(per_depth)]
            drafted = sum(per_depth)
    completion.spec_num_verify_steps = steps
    completion.spec_num_draft_tokens = drafted
    completion.spec_num_accepted_tokens = accepted
    completion.drafted_per_depth = per_depth
    if histogram is not None:
        completion.accepted_per_depth = [sum(histogram[d + 1 :]) for d in range(depth)]


def _cut_last_step(histogram: list[int] | None, behind: int) -> tuple[list[int] | None, int | None]:
    """Take accepted drafts that lie behind the text's end out of the counts.

    Args:
        histogram: verify steps by how many drafts they accepted.
        behind: accepted drafts to take out of the last step. Which step that was SGLang does not say: it is taken for
            the shortest that accepted so many.

    Returns:
        The histogram without them, and how many the last step keeps; None where SGLang gave no histogram.
    """
    long_enough = [i for i, count in enumerate(histogram or ()) if count and i >= behind]
    if histogram is None or not long_enough:
        return histogram, None
    cut = list(histogram)
    cut[long_enough[0]] -= 1
    cut[long_enough[0] - behind] += 1
    return cut, long_enough[0] - behind


def _first(meta: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((int(meta[name]) for name in names if meta.get(name) is not None), None)


def add_to_totals(totals: SpeculationTotals, completion: Completion) -> bool:
    """Add a completion's counts. False if it lacks some, so that there are no totals."""
    counts = (
        completion.spec_num_verify_steps,
        completion.spec_num_draft_tokens,
        completion.spec_num_accepted_tokens,
    )
    if None in counts:
        return False
    steps, drafted, accepted = (int(count) for count in counts if count is not None)
    totals.num_verify_steps += steps
    totals.num_draft_tokens += drafted
    totals.num_accepted_tokens += accepted
    per_depth = completion.accepted_per_depth or []
    totals.accepted_per_depth += [0] * (len(per_depth) - len(totals.accepted_per_depth))
    for i, count in enumerate(per_depth):
        totals.accepted_per_depth[i] += count
    return True
