"""What an engine asks of a running vLLM, whichever way it is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypedDict


class Asked(TypedDict):
    """A request in vLLM's terms."""

    id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]


class Finished(TypedDict):
    """A request that has ended.

    `log_probs` are of the tokens under the processed distribution. `accepted` and `drafted` are drafts per verify step,
    None where vLLM does not say.
    """

    id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    stop_reason: int | str | None
    accepted: list[int] | None
    drafted: list[int] | None


class Connection(Protocol):
    """A running vLLM. Every call may raise a `ForerunError` that names vLLM's own error."""

    def generate(self, requests: Sequence[Asked], on_finish: Callable[[Finished], None]) -> None:
        """Run all; `on_finish` is called for each as it ends, in the calling thread.

        Raises:
            UsageError: vLLM refuses one.
        """
        ...

    def add(self, requests: Sequence[Asked]) -> bool:
        """Run these in the `generate` that runs, from any thread; False where none does (any more)."""
        ...

    def abort(self, ids: Iterable[str]) -> None:
        """End these as "abort"; from any thread."""
        ...

    def worker(self, method: str, *arguments: Any) -> Any:
        """Call a method of `inside/forerun_worker.py`; JSON values both ways."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget keys and values of earlier prompts; False where some are in use."""
        ...

    def counters(self) -> dict[str, Any]:
        """vLLM's counters of speculation: "drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"."""
        ...

    def sleep(self) -> None:
        """vLLM's sleep mode, level 1: weights move to the host's memory, the cache goes."""
        ...

    def wake(self, tags: list[str] | None = None) -> None:
        """Wake all, or "weights" or "kv_cache" alone."""
        ...

    def close(self) -> None: ...
