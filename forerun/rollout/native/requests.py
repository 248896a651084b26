"""What the native engine cannot run, beyond what no engine can (`rollout.requests`)."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.errors import UsageError
from forerun.rollout.protocol import Request


def check_stop_strings(requests: Sequence[Request], has_tokenizer: bool) -> None:
    """Refuse stop strings where there is no tokenizer to find them with.

    Raises:
        UsageError: naming the first request.
    """
    for request in requests:
        if request.sampling.stop and not has_tokenizer:
            raise UsageError(
                f"request {request.request_id!r} has stop strings, for which the engine needs its tokenizer: give it "
                "one"
            )


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
