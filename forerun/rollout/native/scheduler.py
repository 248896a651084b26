"""Which request runs in which cache row. Requests are admitted in their order, as soon as a row is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from forerun.errors import UsageError
from forerun.rollout.protocol import Completion, FinishReason, Request


@dataclass
class PromptEnd:
    """What prefilling a prompt leaves besides its keys and values: enough to sample any number of first tokens.

    Attributes:
        hidden: [d], the trunk's hidden at the prompt's last token.
        logits: [V], float32 or float64, for the first new token.
    """

    hidden: Tensor
    logits: Tensor


@dataclass
class Running:
    """A request on its way.

    Attributes:
        request: what was asked for.
        index: its place among the requests.
        prompt: the prompt's tokens.
        limit: the length, prompt included, at which it ends.
        uniforms: float64 [limit - len(prompt) + k, 3], the random numbers of each new token; None if it is greedy.
        prompt_end: set once the prompt is in the cache.
    """

    request: Request
    index: int
    prompt: tuple[int, ...]
    limit: int
    uniforms: Tensor | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    raw_log_probs: list[float] = field(default_factory=list)
    prompt_end: PromptEnd | None = None
    finish_reason: FinishReason | None = None
    verify_steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.prompt) + len(self.token_ids)

    def append(self, tokens: Sequence[int], log_probs: Sequence[float], raw_log_probs: Sequence[float]) -> int:
        """Take over tokens up to and including the first that ends the text; returns how many."""
        stops = self.request.sampling.stop_token_ids
        taken = 0
        for token, log_prob, raw in zip(tokens, log_probs, raw_log_probs, strict=True):
            self.token_ids.append(token)
            self.log_probs.append(log_prob)
            self.raw_log_probs.append(raw)
            taken += 1
            if token in stops:
                self.finish_reason = "stop"
                break
            if self.length >= self.limit:
                self.finish_reason = "length"
                break
        return taken

    def count(self, drafted: int, accepted: int) -> None:
        """Note one verification of `drafted` > 0 drafts."""
        self.verify_steps += 1
        for depth in range(drafted):
            self.drafted[depth] += 1
            self.accepted[depth] += depth < accepted

    def completion(self, weight_version: int) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            request_id=self.request.request_id,
            prompt_token_ids=list(self.prompt),
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            raw_log_probs=self.raw_log_probs,
            finish_reason=self.finish_reason,
            weight_versions=[weight_version] * len(self.token_ids),
            spec_num_draft_tokens=sum(self.drafted),
            spec_num_accepted_tokens=sum(self.accepted),
            spec_num_verify_steps=self.verify_steps,
            drafted_per_depth=self.drafted,
            accepted_per_depth=self.accepted,
        )


class Scheduler:
    """Waiting and running sequences; running[r] holds cache row r.

    Args:
        sequences: in the order of admission.
        max_rows: how many can run at once.
    """

    def __init__(self, sequences: Sequence[Running], max_rows: int) -> None:
        self.waiting = deque(sequences)
        self.running: list[Running] = []
        self.max_rows = max_rows

    def admit(self) -> list[int]:
        """Give free rows to waiting sequences; returns the new rows."""
        first = len(self.running)
        while self.waiting and len(self.running) < self.max_rows:
            self.running.append(self.waiting.popleft())
        return list(range(first, len(self.running)))

    def retire(self) -> tuple[list[Running], list[tuple[int, int]]]:
        """Take out finished sequences. Returns them, and (from row, to row) moves that keep the others in front."""
        finished = [s for s in self.running if s.finish_reason is not None]
        moves = []
        row = 0
        while row < len(self.running):
            if self.running[row].finish_reason is None:
                row += 1
                continue
            last = self.running.pop()
            if row < len(self.running):
                self.running[row] = last
                if last.finish_reason is None:
                    moves.append((len(self.running), row))
        return finished, moves

    def abort(self, request_ids: set[str]) -> list[Running]:
        """Mark the running ones of these as finished, and take out and return the waiting ones."""
        for s in (*self.running, *self.waiting):
            if s.request.request_id in request_ids:
                s.finish_reason = "abort"
        taken = [s for s in self.waiting if s.finish_reason is not None]
        self.waiting = deque(s for s in self.waiting if s.finish_reason is None)
        return taken

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)


def check_requests(requests: Sequence[Request], max_model_len: int, vocab_size: int) -> None:
    """Refuse what cannot be run, before anything is.

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
