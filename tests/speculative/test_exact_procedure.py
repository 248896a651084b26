"""Draft and verify as a whole, integrated exactly over its random numbers: out comes the target's distribution.

The engine is the real one, and so is its model, of five words. Its layers are identities: the target's logits depend on
the last word alone, and so do the draft's. Both are thus tables, read off the engine itself, and a text's probability
is a product. What an engine writes is a piecewise constant function of its uniform numbers. Theory says where pieces
can end (cumulative sums of p, q and the residual, and p / q), so one request per piece, each piece weighted with its
volume, gives the distribution of the texts without sampling anything. An engine that used its numbers in another way
would not have constant pieces, and not come out at the target's distribution.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forerun import MTPConfig, attach
from forerun.rollout.native import run
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.native.sampler import ACCEPT, DRAFT, TARGET, Sampler
from forerun.rollout.protocol import Completion, Request, SamplingParams

V = 5
PROMPT = (1, 4)
REDUCED = (0, 2, 3)
TOTAL_VARIATION = 1e-9

Text = tuple[int, ...]
Span = tuple[float, float]
Cell = dict[tuple[int, int], Span]  # (which of a position's numbers, position) -> the interval that it lies in


def toy(draft_vocabulary: tuple[int, ...] | None, **settings: Any) -> NativeEngine:
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    torch.manual_seed(3)
    model = attach(LlamaForCausalLM(config).double(), MTPConfig(True), init="plain").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        # Of [hidden, embedding] the drafter looks at the word alone, and sees it distorted.
        distorted = torch.eye(16) + 0.25 * torch.randn(16, 16)
        model.mtp.layers[0].proj.weight.copy_(torch.cat([torch.zeros(16, 16), distorted], dim=1))
    words = None if draft_vocabulary is None else torch.tensor(draft_vocabulary)
    return NativeEngine(model, products="linear", draft_vocabulary=words, max_num_seqs=512, **settings)


class Theory:
    """The distributions of target and draft after any text, and the cells that follow from them.

    Args:
        engine: to read the tables of logits from.
        sampling: how both are sampled.
        argmax: drafts are the draft's most probable word, not sampled.
    """

    @torch.inference_mode()
    def __init__(self, engine: NativeEngine, sampling: SamplingParams, argmax: bool) -> None:
        runner = engine.runner
        self.rule, self.depth = engine.acceptance, engine.num_speculative_tokens
        self.sampling, self.argmax = sampling, argmax
        self.words = range(V) if runner.draft_vocabulary is None else runner.draft_vocabulary.tolist()
        runner.allocate(V, 8)
        every = torch.arange(V)
        hidden = runner.decode(every[:, None], torch.zeros(V, 1, dtype=torch.long), live=1, uniform=True)
        self.p_logits = runner.head(hidden)[:, 0].tolist()
        drafted: list[list[list[float]]] = []

        def note(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
            drafted.append(logits.tolist())
            return logits.argmax(-1), None

        assert runner.drafter is not None
        zeros, ones = torch.zeros(V, dtype=torch.long), torch.ones(V, dtype=torch.long)
        runner.drafter.draft(hidden, every[:, None], zeros, ones, live=1, depth=1, choose=note)
        self.q_logits = drafted[0]
        runner.release()

    def distribution(self, words: Any, logits: list[float], text: Text) -> list[float]:
        """As `SamplingParams` says it, word by word."""
        s = self.sampling
        x = dict(zip(words, logits, strict=True))
        for word in x:
            x[word] += s.logit_bias.get(word, 0.0)
            if word in s.stop_token_ids and len(text) < s.min_tokens:
                x[word] = -math.inf
            if word in PROMPT + text:
                x[word] = x[word] / s.repetition_penalty if x[word] > 0 else x[word] * s.repetition_penalty
        best = max(x, key=x.__getitem__)
        if s.temperature == 0:
            return [float(word == best) for word in range(V)]
        mass = {word: math.exp((value - x[best]) / s.temperature) for word, value in x.items()}
        mass = {word: m for word, m in mass.items() if m >= s.min_p}
        ranked = sorted(mass, key=mass.__getitem__, reverse=True)[: s.top_k or V]
        kept, total, reached = set(), sum(mass[word] for word in ranked), 0.0
        for word in ranked:
            if reached >= s.top_p * total:
                break
            kept.add(word)
            reached += mass[word]
        return [mass[word] / reached if word in kept else 0.0 for word in range(V)]

    def p(self, text: Text) -> list[float]:
        return self.distribution(range(V), self.p_logits[(PROMPT + text)[-1]], text)

    def q(self, text: Text) -> list[float]:
        q = self.distribution(self.words, self.q_logits[(PROMPT + text)[-1]], text)
        if self.argmax:
            return [float(word == q.index(max(q))) for word in range(V)]
        return q

    def ended(self, text: Text) -> bool:
        return len(text) == self.sampling.max_tokens or bool(set(text[-1:]) & set(self.sampling.stop_token_ids))

    def probabilities(self, text: Text = (), mass: float = 1.0) -> Iterator[tuple[Text, float]]:
        """Every text that the target alone can write, and how often it does."""
        if self.ended(text):
            yield text, mass
            return
        for word, share in enumerate(self.p(text)):
            if share:
                yield from self.probabilities((*text, word), mass * share)

    def cells(self, text: Text = (), cell: Cell | None = None) -> Iterator[Cell]:
        """Cells in which an engine that stands at `text` does one and the same."""
        cell = cell or {}
        if self.ended(text):
            yield cell
        elif self.rule == "match":
            # Drafts change what is accepted, and no text; with one draft per step they follow the text itself.
            drafted = [cell] if self.argmax else [part for _, part in chosen(cell, DRAFT, len(text), self.q(text))]
            for piece in drafted:
                for word, part in chosen(piece, TARGET, len(text), self.p(text)):
                    yield from self.cells((*text, word), part)
        else:
            room = min(self.depth, self.sampling.max_tokens - len(text) - 1) if text else 0
            yield from self.drafted(text, (), room, cell)

    def drafted(self, text: Text, drafts: Text, left: int, cell: Cell) -> Iterator[Cell]:
        if left == 0:
            yield from self.judged(text, drafts, cell)
            return
        for word, part in chosen(cell, DRAFT, len(text + drafts), self.q(text + drafts)):
            yield from self.drafted(text, (*drafts, word), left - 1, part)

    def judged(self, text: Text, drafts: Text, cell: Cell) -> Iterator[Cell]:
        if text and self.ended(text):
            yield cell
            return
        p = self.p(text)
        if not drafts:
            for word, part in chosen(cell, TARGET, len(text), p):
                yield from self.cells((*text, word), part)
            return
        q, draft = self.q(text), drafts[0]
        ratio = min(1.0, p[draft] / q[draft])
        for part in cut(cell, ACCEPT, len(text), (0.0, ratio)):
            yield from self.judged((*text, draft), drafts[1:], part)
        residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        for refused in cut(cell, ACCEPT, len(text), (ratio, 1.0)):
            for word, part in chosen(refused, TARGET, len(text), residual):
                yield from self.cells((*text, word), part)


def cut(cell: Cell, number: int, position: int, span: Span) -> Iterator[Cell]:
    """The part of a cell in which this number lies in this interval, if there is one."""
    low, high = cell.get((number, position), (0.0, 1.0))
    low, high = max(low, span[0]), min(high, span[1])
    if high - low > 1e-14:
        yield cell | {(number, position): (low, high)}


def chosen(cell: Cell, number: int, position: int, mass: list[float]) -> Iterator[tuple[int, Cell]]:
    """Each word that this number can choose, and where it does."""
    total, below = sum(mass), 0.0
    for word, share in enumerate(mass):
        for part in cut(cell, number, position, (below / total, (below + share) / total)):
            yield word, part
        below += share


def integrate(engine: NativeEngine, theory: Theory, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Completion]]:
    """Every cell's volume, and what the engine does in its middle."""
    sampling = theory.sampling
    numbers, volumes, requests = [], [], []
    for seed, cell in enumerate(theory.cells()):
        middle = torch.full((sampling.max_tokens + theory.depth + 1, 3), 0.5, dtype=torch.float64)
        for (number, position), (low, high) in cell.items():
            middle[position, number] = (low + high) / 2
        numbers.append(middle)
        volumes.append(math.prod(high - low for low, high in cell.values()))
        requests.append(Request(str(seed), PROMPT, replace(sampling, seed=seed)))
    assert abs(sum(volumes) - 1) < 1e-12  # the cells are all there is
    monkeypatch.setattr(run, "draw_uniforms", lambda sampling, seed, count: numbers[seed])
    return list(zip(volumes, engine.generate(requests), strict=True))


