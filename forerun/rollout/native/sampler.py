"""From the logits of a step to tokens: the sampling settings of the running rows, the rule, log-probabilities.

Each request owns three uniform numbers per new token, drawn once from its seed: one for the target's choice, one for
the acceptance test, one for the draft. A number is thus bound to a position of the text and not to a step, so neither
the batch nor the number of drafts changes what a request draws (with `match`, not even its text).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.errors import ForerunError
from forerun.mtp.config import AcceptanceRule
from forerun.rollout.native.adjustments import Adjustments
from forerun.rollout.native.sequence import Running
from forerun.rollout.protocol import SamplingParams
from forerun.speculative import rules
from forerun.speculative.drafter import Drafts
from forerun.speculative.sampling import TargetDistribution, sample

TARGET, ACCEPT, DRAFT = range(3)


def draw_uniforms(sampling: SamplingParams, seed: int | None, count: int) -> Tensor | None:
    """float64 [count, 3] for a request's positions; None for a greedy request, which needs neither them nor a seed."""
    if sampling.temperature == 0:
        return None
    assert seed is not None
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Judged(NamedTuple):
    """Per row, on the host: drafts accepted; the tokens to emit (accepted drafts, then one of the target's), padded;
    their log-probabilities under the sampled and the raw distribution. `tokens` [R, K + 1] stays on the device."""

    accepted: list[int]
    token_lists: list[list[int]]
    log_probs: list[list[float]]
    raw_log_probs: list[list[float]]
    tokens: Tensor


class Sampler:
    """The sampling side of the rows that are running now; made anew when they change.

    Args:
        rows: the running requests.
        rule: acceptance rule for rows with a temperature; rows without are greedy under any.
        vocab_size: words of the target's logits.
        draft_vocabulary: long [Vd] ascending, or None.
    """

    def __init__(
        self,
        rows: Sequence[Running],
        rule: AcceptanceRule,
        vocab_size: int,
        draft_vocabulary: Tensor | None,
        device: torch.device,
    ) -> None:
        settings = [row.request.sampling for row in rows]
        self.rows = list(rows)
        self.rule = rule
        self.draft_vocabulary = draft_vocabulary
        self.device = device
        self.greedy = all(s.temperature == 0 for s in settings)
        self._distribution = TargetDistribution(
            torch.tensor([s.temperature for s in settings], dtype=torch.float32, device=device),
            torch.tensor([s.top_k for s in settings], dtype=torch.long, device=device),
            torch.tensor([s.top_p for s in settings], dtype=torch.float32, device=device),
            torch.tensor([s.min_p for s in settings], dtype=torch.float32, device=device),
        )
        adjustments = Adjustments(self.rows, vocab_size, draft_vocabulary, device)
        self.adjustments = None if adjustments.none else adjustments
        # Logits are the log of the sampled distribution up to a constant.
        self.plain = all(s.unmodified for s in settings)

    def uniforms(self, depth: int) -> Tensor:
        """float64 [R, depth + 1, 3]: the numbers of the next depth + 1 positions of each row."""
        none = torch.zeros(depth + 1, 3, dtype=torch.float64)
        picked = [none if r.uniforms is None else r.uniforms[len(r.token_ids) :][: depth + 1] for r in self.rows]
        return torch.stack(picked).to(self.device)

    def choose_draft(self, uniforms: Tensor | None, logits: Tensor, index: int) -> tuple[Tensor, Tensor | None]:
        """The draft's word at depth index + 1 from logits [R, Vd]: sampled where the rule asks for it, else argmax."""
        if self.adjustments is not None:
            logits = self.adjustments.draft(logits, index)
        probs = None
        if uniforms is None or self.greedy or self.rule != "rejection":
            column = logits.argmax(-1)
        else:
            probs = self._distribution(logits[:, None])[:, 0]
            column = sample(probs, uniforms[:, index, DRAFT])
        if self.adjustments is not None:
            self.adjustments.note_draft(column)
        return column, probs

    def judge(self, logits: Tensor, drafts: Drafts, counts: Sequence[int] | Tensor, uniforms: Tensor | None) -> Judged:
        """Apply the rule. The host waits for the device once, at the end.

        Args:
            logits: [R, K + 1, V], float32 or float64.
            drafts: K tokens per row.
            counts: how many of them are a row's own; a tensor is on the device.
            uniforms: as from `uniforms(K)`; None if all rows are greedy.

        Raises:
            ForerunError: the logits are not finite, or what the sampling settings make of them is not.
        """
        norm = logits.logsumexp(-1)
        on_device = torch.as_tensor(counts, dtype=torch.long, device=self.device)
        adjusted = logits if self.adjustments is None else self.adjustments.target(logits, drafts.tokens)
        probs = None
        if uniforms is None:
            verdict = rules.greedy(adjusted, drafts.tokens, on_device)
        else:
            probs = self._distribution(adjusted)
            if self.rule == "match":
                verdict = rules.match(probs, drafts.tokens, on_device, uniforms[..., TARGET])
            else:
                verdict = rules.rejection(
                    probs,
                    drafts.tokens,
                    on_device,
                    drafts.probs,
                    uniforms[:, :-1, ACCEPT],
                    uniforms[..., TARGET],
                    self.draft_vocabulary,
                )
        accepted, following = verdict
        tokens = torch.cat([drafts.tokens, following[:, None]], dim=1).scatter(1, accepted[:, None], following[:, None])
        if self.adjustments is not None:
            kept = torch.arange(tokens.shape[1], device=self.device) <= accepted[:, None]
            self.adjustments.note(tokens.where(kept, following[:, None]), accepted + 1)
        raw = logits.gather(-1, tokens[..., None]).squeeze(-1) - norm
        if uniforms is None:
            log_probs = torch.zeros_like(raw)
        elif self.plain:
            log_probs = raw
        else:
            assert probs is not None
            log_probs = probs.gather(-1, tokens[..., None]).squeeze(-1).log()
        finite, broken = norm.isfinite().all(1), log_probs.isnan().any(1)
        # In one piece, and float64 holds every token id: each piece would be waited for.
        parts = (finite[:, None], broken[:, None], accepted[:, None], tokens, log_probs, raw)
        told = torch.cat([part.double() for part in parts], dim=1).tolist()
        self._check(told, log_probs.dtype)
        width = tokens.shape[1]
        return Judged(
            [int(row[2]) for row in told],
            [[int(token) for token in row[3 : 3 + width]] for row in told],
            [row[3 + width : 3 + 2 * width] for row in told],
            [row[3 + 2 * width :] for row in told],
            tokens,
        )

    def _check(self, told: Sequence[Sequence[float]], dtype: torch.dtype) -> None:
        """Raise what a row's first two numbers say: whether its logits are finite, whether its distribution is not.

        Raises:
            ForerunError
        """
        for row, (finite, *_) in zip(self.rows, told, strict=True):
            if not finite:
                raise ForerunError(
                    f"request {row.request.request_id!r}: the model's logits are not finite after {row.length} tokens; "
                    "check the weights (NaN or overflow)"
                )
        for row, (_, broken, *_) in zip(self.rows, told, strict=True):
            if broken:
                raise ForerunError(
                    f"request {row.request.request_id!r}: its temperature, penalty or biases leave no distribution "
                    f"to sample from in {str(dtype).removeprefix('torch.')}: take less extreme ones"
                )
