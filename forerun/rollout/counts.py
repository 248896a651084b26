"""What a completion, its counts, and an engine's totals cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from forerun.rollout.protocol import Completion, Request, SpeculationTotals


def ending_faults(requests: Sequence[Request], completions: Sequence[Completion]) -> Iterator[str]:
    """What in the answers to requests, of which none was aborted, cannot be: whose they are, and where they end.

    A text that ends before `max_tokens` with "length" has filled the context, which is at least as large as the longest
    text with its prompt. Stop strings are not looked for: they need a tokenizer.
    """
    if [c.request_id for c in completions] != [r.request_id for r in requests]:
        yield f"{len(requests)} requests, but their answers are not one for each in the same order"
        return
    longest = max(len(c.prompt_token_ids) + len(c.token_ids) for c in completions)
    for r, c in zip(requests, completions, strict=True):
        sampling, size = r.sampling, len(c.token_ids)
        stops = [i for i, token in enumerate(c.token_ids) if token in sampling.stop_token_ids]
        if c.prompt_token_ids != list(r.prompt_token_ids):
            yield f"{c.request_id}: the answer is to another prompt"
        elif not 0 < size <= sampling.max_tokens:
            yield f"{c.request_id}: {size} tokens, and max_tokens={sampling.max_tokens}"
        elif stops and (stops[0] < size - 1 or stops[0] < sampling.min_tokens):
            yield f"{c.request_id}: a stop token is token {stops[0] + 1} of {size}, min_tokens={sampling.min_tokens}"
        elif (c.finish_reason == "stop") != bool(stops) and not sampling.stop:
            yield f"{c.request_id}: ended as {c.finish_reason!r} {'at a' if stops else 'without a'} stop token"
        elif c.finish_reason == "abort":
            yield f"{c.request_id}: ended as 'abort', and nobody aborted it"
        elif c.finish_reason == "length" and size < sampling.max_tokens and size + len(c.prompt_token_ids) < longest:
            yield f"{c.request_id}: ended as 'length' after {size} tokens, and max_tokens={sampling.max_tokens}"


def statistics_faults(completion: Completion, depth: int) -> Iterator[str]:
    """What in a completion's lists and counts cannot be, at most `depth` tokens being drafted per step."""
    c = completion
    size = len(c.token_ids)
    raw = c.log_probs if c.raw_log_probs is None else c.raw_log_probs
    if not len(c.log_probs) == len(raw) == len(c.weight_versions) == size:
        yield f"{size} tokens, but {len(c.log_probs)} log-probs, {len(raw)} raw, {len(c.weight_versions)} versions"
    drafts, accepted, steps = c.spec_num_draft_tokens, c.spec_num_accepted_tokens, c.spec_num_verify_steps
    if drafts is None or accepted is None:
        return
    if not 0 <= accepted <= min(drafts, size):
        yield f"{accepted} of {drafts} drafts accepted in a text of {size} tokens"
    if steps is not None and not steps <= drafts <= depth * steps:
        yield f"{drafts} drafts in {steps} verify steps of at most {depth}"
    if steps is not None and accepted + steps > size:
        yield f"{accepted} drafts accepted and {steps} verify steps make more than {size} tokens"
    for name, total, per_depth in (
        ("drafted", drafts, c.drafted_per_depth),
        ("accepted", accepted, c.accepted_per_depth),
    ):
        if per_depth is not None:
            if sum(per_depth) != total or len(per_depth) > depth:
                yield f"{total} {name}, but per depth {per_depth}"
            if any(deep > shallow for shallow, deep in pairwise(per_depth)):
                yield f"more {name} at a deeper depth: {per_depth}"
    per_depth_pairs = zip(c.accepted_per_depth or [], c.drafted_per_depth or [], strict=False)
    if any(kept > judged for kept, judged in per_depth_pairs):
        yield f"accepted {c.accepted_per_depth} of drafted {c.drafted_per_depth}"


def totals_faults(completions: Sequence[Completion], drafted: SpeculationTotals) -> Iterator[str]:
    """What in an engine's totals over these completions cannot be."""
    if not 0 <= drafted.num_accepted_tokens <= drafted.num_draft_tokens:
        yield f"totals: {drafted.num_accepted_tokens} of {drafted.num_draft_tokens} drafts accepted"
    if drafted.accepted_per_depth and sum(drafted.accepted_per_depth) != drafted.num_accepted_tokens:
        yield f"totals: {drafted.num_accepted_tokens} accepted, but per depth {drafted.accepted_per_depth}"
    if all(c.spec_num_draft_tokens is not None for c in completions):
        sums = (
            sum(c.spec_num_verify_steps or 0 for c in completions),
            sum(c.spec_num_draft_tokens or 0 for c in completions),
            sum(c.spec_num_accepted_tokens or 0 for c in completions),
        )
        totals = (drafted.num_verify_steps, drafted.num_draft_tokens, drafted.num_accepted_tokens)
        # An engine may count drafts behind a text's end among all; none of them is accepted.
        if any(part > whole for part, whole in zip(sums, totals, strict=True)) or sums[2] != totals[2]:
            yield f"totals: {totals} steps, drafts and accepted, but the texts have {sums}"
