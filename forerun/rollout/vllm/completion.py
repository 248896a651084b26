"""What vLLM says of a finished request, as a `Completion`."""

from __future__ import annotations

from typing import NamedTuple, cast

from forerun.errors import ForerunError
from forerun.rollout.protocol import Completion, FinishReason, Request
from forerun.rollout.vllm.connection import Finished

_REASONS = ("stop", "length", "abort")


class Judged(NamedTuple):
    """Drafts per verify step of one text.

    Attributes:
        accepted: those that are in the text.
        drafted: how many were judged.
        beyond: per depth, accepted drafts that are not in the text, as it ended before them. vLLM counts them.
    """

    accepted: list[int]
    drafted: list[int]
    beyond: list[int]


def judged(finished: Finished, depth: int) -> Judged:
    """Drafts of a request for which vLLM reports them, with `depth` tokens per draft."""
    accepted, drafted = list(finished["accepted"] or []), list(finished["drafted"] or [])
    beyond = [0] * depth
    # The first token comes from the prompt, and each step gives what it accepts and one more. What that makes too many
    # came behind the last token of the text: one of the target's own, and accepted drafts before it.
    surplus = 1 + sum(accepted) + len(accepted) - len(finished["token_ids"])
    if accepted and surplus > 1:
        kept = max(0, accepted[-1] - (surplus - 1))
        for position in range(kept, accepted[-1]):
            beyond[position] += 1
        accepted[-1] = kept
    return Judged(accepted, drafted, beyond)


def completion(request: Request, finished: Finished, version: int, depth: int, counts: Judged | None) -> Completion:
    """Put a completion together.

    Args:
        version: of the weights that wrote it.
        depth: tokens per draft.
        counts: its drafts, None where vLLM does not report them.
    """
    if finished["finish_reason"] not in _REASONS:
        raise ForerunError(f"vLLM ended request {request.request_id!r} with {finished['finish_reason']!r}: see its log")
    sampling, log_probs, size = request.sampling, finished["log_probs"], len(finished["token_ids"])
    # vLLM computes log-probabilities after penalties, biases and filters, for greedy requests at temperature 1. While
    # min_tokens holds, it masks the tokenizer's end token, too, which the request may not have named.
    untouched = not sampling.min_tokens and not sampling.logit_bias and sampling.repetition_penalty == 1
    raw = log_probs if untouched and (sampling.unmodified or sampling.temperature == 0) else None
    made = Completion(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        token_ids=finished["token_ids"],
        log_probs=[0.0] * size if sampling.temperature == 0 else list(log_probs),
        raw_log_probs=None if raw is None else list(raw),
        finish_reason=cast(FinishReason, finished["finish_reason"]),
        weight_versions=[version] * size,
        stop_reason=finished["stop_reason"],
    )
    if counts is not None:
        made.spec_num_draft_tokens = sum(counts.drafted)
        made.spec_num_accepted_tokens = sum(counts.accepted)
        made.spec_num_verify_steps = len(counts.drafted)
        made.drafted_per_depth = [sum(drafted > k for drafted in counts.drafted) for k in range(depth)]
        made.accepted_per_depth = [sum(accepted > k for accepted in counts.accepted) for k in range(depth)]
        made.accepted_draft = accepted_draft(counts, size)
    return made


def accepted_draft(counts: Judged, size: int) -> list[bool] | None:
    """Per token of a text of `size` tokens, whether it was an accepted draft; None where steps without drafts lie
    between the others, as vLLM does not say where."""
    if not counts.drafted:
        return [False] * size
    flags = [False]
    for accepted in counts.accepted:
        flags += [True] * accepted + [False]
    # The last step's own token is not in a text that ended before it.
    return flags[:size] if size <= len(flags) <= size + 1 else None