def total_variation(found: list[tuple[float, Completion]], theory: Theory) -> float:
    gap: dict[Text, float] = defaultdict(float)
    for text, mass in theory.probabilities():
        gap[text] -= mass
    for volume, completion in found:
        gap[tuple(completion.token_ids)] += volume
    return 0.5 * sum(map(abs, gap.values()))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.75},
    "top-k": {"top_k": 3},
    "top-p": {"temperature": 1.5, "top_p": 0.75},
    "min-p": {"min_p": 0.25},
    "repetition penalty": {"repetition_penalty": 1.5},
    "logit bias": {"logit_bias": {1: 1.5, 3: -2.0}},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (2,)},
    "all": {
        "temperature": 1.5,
        "top_k": 3,
        "top_p": 0.875,
        "min_p": 0.125,
        "repetition_penalty": 1.25,
        "logit_bias": {0: 0.5, 4: -0.5},
        "min_tokens": 2,
        "stop_token_ids": (2,),
    },
}
# The engine samples drafts for rejection and takes the argmax for match; the rules serve the other two pairs as well.
DRAFTS = ("sampled", "sampled from fewer words", "argmax")
real_choice = Sampler.choose_draft


def chosen_draft(self: Sampler, uniforms: Any, logits: torch.Tensor, index: int) -> tuple[torch.Tensor, Any]:
    return real_choice(self, None, logits, index)


