"""What every rollout engine takes and gives. A trainer knows this module and no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, under vLLM's names and in its order: logit bias, minimum length, repetition penalty, temperature,
    min-p, top-k, top-p.

    `temperature=0` is greedy; `top_k=0`, `top_p=1`, `min_p=0` and `repetition_penalty=1` switch these off. `seed` makes
    a request's text its own: the same seed gives the same text whatever else is in the batch.

    Attributes:
        max_tokens: most tokens of the completion.
        min_tokens: no stop token is sampled, and no stop string ends the text, before there are so many tokens.
        top_p: keep the smallest set of most probable tokens whose mass reaches it.
        top_k: keep the k most probable tokens.
        min_p: keep tokens of at least this share of the most probable one's probability.
        repetition_penalty: logits of tokens that the prompt or the text holds are divided by it if positive, else
            multiplied (Keskar et al. 2019, section 4.1).
        logit_bias: token id -> number added to its logit.
        stop: strings that end the text; the token that completes one is its last.
        stop_token_ids: tokens that end the text; the text includes it.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must lie between 0 and max_tokens={self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be a number of at least 0 (0 is greedy)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must not be negative (0 switches it off)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1]")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0 (1 switches it off)")
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise ValueError(f"logit_bias of token {token} is {bias}: give a finite number")
        seed: object = self.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64):
            raise ValueError(f"seed={seed} must be an integer of 64 bits")
        stop: object = self.stop  # a string is a sequence of strings, too, and would stop at each of its letters
        if isinstance(stop, str):
            raise ValueError(f"stop={stop!r} is one string: give a tuple of them, ({stop!r},)")
        if any(not text for text in self.stop):
            raise ValueError("stop holds an empty string, which would end every text at once")

    @property
    def unmodified(self) -> bool:
        """Whether the distribution that is sampled is the model's own."""
        return (
            (self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty) == (1, 1, 0, 0, 1)
            and not self.logit_bias
            and not (self.min_tokens and self.stop_token_ids)
        )


@dataclass(frozen=True)
class Request:
    """One prompt to complete."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass
class Completion:
    """One finished request.

    What an engine cannot report is None; counts are 0 where it ran without drafting.

    Attributes:
        token_ids: the text, with the stop token or the token that completed a stop string, if one ended it.
        log_probs: the *target's* log-probability of each token under the distribution that was sampled (see
            `SamplingParams`).
        raw_log_probs: the same under the model's own, unmodified distribution.
        finish_reason: "stop" (a stop token or string), "length" (max_tokens or the context), "abort".
        stop_reason: the token or the string that ended the text, where one did.
        weight_versions: per token, the version of the weights that sampled it.
        spec_num_verify_steps: forwards that judged at least one draft of this request.
        drafted_per_depth: drafts judged at each depth, index 0 = depth 1.
        accepted_per_depth: how many of them were accepted.
        accepted_draft: per token, whether it was drafted and accepted, and not the target's own.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    raw_log_probs: list[float] | None
    finish_reason: FinishReason
    weight_versions: list[int]
    stop_reason: int | str | None = None
    spec_num_draft_tokens: int | None = None
    spec_num_accepted_tokens: int | None = None
    spec_num_verify_steps: int | None = None
    drafted_per_depth: list[int] | None = None
    accepted_per_depth: list[int] | None = None
    accepted_draft: list[bool] | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per verify step (1.0 = no draft was ever accepted); None without verify steps."""
        if not self.spec_num_verify_steps or self.spec_num_accepted_tokens is None:
            return None
        return 1.0 + self.spec_num_accepted_tokens / self.spec_num_verify_steps


@dataclass
class SpeculationTotals:
    """What an engine drafted since it started. Counters only grow: take differences for a span of time."""

    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)


NamedTensors = Iterable[tuple[str, Tensor]]


@runtime_checkable
class RolloutEngine(Protocol):
    """An inference engine with a drafter inside.

    `num_speculative_tokens` may be set between calls of `generate` where the engine says so; 0 switches drafting off.
    """

    weight_version: int
    num_speculative_tokens: int
    # What weights are held in, which `drafter_digest` is of; None: in what `update_weights` brings.
    dtype: torch.dtype | None

    def generate(
        self, requests: Sequence[Request], on_finish: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """Complete every request; the result is in the requests' order, `on_finish` is called as each one ends.

        Raises:
            UsageError: a prompt that is empty or leaves no room in the context, two requests with one id, or a sampling
                setting that the engine does not have, before anything is generated.
        """
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Give the running `generate` further requests; it returns when these have ended too, and their completions
        behind the others. For `on_finish` and other threads.

        Raises:
            UsageError: as `generate`; or the id of a request that is running. None of them is added.
            ForerunError: nothing is running (any more), or the engine is one that takes no request on the way.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests of the running `generate` as soon as can be, with what they have and finish_reason
        "abort". For `on_finish` and other threads; ids that are not running (any more) are passed over.
        """
        ...

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace trunk and drafter weights (Hugging Face names), checked as a whole before any is replaced. One that
        fails on the way, as a weight cannot be made or sent, leaves an engine that refuses to generate until an update
        has arrived whole.

        Args:
            named_tensors: a `WeightStream` is read as it is sent, a bucket at a time; anything else is held as a whole.
            version: of these weights.

        Raises:
            ForerunError: a tensor missing, unknown or of another shape, which it names; or a failure on the way.
        """
        ...

    def drafter_digest(self) -> str | None:
        """Hash of the drafter's weights as the engine holds them (`rollout.sync.digest`); None if it cannot know."""
        ...

    def speculation_totals(self) -> SpeculationTotals | None:
        """Drafts of the engine's whole life; None where it cannot say."""
        ...

    def sleep(self) -> None:
        """Free what generation needs (caches); weights may stay, or be brought back by `wake`."""
        ...

    def wake(self) -> None:
        """Be ready to generate again."""
        ...

    def close(self) -> None:
        """End processes and free memory; the engine is not used afterwards."""
        ...


class WeightUpdateInParts(Protocol):
    """An update under way."""

    def add(self, named_tensors: NamedTensors) -> None:
        """Put these in their places.

        Raises:
            ForerunError: one is unknown, came before, or is of another shape or not of a floating dtype.
        """
        ...


@runtime_checkable
class UpdatesInParts(Protocol):
    """What a rollout engine has besides if weights can go to their places as they arrive: none waits for all others."""

    def begin_update(self) -> WeightUpdateInParts:
        """Begin; the engine generates again after `end_update`, or a whole `RolloutEngine.update_weights`.

        Raises:
            ForerunError: the engine is generating.
        """
        ...

    def end_update(self, version: int) -> None:
        """Every weight has arrived: go on with them.

        Raises:
            ForerunError: one has not, or no update was begun.
        """
        ...
