"""What is asked of the engine, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.errors import UsageError
from forerun.rollout.protocol import Request


def check_requests(requests: Sequence[Request], max_model_len: int, vocab_size: int, has_tokenizer: bool) -> None:
    """Refuse what cannot be run.

    Raises:
        UsageError: naming the request.
    """
    seen: set[str] = set()
    for request in requests:
        name, prompt = request.request_id, request.prompt_token_ids
        if name in seen:
            raise UsageError(f"two requests have the id {name!r}: ids must differ")
        seen.add(name)
        if len(prompt) == 0:
            raise UsageError(f"request {name!r} has an empty prompt: give at least one token")
        if len(prompt) >= max_model_len:
            raise UsageError(
                f"request {name!r} has a prompt of {len(prompt)} tokens, which leaves no room in the context of "
                f"{max_model_len}: shorten it"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UsageError(f"request {name!r} holds token ids outside 0..{vocab_size - 1}")
        _check_sampling(request, vocab_size, has_tokenizer)


def _check_sampling(request: Request, vocab_size: int, has_tokenizer: bool) -> None:
    name, sampling = request.request_id, request.sampling
    if sampling.logit_bias and not (min(sampling.logit_bias) >= 0 and max(sampling.logit_bias) < vocab_size):
        raise UsageError(f"request {name!r} has a logit_bias for token ids outside 0..{vocab_size - 1}")
    if sampling.stop and not has_tokenizer:
        raise UsageError(f"request {name!r} has stop strings, for which the engine needs its tokenizer: give it one")
    if sampling.min_tokens and len({t for t in sampling.stop_token_ids if 0 <= t < vocab_size}) == vocab_size:
        raise UsageError(f"request {name!r} has min_tokens={sampling.min_tokens}, and every token would stop it")


def check_memory(requests: Sequence[Request], limits: Sequence[int], slack: int, max_tokens: int) -> None:
    """Refuse requests that the cache cannot hold even alone.

    Args:
        requests: what is asked.
        limits: the length, prompt included, that each can come to have.
        slack: positions beyond it that a step may write.
        max_tokens: positions that the cache may have.

    Raises:
        UsageError: naming the first.
    """
    for request, limit in zip(requests, limits, strict=True):
        if limit + slack > max_tokens:
            raise UsageError(
                f"request {request.request_id!r} can grow to {limit} tokens, and the key-value cache holds "
                f"{max(max_tokens - slack, 0)}: lower max_tokens or raise kv_cache_memory_bytes"
            )