def sampled_draft(self: Sampler, uniforms: Any, logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
    self.rule = "rejection"
    column, _ = real_choice(self, uniforms, logits, index)
    self.rule = "match"
    return column, None


# With the settings that depend on what was drafted before, or that leave few words, for every k.
PAIRS = [(1, name) for name in SETTINGS] + [
    (k, name) for k in (2, 3) for name in ("plain", "top-k", "repetition penalty", "min_tokens", "all")
]


@pytest.mark.parametrize(("k", "setting"), PAIRS)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_rejection_leaves_the_target_s_distribution(
    drafts: str, k: int, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tokens enough to draft k at once; with every word possible three drafts would make 10^5 cells.
    length = k + 2 if k < 3 or setting in ("top-k", "all") else k + 1
    if drafts == "argmax":
        monkeypatch.setattr(Sampler, "choose_draft", chosen_draft)
    engine = toy(REDUCED if drafts == "sampled from fewer words" else None, num_speculative_tokens=k)
    theory = Theory(engine, SamplingParams(max_tokens=length, **SETTINGS[setting]), argmax=drafts == "argmax")
    found = integrate(engine, theory, monkeypatch)
    assert total_variation(found, theory) < TOTAL_VARIATION
    assert (
        0 < sum(c.spec_num_accepted_tokens or 0 for _, c in found) < sum(c.spec_num_draft_tokens or 0 for _, c in found)
    )


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_match_leaves_the_target_s_distribution(k: int, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy(REDUCED if k == 2 else None, num_speculative_tokens=k, acceptance="match")
    theory = Theory(engine, SamplingParams(max_tokens=4, **SETTINGS[setting]), argmax=True)
    found = integrate(engine, theory, monkeypatch)
    assert total_variation(found, theory) < TOTAL_VARIATION
    assert sum(c.spec_num_accepted_tokens or 0 for _, c in found) > 0


@pytest.mark.parametrize("setting", ["plain", "repetition penalty", "logit bias", "min_tokens"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_greedy_writes_the_target_s_own_text(k: int, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy(None, num_speculative_tokens=k, acceptance="greedy")
    theory = Theory(engine, SamplingParams(max_tokens=9, **SETTINGS[setting] | {"temperature": 0.0}), argmax=True)
    ((mass, completion),) = integrate(engine, theory, monkeypatch)
    assert mass == 1 and total_variation([(mass, completion)], theory) == 0
    # With this bias the drafter's best word is never the target's.
    assert (completion.spec_num_accepted_tokens == 0) == (setting == "logit bias")


@pytest.mark.parametrize(
    ("rule", "argmax"), [("match", True), ("match", False), ("rejection", True), ("rejection", False)]
)
def test_the_rate_of_acceptance_is_theory_s(rule: Any, argmax: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """p(argmax q), sum p*q, p(d), 1 - TV: four laws, of which the last accepts most."""
    if argmax:
        monkeypatch.setattr(Sampler, "choose_draft", chosen_draft)
    elif rule == "match":
        monkeypatch.setattr(Sampler, "choose_draft", sampled_draft)
    engine = toy(None, num_speculative_tokens=1, acceptance=rule)
    theory = Theory(engine, SamplingParams(max_tokens=3), argmax)
    measured = sum(volume * (c.accepted_per_depth or [0])[0] for volume, c in integrate(engine, theory, monkeypatch))
    expected = 0.0
    for first, mass in enumerate(theory.p(())):
        p, q = theory.p((first,)), theory.q((first,))
        overlap = min if rule == "rejection" else lambda a, b: a * b
        expected += mass * sum(overlap(a, b) for a, b in zip(p, q, strict=True))
    assert measured == pytest.approx(expected, abs=TOTAL_VARIATION)
    assert 0.1 < measured < 0.9
