"""What every rollout engine takes and gives. A trainer knows this module and no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, under vLLM's names. `temperature=0` is greedy; `top_k=0` and `top_p=1` switch those filters off.

    `seed` makes a request's text its own: the same seed gives the same text whatever else is in the batch.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must not be negative (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must not be negative (0 switches it off)")


@dataclass(frozen=True)
class Request:
    """One prompt to complete."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass
class Completion:
    """One finished request.

    `log_probs` holds the *target's* log-probability of each token under the distribution it was sampled from
    (temperature, top-k, top-p applied), `raw_log_probs` under the unmodified one. The spec_* fields are None where the
    engine cannot report them, 0 where it ran without drafting. `token_ids` includes the stop token, if one ended it.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    raw_log_probs: list[float]
    finish_reason: FinishReason
    weight_versions: list[int]
    spec_num_draft_tokens: int | None = None
    spec_num_accepted_tokens: int | None = None
    spec_num_verify_steps: int | None = None
    # Drafted and accepted counts by depth, index 0 = depth 1.
    drafted_per_depth: list[int] | None = None
    accepted_per_depth: list[int] | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per verify step (1.0 = no draft was ever accepted); None without verify steps."""
        if not self.spec_num_verify_steps or self.spec_num_accepted_tokens is None:
            return None
        return 1.0 + self.spec_num_accepted_tokens / self.spec_num_verify_steps


NamedTensors = Iterable[tuple[str, Tensor]]


@runtime_checkable
class RolloutEngine(Protocol):
    """An inference engine with a drafter inside."""

    weight_version: int

    def generate(
        self, requests: Sequence[Request], on_finish: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Complete every request; the result is in the requests' order, `on_finish` is called as each one ends.

        Raises:
            UsageError: a prompt that is empty or leaves no room in the context, before anything is generated.
        """
        ...

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace trunk and drafter weights (Hugging Face names). All of them arrive or the old ones stay.

        Raises:
            ForerunError: a tensor missing, unknown or of another shape; the message names it.
        """
        ...

    def drafter_digest(self) -> str:
        """Hash of the drafter's weights as the engine holds them (`rollout.sync.digest`)."""
        ...

    def sleep(self) -> None:
        """Free what generation needs (caches); weights stay."""
        ...

    def wake(self) -> None:
        """Be ready to generate again."""
        ...
