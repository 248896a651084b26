"""A response in several pieces: one that a weight update cut short is written on by the new weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from forerun.rollout.protocol import Completion, Request
from forerun.rollout.stopping import StopStrings

Item = TypeVar("Item")


def continuation(request: Request, written: Completion) -> Request:
    """The request for what is left of a response.

    Its prompt is the first one with what is written, its limits are what is left of them, and its id is the same. Its
    seed is a fresh one, made of the first and the number of tokens: the old one's random numbers are used up. A request
    of which nothing is written stays as it is.

    Raises:
        ValueError: nothing is left.
    """
    sampling, count = request.sampling, len(written.token_ids)
    if count == 0:
        return request
    if count >= sampling.max_tokens:
        raise ValueError(f"request {request.request_id!r} has written all of its {sampling.max_tokens} tokens")
    seed = None if sampling.seed is None else random.Random(f"{sampling.seed}/{count}").getrandbits(31)
    return replace(
        request,
        prompt_token_ids=[*request.prompt_token_ids, *written.token_ids],
        sampling=replace(
            sampling,
            max_tokens=sampling.max_tokens - count,
            min_tokens=max(0, sampling.min_tokens - count),
            seed=seed,
        ),
    )


def joined(
    request: Request, first: Completion, second: Completion, tokenizer: PreTrainedTokenizerBase | None = None
) -> Completion:
    """One completion of a request out of its beginning and of what answered its `continuation`.

    What one of the pieces does not tell, the whole does not. A stop string that begins in the first piece is not seen
    by the engine that writes the second: it ends the whole where it is complete, and what was written beyond it is
    dropped, with the counts of drafts, which include that.

    Args:
        request: the one that asked for the whole.
        first: the beginning.
        second: the rest, or more of it.
        tokenizer: the model's; needed with stop strings.
    """
    whole = Completion(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        token_ids=first.token_ids + second.token_ids,
        log_probs=first.log_probs + second.log_probs,
        raw_log_probs=_joined(first.raw_log_probs, second.raw_log_probs),
        finish_reason=second.finish_reason,
        weight_versions=first.weight_versions + second.weight_versions,
        stop_reason=second.stop_reason,
        spec_num_draft_tokens=_sum(first.spec_num_draft_tokens, second.spec_num_draft_tokens),
        spec_num_accepted_tokens=_sum(first.spec_num_accepted_tokens, second.spec_num_accepted_tokens),
        spec_num_verify_steps=_sum(first.spec_num_verify_steps, second.spec_num_verify_steps),
        drafted_per_depth=_per_depth(first.drafted_per_depth, second.drafted_per_depth),
        accepted_per_depth=_per_depth(first.accepted_per_depth, second.accepted_per_depth),
        accepted_draft=_joined(first.accepted_draft, second.accepted_draft),
    )
    if request.sampling.stop and tokenizer is not None:
        return _stopped(request, whole, tokenizer)
    return whole


def as_ended(request: Request, completion: Completion) -> Completion:
    """A completion that was aborted when it had reached its end already, as what it is; any other as it stands."""
    sampling, tokens = request.sampling, completion.token_ids
    if completion.finish_reason != "abort" or not tokens:
        return completion
    if tokens[-1] in sampling.stop_token_ids and len(tokens) > sampling.min_tokens:
        return replace(completion, finish_reason="stop", stop_reason=tokens[-1])
    if len(tokens) >= sampling.max_tokens:
        return replace(completion, finish_reason="length")
    return completion


def _stopped(request: Request, whole: Completion, tokenizer: PreTrainedTokenizerBase) -> Completion:
    """Ended by the first stop string of the whole text."""
    watch = StopStrings(request.sampling.stop, tokenizer, request.sampling.min_tokens)
    for count, token in enumerate(whole.token_ids, start=1):
        string = watch.push(token)
        if string is None:
            continue
        if count == len(whole.token_ids):
            return replace(whole, finish_reason="stop", stop_reason=string)
        return replace(
            whole,
            token_ids=whole.token_ids[:count],
            log_probs=whole.log_probs[:count],
            raw_log_probs=None if whole.raw_log_probs is None else whole.raw_log_probs[:count],
            weight_versions=whole.weight_versions[:count],
            accepted_draft=None if whole.accepted_draft is None else whole.accepted_draft[:count],
            finish_reason="stop",
            stop_reason=string,
            spec_num_draft_tokens=None,
            spec_num_accepted_tokens=None,
            spec_num_verify_steps=None,
            drafted_per_depth=None,
            accepted_per_depth=None,
        )
    return whole


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _joined(a: Sequence[Item] | None, b: Sequence[Item] | None) -> list[Item] | None:
    return None if a is None or b is None else [*a, *b]


def _per_depth(a: list[int] | None, b: list[int] | None) -> list[int] | None:
    """Counts by depth, index 0 = depth 1; a piece that drafted less deep has none of the deeper ones."""
    if a is None or b is None:
        return None
    depth = max(len(a), len(b))
    return [x + y for x, y in zip(a + [0] * (depth - len(a)), b + [0] * (depth - len(b)), strict=True)]
