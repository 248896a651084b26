"""The rules are run as black boxes over every cell of their uniform numbers, and the output distribution is summed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forerun.speculative import rules
from forerun.speculative.sampling import sample

V = 5
VOCABULARY = torch.tensor([0, 2, 3])  # a reduced draft vocabulary


def distributions(count: int, seed: int, size: int = V, forbidden: int | None = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, size, generator=generator, dtype=torch.float64) * 1.5
    probs = drawn.softmax(-1)
    if forbidden is not None:
        # A word that the target never says: it must never come out, whatever the draft thinks of it.
        probs[:, forbidden] = 0
    return probs / probs.sum(-1, keepdim=True)


def cells(*breakpoints: Tensor) -> tuple[Tensor, Tensor]:
    """Midpoints and widths of the intervals that the breakpoints cut [0, 1] into."""
    edges = torch.cat([torch.tensor([0.0, 1.0], dtype=torch.float64), *(b.flatten() for b in breakpoints)])
    edges = edges.clamp(0, 1).unique()
    return (edges[1:] + edges[:-1]) / 2, edges[1:] - edges[:-1]


def residual_edges(p: Tensor, q_full: Tensor) -> list[Tensor]:
    residual = (p - q_full).clamp(min=0)
    return [p.cumsum(0), residual.cumsum(0) / residual.sum()]


class Contexts:
    """Target and draft distributions that depend on the tokens before them, up to depth 2."""

    def __init__(self, draft_size: int) -> None:
        self.p = {(): distributions(1, 0)[0]}
        self.q = {(): distributions(1, 100, draft_size, None)[0]}
        for n, first in enumerate(range(V)):
            self.p[(first,)] = distributions(1, 1 + n)[0]
            self.q[(first,)] = distributions(1, 101 + n, draft_size, None)[0]
            for m, second in enumerate(range(V)):
                self.p[(first, second)] = distributions(1, 20 + V * n + m)[0]


def joint_of_target(contexts: Contexts) -> Tensor:
    joint = torch.zeros(V, V, V, dtype=torch.float64)
    for a, b, c in itertools.product(range(V), repeat=3):
        joint[a, b, c] = contexts.p[()][a] * contexts.p[(a,)][b] * contexts.p[(a, b)][c]
    return joint


def add_outcome(
    joint: Tensor, contexts: Contexts, drafts: tuple[int, int], verdict: rules.Verdict, weight: Tensor
) -> None:
    """Complete each outcome to three tokens with plain sampling from the target, exactly."""
    for accepted, token, w in zip(verdict.num_accepted.tolist(), verdict.next_token.tolist(), weight, strict=True):
        emitted = (*drafts[:accepted], token)
        if len(emitted) == 1:
            rest = contexts.p[emitted][:, None] * torch.stack([contexts.p[(*emitted, b)] for b in range(V)])
            joint[emitted[0]] += w * rest
        elif len(emitted) == 2:
            joint[emitted[0], emitted[1]] += w * contexts.p[emitted]
        else:
            joint[emitted] += w


def full(q: Tensor, vocabulary: Tensor | None) -> Tensor:
    if vocabulary is None:
        return q
    return torch.zeros(V, dtype=q.dtype).scatter(0, vocabulary, q)


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["full", "reduced"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_rejection_gives_the_target_s_joint_distribution(vocabulary: Tensor | None, count: int) -> None:
    size = V if vocabulary is None else len(vocabulary)
    contexts = Contexts(size)
    words = range(V) if vocabulary is None else vocabulary.tolist()
    joint = torch.zeros(V, V, V, dtype=torch.float64)
    for first, second in itertools.product(words, repeat=2):
        q1, q2 = contexts.q[()], contexts.q[(first,)]
        q1_full, q2_full = full(q1, vocabulary), full(q2, vocabulary)
        p = torch.stack([contexts.p[()], contexts.p[(first,)], contexts.p[(first, second)]])
        u1, w1 = cells(p[0][first] / q1_full[first])
        u2, w2 = cells(p[1][second] / q2_full[second])
        edges = residual_edges(p[0], q1_full) + residual_edges(p[1], q2_full) + [p[2].cumsum(0)]
        un, wn = cells(*edges)
        grid = torch.cartesian_prod(u1, u2, un)
        weight = torch.cartesian_prod(w1, w2, wn).prod(1) * q1_full[first] * q2_full[second]
        rows = len(grid)
        verdict = rules.rejection(
            p.expand(rows, -1, -1),
            torch.tensor([[first, second]]).expand(rows, -1),
            torch.full((rows,), count),
            torch.stack([q1, q2]).expand(rows, -1, -1),
            grid[:, :2],
            grid[:, 2:].expand(-1, 3),
            vocabulary,
        )
        assert int(verdict.num_accepted.max()) <= count
        add_outcome(joint, contexts, (first, second), verdict, weight)
    assert 0.5 * (joint - joint_of_target(contexts)).abs().sum() < 1e-9


@pytest.mark.parametrize("count", [0, 1, 2])
def test_one_hot_rejection_gives_the_target_s_joint_distribution(count: int) -> None:
    contexts = Contexts(V)
    for first, second in itertools.product(range(V), repeat=2):
        p = torch.stack([contexts.p[()], contexts.p[(first,)], contexts.p[(first, second)]])
        hot = torch.eye(V, dtype=torch.float64)
        u1, w1 = cells(p[0][first])
        u2, w2 = cells(p[1][second])
        un, wn = cells(*residual_edges(p[0], hot[first]), *residual_edges(p[1], hot[second]), p[2].cumsum(0))
        grid = torch.cartesian_prod(u1, u2, un)
        rows = len(grid)
        verdict = rules.rejection(
            p.expand(rows, -1, -1),
            torch.tensor([[first, second]]).expand(rows, -1),
            torch.full((rows,), count),
            None,
            grid[:, :2],
            grid[:, 2:].expand(-1, 3),
        )
        joint = torch.zeros(V, V, V, dtype=torch.float64)
        add_outcome(joint, contexts, (first, second), verdict, torch.cartesian_prod(w1, w2, wn).prod(1))
        assert 0.5 * (joint - joint_of_target(contexts)).abs().sum() < 1e-9


@pytest.mark.parametrize("count", [0, 1, 2])
def test_match_gives_the_target_s_joint_distribution(count: int) -> None:
    contexts = Contexts(V)
    for drafts in ((0, 1), (3, 3), (4, 2)):
        p = torch.stack([contexts.p[()], contexts.p[drafts[:1]], contexts.p[drafts]])
        axes = [cells(row.cumsum(0)) for row in p]
        grid = torch.cartesian_prod(*(u for u, _ in axes))
        weight = torch.cartesian_prod(*(w for _, w in axes)).prod(1)
        rows = len(grid)
        verdict = rules.match(
            p.expand(rows, -1, -1), torch.tensor([drafts]).expand(rows, -1), torch.full((rows,), count), grid
        )
        joint = torch.zeros(V, V, V, dtype=torch.float64)
        add_outcome(joint, contexts, drafts, verdict, weight)
        assert 0.5 * (joint - joint_of_target(contexts)).abs().sum() < 1e-9


def test_greedy_keeps_the_argmax_prefix_of_each_row() -> None:
    logits = torch.full((4, 3, V), -1.0)
    for position, token in enumerate((2, 0, 4)):
        logits[:, position, token] = 1.0
    drafts = torch.tensor([[2, 0], [2, 1], [3, 0], [2, 0]])
    verdict = rules.greedy(logits, drafts, torch.tensor([2, 2, 2, 1]))
    assert verdict.num_accepted.tolist() == [2, 1, 0, 1]
    assert verdict.next_token.tolist() == [4, 0, 2, 0]


N = 200_000


def drawn(rule: str, sampled_drafts: bool) -> tuple[Tensor, Tensor, rules.Verdict]:
    p, q = distributions(1, 7)[0], distributions(1, 8, V, None)[0]
    generator = torch.Generator().manual_seed(1)
    uniform: Callable[..., Tensor] = lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    drafts = sample(q.expand(N, -1), uniform(N)) if sampled_drafts else q.argmax().expand(N)
    target = p.expand(N, 2, -1)
    counts = torch.ones(N, dtype=torch.long)
    if rule == "match":
        return p, q, rules.match(target, drafts[:, None], counts, uniform(N, 2))
    draft_probs = q.expand(N, 1, -1) if sampled_drafts else None
    return p, q, rules.rejection(target, drafts[:, None], counts, draft_probs, uniform(N, 1), uniform(N, 2))


@pytest.mark.parametrize(
    ("rule", "sampled_drafts", "theory"),
    [
        ("match", False, lambda p, q: p[q.argmax()]),
        ("match", True, lambda p, q: (p * q).sum()),
        ("rejection", False, lambda p, q: p[q.argmax()]),
        ("rejection", True, lambda p, q: 1 - 0.5 * (p - q).abs().sum()),
    ],
)
def test_measured_acceptance_equals_theory(
    rule: str, sampled_drafts: bool, theory: Callable[[Tensor, Tensor], Tensor]
) -> None:
    p, q, verdict = drawn(rule, sampled_drafts)
    expected = float(theory(p, q))
    measured = verdict.num_accepted.double().mean().item()
    assert abs(measured - expected) < 5 * (expected * (1 - expected) / N) ** 0.5


@pytest.mark.parametrize(("rule", "sampled_drafts"), [("match", True), ("rejection", False), ("rejection", True)])
def test_chi_square_of_the_first_token(rule: str, sampled_drafts: bool) -> None:
    p, q = distributions(1, 7)[0], distributions(1, 8, V, None)[0]
    generator = torch.Generator().manual_seed(3)
    u = torch.rand(N, 4, generator=generator, dtype=torch.float64)
    drafts = sample(q.expand(N, -1), u[:, 0])[:, None] if sampled_drafts else q.argmax().expand(N, 1)
    target, counts = p.expand(N, 2, -1), torch.ones(N, dtype=torch.long)
    if rule == "match":
        verdict = rules.match(target, drafts, counts, u[:, 1:3])
    else:
        verdict = rules.rejection(
            target, drafts, counts, q.expand(N, 1, -1) if sampled_drafts else None, u[:, 1:2], u[:, 2:]
        )
    first = torch.where(verdict.num_accepted == 1, drafts[:, 0], verdict.next_token)
    observed = torch.bincount(first, minlength=V).double()
    assert observed[4] == 0  # the word that the target never says
    chi_square = ((observed[:4] - N * p[:4]) ** 2 / (N * p[:4])).sum().item()
    assert chi_square < 21.1  # 3 degrees of freedom, p = 1e-4


def test_a_rule_that_reads_behind_a_row_s_count_would_be_seen() -> None:
    p = distributions(3, 5).expand(1, -1, -1)
    counts = torch.tensor([1])
    q = distributions(2, 6).expand(1, -1, -1)
    seen = set()
    for garbage in range(V):
        verdict = rules.rejection(
            p, torch.tensor([[0, garbage]]), counts, q, torch.zeros(1, 2), torch.full((1, 3), 0.3, dtype=torch.float64)
        )
        seen.add((int(verdict.num_accepted), int(verdict.next_token)))
    assert len(seen) == 1
