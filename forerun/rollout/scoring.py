"""What a model says of texts that an engine wrote: teacher-forced, under the distribution that was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.rollout.protocol import Completion, SamplingParams
from forerun.speculative.sampling import add_to_logits, penalise_repetition, target_distribution

_LOGITS_AT_ONCE = 2**25


class TokenScores(NamedTuple):
    """Per token of a text, float64 [T].

    `raw` and `log_prob`: log-probability under the model's own and the sampled distribution; `regret`: by how much
    the logit, with everything added that sampling adds, lies below the largest; `outside`: the same to the smallest
    one that is sampled at all; `before_rank`, `before_id`: mass of the words that are more probable than the token, or
    have a smaller id.
    """

    raw: Tensor
    log_prob: Tensor
    regret: Tensor
    outside: Tensor
    before_rank: Tensor
    before_id: Tensor


@torch.no_grad()
def score_texts(
    model: PreTrainedModel, completions: Sequence[Completion], sampling: SamplingParams
) -> list[TokenScores]:
    """Teacher-force texts that were all sampled with these settings.

    Args:
        model: a causal LM; it computes in its own dtype, what follows the logits is float64.
        completions: with at least one token each.
        sampling: as in their requests.
    """
    rows = [c.prompt_token_ids + c.token_ids for c in completions]
    words = int(model.get_output_embeddings().weight.shape[0])
    longest = max(map(len, rows))
    at_once = max(1, _LOGITS_AT_ONCE // (longest * words))
    scores = []
    was_training = model.training
    model.eval()
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once]
        # A causal model sees nothing of the padding, which is on the right.
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in part], device=model.device)
        logits = model(input_ids=padded).logits
        for c, row_logits in zip(completions[start : start + at_once], logits, strict=True):
            first = len(c.prompt_token_ids) - 1
            scores.append(_score_text(row_logits[first : first + len(c.token_ids)].cpu().double(), c, sampling))
    model.train(was_training)
    return scores


def _score_text(logits: Tensor, completion: Completion, sampling: SamplingParams) -> TokenScores:
    """`logits` float64 [T, V]."""
    tokens = torch.tensor(completion.token_ids)[:, None]
    adjusted, probs = _sampled_from(logits, completion, sampling)
    mass = probs.gather(1, tokens)
    logit = adjusted.gather(1, tokens)
    lowest = adjusted.masked_fill(probs == 0, torch.inf).amin(1, keepdim=True)
    earlier = torch.arange(logits.shape[1]) < tokens
    return TokenScores(
        raw=logits.log_softmax(1).gather(1, tokens).squeeze(1),
        log_prob=mass.log().squeeze(1),
        regret=(adjusted.amax(1, keepdim=True) - logit).squeeze(1),
        outside=(lowest - logit).squeeze(1),
        # Of equally probable words the one with the smaller id comes first.
        before_rank=(probs * ((probs > mass) | ((probs == mass) & earlier))).sum(1),
        before_id=(probs * earlier).sum(1),
    )


def _sampled_from(logits: Tensor, completion: Completion, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Logits [T, V] with everything added that sampling adds, and the distribution that is sampled."""
    adjusted = logits[None]
    if sampling.logit_bias:
        words, values = torch.tensor(list(sampling.logit_bias)), torch.tensor(list(sampling.logit_bias.values()))
        adjusted = add_to_logits(adjusted, words[None], values.expand(1, logits.shape[0], -1))
    stops = [word for word in sampling.stop_token_ids if 0 <= word < logits.shape[1]]
    if sampling.min_tokens and stops:
        early = torch.arange(logits.shape[0]) < sampling.min_tokens
        bans = torch.zeros(early.shape).masked_fill(early, -torch.inf)
        adjusted = add_to_logits(adjusted, torch.tensor([stops]), bans[None, :, None].expand(-1, -1, len(stops)))
    if sampling.repetition_penalty != 1:
        seen = torch.zeros(adjusted.shape, dtype=torch.bool)
        seen[..., completion.prompt_token_ids] = True
        for position, token in enumerate(completion.token_ids[:-1], start=1):
            seen[:, position:, token] = True
        adjusted = penalise_repetition(adjusted, seen, torch.tensor([sampling.repetition_penalty]))
    probs = target_distribution(
        adjusted,
        torch.tensor([sampling.temperature]),
        torch.tensor([sampling.top_k]),
        torch.tensor([sampling.top_p]),
        torch.tensor([sampling.min_p]),
    )
    return adjusted[0], probs[0]
