"""One request on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from forerun.rollout.protocol import Completion, FinishReason, Request
from forerun.rollout.stopping import StopStrings


@dataclass
class PromptEnd:
    """What prefilling a prompt leaves besides its keys and values: enough to sample any number of first tokens.

    Attributes:
        hidden: [d], the trunk's hidden at the prompt's last token.
        logits: [V], float32 or float64, for the first new token.
        weight_version: of the weights that computed it.
    """

    hidden: Tensor
    logits: Tensor
    weight_version: int


@dataclass
class Running:
    """A request on its way.

    Attributes:
        request: what was asked for.
        index: its place among the requests.
        prompt: the prompt's tokens.
        limit: the length, prompt included, at which it ends.
        seed: of its random numbers, which a greedy one does not need.
        stop_strings: watches for the strings that end it, if it has any.
        prompt_key: equal for equal prompts.
        prefilled: tokens of the prompt that are in the cache.
        prompt_end: set once all of them are.
        uniforms: float64 [limit - len(prompt) + k + 1, 3], the random numbers of each new token; None if it is greedy.
        unfed: the trunk's hiddens [n, d] that were put off for the drafter's cache, in order; `unfed_from` is the
            position of the first.
    """

    request: Request
    index: int
    prompt: tuple[int, ...]
    limit: int
    seed: int | None = None
    stop_strings: StopStrings | None = None
    prompt_key: int = 0
    prefilled: int = 0
    prompt_end: PromptEnd | None = None
    uniforms: Tensor | None = None
    unfed: list[Tensor] = field(default_factory=list)
    unfed_from: int = 0
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    raw_log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    verify_steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    accepted_draft: list[bool] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.prompt) + len(self.token_ids)

    def append(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        raw_log_probs: Sequence[float],
        weight_version: int,
        accepted: int,
    ) -> int:
        """Take over tokens, the first `accepted` of them drafts, up to and including the one that ends the text.

        Returns how many.
        """
        stops = self.request.sampling.stop_token_ids
        taken = 0
        for token, log_prob, raw in zip(tokens, log_probs, raw_log_probs, strict=True):
            self.token_ids.append(token)
            self.log_probs.append(log_prob)
            self.raw_log_probs.append(raw)
            self.weight_versions.append(weight_version)
            self.accepted_draft.append(taken < accepted)
            taken += 1
            ending = token if token in stops else None if self.stop_strings is None else self.stop_strings.push(token)
            if ending is not None:
                self.finish_reason, self.stop_reason = "stop", ending
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

    def put_off(self, hidden_states: Tensor, start: int) -> None:
        """Keep hiddens [n, d] of the positions from `start` on until the drafter is fed again."""
        if not self.unfed:
            self.unfed_from = start
        self.unfed.append(hidden_states)

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            request_id=self.request.request_id,
            prompt_token_ids=list(self.prompt),
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            raw_log_probs=self.raw_log_probs,
            finish_reason=self.finish_reason,
            weight_versions=self.weight_versions,
            stop_reason=self.stop_reason,
            spec_num_draft_tokens=sum(self.drafted),
            spec_num_accepted_tokens=sum(self.accepted),
            spec_num_verify_steps=self.verify_steps,
            drafted_per_depth=self.drafted,
            accepted_per_depth=self.accepted,
            accepted_draft=self.accepted_draft,
        )
