"""A slow reference for the engine: every setting token by token, one forward of the whole text for each token."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.rollout.native.sampler import TARGET, draw_uniforms
from forerun.rollout.protocol import Request, SamplingParams
from tests.rollout import tiny

STOPS = tuple(range(0, tiny.VOCAB, 6))
SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "bias": {"logit_bias": {3: 4.0, 40: -30.0, 17: 2.5}},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": STOPS},
    "penalty": {"repetition_penalty": 1.7},
    "encouragement": {"repetition_penalty": 0.8},
    "min_p": {"min_p": 0.2},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "all": {
        "logit_bias": {3: 2.0, 40: -2.0},
        "min_tokens": 5,
        "stop_token_ids": STOPS,
        "repetition_penalty": 1.4,
        "min_p": 0.02,
        "top_k": 20,
        "top_p": 0.95,
    },
}


def distribution(logits: Tensor, text: list[int], prompt: list[int], sampling: SamplingParams) -> Tensor:
    """What the next token of `text` is sampled from: vLLM's order, a token and a setting at a time."""
    logits = logits.clone()
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if len(text) < sampling.min_tokens:
        for token in sampling.stop_token_ids:
            logits[token] = -math.inf
    for token in {*prompt, *text}:
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    probs = (logits / sampling.temperature).softmax(0)
    probs[probs < sampling.min_p * probs.max()] = 0
    if sampling.top_k:
        probs[probs < probs.sort(descending=True).values[sampling.top_k - 1]] = 0
    probs /= probs.sum()
    order = probs.argsort(descending=True)
    mass = probs[order].cumsum(0)
    probs[order[1:][mass[:-1] >= sampling.top_p]] = 0
    return probs / probs.sum()


class Text(NamedTuple):
    """What a request comes to."""

    token_ids: list[int]
    log_probs: list[float]
    raw_log_probs: list[float]


@torch.no_grad()
def written(model: PreTrainedModel, request: Request, context: int = 96) -> Text:
    """The text, one token per forward of all of it; with a temperature, the one of the rule `match`."""
    prompt, sampling = list(request.prompt_token_ids), request.sampling
    most = min(sampling.max_tokens, context - len(prompt))
    text: list[int] = []
    log_probs, raws = [], []
    uniforms = draw_uniforms(sampling, sampling.seed, most)
    while len(text) < most and (not text or text[-1] not in sampling.stop_token_ids):
        logits = model(torch.tensor([prompt + text])).logits[0, -1].double()
        probs = distribution(logits, text, prompt, sampling)
        if uniforms is None:
            token = int(probs.argmax())
        else:
            token = int((probs.cumsum(0) > uniforms[len(text), TARGET]).nonzero()[0])
        log_probs.append(float(probs[token].log()))
        raws.append(float(logits.log_softmax(0)[token]))
        text.append(token)
    return Text(text, log_probs, raws)
