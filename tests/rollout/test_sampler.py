"""The sampler from logits to tokens: draft and verdict together leave the target's distribution, at theory's rate.

The rules are enumerated exactly in tests/speculative; what can still go wrong is between them and the logits: drafts
drawn from another distribution than the one in the ratio, uniform numbers used twice.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from forerun.mtp.config import AcceptanceRule
from forerun.rollout.native.sampler import Sampler, draw_uniforms
from forerun.rollout.native.sequence import Running
from forerun.rollout.protocol import Request, SamplingParams
from forerun.speculative.drafter import Drafts

ROWS = 20_000
TARGET = torch.tensor([1.3, 0.2, -0.9, 0.8, -2.5])
DRAFT = torch.tensor([0.1, 1.9, 0.4, 0.9, -1.5])


def distribution(logits: Tensor, temperature: float, top_k: int) -> Tensor:
    scaled = logits.double() / temperature
    if top_k:
        scaled[scaled < scaled.sort(descending=True).values[top_k - 1]] = -math.inf
    return scaled.softmax(-1)


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.6, 0), (1.5, 3)])
@pytest.mark.parametrize("rule", ["rejection", "match"])
def test_the_token_after_a_draft_is_the_target_s(
    rule: AcceptanceRule, temperature: float, top_k: int, reduced: bool
) -> None:
    vocabulary = torch.tensor([0, 1, 3]) if reduced else None
    sampling = SamplingParams(max_tokens=2, temperature=temperature, top_k=top_k)
    rows = []
    for seed in range(ROWS):
        uniforms = draw_uniforms(sampling, seed, 2)
        rows.append(Running(Request(str(seed), (0,), sampling), seed, (0,), 3, uniforms=uniforms))
    sampler = Sampler(rows, rule, len(TARGET), vocabulary, torch.device("cpu"))
    uniforms = sampler.uniforms(1)
    logits = (DRAFT if vocabulary is None else DRAFT[vocabulary]).expand(ROWS, -1)
    column, probs = sampler.choose_draft(uniforms, logits, 0)
    token = column if vocabulary is None else vocabulary[column]
    drafts = Drafts(token[:, None], None if probs is None else probs[:, None])
    judged = sampler.judge(TARGET.expand(ROWS, 2, -1), drafts, [1] * ROWS, uniforms)

    p = distribution(TARGET, temperature, top_k)
    first = judged.tokens[:, 0]
    seen = torch.bincount(first, minlength=5).double()
    possible = p > 0
    assert seen[~possible].sum() == 0
    chi_square = ((seen - ROWS * p) ** 2 / (ROWS * p))[possible].sum().item()
    assert chi_square < 30  # at most 4 degrees of freedom: p < 1e-5
    torch.testing.assert_close(
        torch.tensor(judged.log_probs, dtype=torch.float64)[:, 0], p[first].log(), rtol=0, atol=1e-5
    )

    q = torch.zeros(5, dtype=torch.float64)
    q[torch.arange(5) if vocabulary is None else vocabulary] = distribution(logits[0], temperature, top_k)
    expected = torch.minimum(p, q).sum().item() if rule == "rejection" else p[q.argmax()].item()
    measured = sum(judged.accepted) / ROWS
    assert abs(measured - expected) < 4.5 * math.sqrt(expected * (1 - expected) / ROWS)
