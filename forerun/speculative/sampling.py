"""From logits to the distribution that is sampled, and from a distribution and a uniform number to a token.

Target and draft both go through here, so the acceptance rules compare what was really sampled. Every function is pure;
randomness comes in as uniform numbers, one per token position, which makes a request's text its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def add_to_logits(logits: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """Logits with a number added to some of each row's: a logit bias, or -inf for what must not be sampled.

    Args:
        logits: [B, T, V]; not changed.
        tokens: long [B, M], columns of the logits; one may occur several times.
        values: [B, T, M] or what expands to it, finite or -inf.
    """
    columns = tokens[:, None].expand(-1, logits.shape[1], -1)
    return logits.scatter_add(-1, columns, values.to(logits.dtype).expand_as(columns))


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Positive logits of seen tokens divided by the penalty, others multiplied (Keskar et al. 2019, section 4.1).

    Args:
        logits: [B, T, V].
        seen: bool [B, T, V], the tokens that the prompt or the text before each position holds.
        penalty: [B], above 0; 1 changes nothing.
    """
    factor = penalty.to(logits.dtype)[:, None, None]
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def target_distribution(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None
) -> Tensor:
    """The distribution that temperature, then min-p, then top-k, then top-p leave of the logits (vLLM's order).

    Args:
        logits: [B, T, V], any float dtype; computed in float32 (float64 stays).
        temperature: [B]; 0 puts all mass on the largest logit (the first, if several are equal).
        top_k: long [B]; 0 is off. Ties with the k-th largest are kept, as in transformers.
        top_p: [B]; 1 is off. Keeps the smallest set of most probable tokens whose mass reaches top_p.
        min_p: [B]; 0 or None is off. Keeps tokens of at least min_p times the largest probability.

    Returns:
        Probabilities [B, T, V], float32 or float64.
    """
    return TargetDistribution(temperature, top_k, top_p, min_p)(logits)


class TargetDistribution:
    """`target_distribution` for settings that stay: what the host has to know of them is asked of the device once."""

    def __init__(self, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None) -> None:
        self._greedy = temperature == 0
        self._any_greedy, self._all_greedy = bool(self._greedy.any()), bool(self._greedy.all())
        self._scale = torch.where(self._greedy, 1.0, temperature)
        self._scales = bool((self._scale != 1).any())
        self._min_p = min_p if min_p is not None and bool((min_p > 0).any()) else None
        self._top_k, self._widest = top_k, int(top_k.max())
        self._top_p, self._top_p_rows = top_p, (top_p < 1).nonzero().flatten()

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self._all_greedy:
            return _one_hot_argmax(logits)
        scaled = logits / self._scale.to(logits.dtype)[:, None, None] if self._scales else logits
        if self._min_p is not None:
            scaled = _filter_min_p(scaled, self._min_p)
        if self._widest:
            scaled = _filter_top_k(scaled, self._top_k, self._widest)
        if len(self._top_p_rows):
            scaled = _filter_top_p(scaled, self._top_p, self._top_p_rows)
        probs = scaled.softmax(-1)
        if self._any_greedy:
            probs = torch.where(self._greedy[:, None, None], _one_hot_argmax(logits), probs)
        return probs


def _one_hot_argmax(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def _filter_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    threshold = logits.amax(-1, keepdim=True) + min_p.to(logits.dtype).log()[:, None, None]
    return logits.masked_fill(logits < threshold, -math.inf)


def _filter_top_k(logits: Tensor, top_k: Tensor, widest: int) -> Tensor:
    size = logits.shape[-1]
    off = (top_k == 0) | (top_k >= size)
    best = logits.topk(min(widest, size), dim=-1).values
    rank = (top_k.clamp(1, best.shape[-1]) - 1)[:, None, None].expand(*logits.shape[:-1], 1)
    threshold = best.gather(-1, rank).masked_fill(off[:, None, None], -math.inf)
    return logits.masked_fill(logits < threshold, -math.inf)


def _filter_top_p(logits: Tensor, top_p: Tensor, rows: Tensor) -> Tensor:
    # Only the rows that ask for it are sorted: a sort of the vocabulary costs more than everything else here.
    ordered, index = logits[rows].sort(dim=-1, descending=True)
    mass = ordered.softmax(-1).cumsum(-1)
    drop = torch.zeros_like(mass, dtype=torch.bool)
    # A token goes if those before it reach top_p already; the first always stays.
    drop[..., 1:] = mass[..., :-1] >= top_p[rows].to(mass.dtype)[:, None, None]
    kept = logits[rows].masked_fill(torch.zeros_like(drop).scatter(-1, index, drop), -math.inf)
    if len(rows) == logits.shape[0]:
        return kept
    return logits.index_copy(0, rows, kept)


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sample: the first token whose cumulative mass exceeds uniform * total.

    Args:
        probs: [..., V], not negative; need not sum to one, but must not be all zero.
        uniforms: [...], in [0, 1).

    Returns:
        long [...]; never a token of probability 0 (NaN gives the last one: a broken draft, which the rules refuse).
    """
    mass = probs.cumsum(-1, dtype=torch.float64)
    total = mass[..., -1:]
    # A product that rounds up to the total would fall off the end.
    point = torch.minimum(uniforms.double()[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(mass, point, right=True).squeeze(-1).clamp_(max=probs.shape[-1] - 1)
