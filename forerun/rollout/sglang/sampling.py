"""`SamplingParams` in SGLang's words, what of them SGLang cannot do, and its log-probabilities in ours.

Read in SGLang 0.5.23: `sampling/sampling_params.py`, `layers/sampler.py`, `layers/logprob_processor.py` and, for a step
that verifies drafts, `speculative/eagle_utils.py`. What it reports is log_softmax(logits / temperature) after penalties
and biases, before top-k, top-p and min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from forerun.rollout.protocol import SamplingParams
from forerun.rollout.sglang.server import ServerFacts

_MOST_STOP_STRINGS = 32
_ALL_TOKENS = -1


def why_not(sampling: SamplingParams, facts: ServerFacts, ends: frozenset[int]) -> str | None:
    """Why this server cannot sample so, as the rest of a sentence; None if it can.

    Args:
        sampling: what is asked for.
        facts: the server's settings.
        ends: tokens that always end a text there once a stop token is named, see `server.end_tokens`.
    """
    s = sampling
    if s.repetition_penalty != 1:
        return (
            f"repetition_penalty={s.repetition_penalty}: SGLang penalises what the text holds and not what the prompt "
            "does; use 1"
        )
    if s.min_tokens and s.stop:
        return f"min_tokens={s.min_tokens} with stop strings: SGLang heeds it for stop tokens alone"
    if s.min_tokens and s.stop_token_ids and facts.drafts:
        return (
            f"min_tokens={s.min_tokens} while drafting: SGLang counts whole steps there and may hold a stop token "
            "back for longer; use 0, or launch it without drafting"
        )
    if s.stop_token_ids and (lacking := sorted(ends - set(s.stop_token_ids))):
        return (
            f"stop_token_ids that lack {lacking}: once any is named, SGLang ends at the model's own end tokens, too; "
            "name them"
        )
    if s.stop and not facts.has_tokenizer:
        return "stop strings, but the server runs with --skip-tokenizer-init"
    if len(s.stop) > _MOST_STOP_STRINGS:
        return f"{len(s.stop)} stop strings: SGLang takes {_MOST_STOP_STRINGS}"
    if s.seed is not None and not facts.deterministic:
        return f"seed={s.seed}, which SGLang passes over unless launched with --enable-deterministic-inference"
    if s.seed is not None and not -(2**63) <= s.seed < 2**63:
        return f"seed={s.seed}, which has more than 64 bits"
    return None if s.temperature == 0 else why_not_filters(s, facts.drafts)


def why_not_filters(sampling: SamplingParams, drafts: bool) -> str | None:
    """The same for min-p, top-k and top-p at a temperature above 0."""
    s = sampling
    if s.min_p > 0 and drafts:
        return f"min_p={s.min_p} while drafting: SGLang's verification passes over it; use 0"
    if s.top_p < 1 and not drafts:
        return (
            f"top_p={s.top_p} without drafting: SGLang takes it of all tokens at once with top_k, or reports no "
            "log-probs for it; use 1"
        )
    if (s.top_p < 1 or s.min_p > 0) and not s.top_k:
        return (
            f"top_p={s.top_p}, min_p={s.min_p} without top_k: SGLang's log-probs are those before these filters, and "
            "only with top_k does it tell enough to renormalise them; set top_k"
        )
    return None


def to_sglang(sampling: SamplingParams, max_new_tokens: int, seed: int | None) -> dict[str, Any]:
    """`sampling_params` of /generate. Every setting is sent: what is left out would come from the model's files."""
    s = sampling
    body: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k or _ALL_TOKENS,
        "min_p": s.min_p,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        # With ignore_eos SGLang looks for no stop token at all, the named ones included.
        "ignore_eos": not s.stop_token_ids,
        "stop_token_ids": list(s.stop_token_ids),
        "stop": list(s.stop),
        # Without a stop token there is nothing to hold back, yet SGLang would forbid the model's end tokens.
        "min_new_tokens": s.min_tokens if s.stop_token_ids else 0,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "n": 1,
    }
    if s.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in s.logit_bias.items()}
    if seed is not None:
        body["sampling_seed"] = seed
    return body


def top_log_probs_wanted(sampling: SamplingParams) -> int:
    """`top_logprobs_num` of /generate: what is needed to renormalise after the filters, 0 without them."""
    return sampling.top_k if sampling.temperature > 0 else 0


def sampled_log_probs(
    sampling: SamplingParams, reported: Sequence[float], top: Sequence[Sequence[float]]
) -> list[float]:
    """Log-probs under the distribution that was sampled.

    Args:
        sampling: how it was.
        reported: SGLang's log-prob of each token.
        top: per token the `top_k` largest log-probs at its position, in any order; not read without filters.
    """
    if sampling.temperature == 0:
        return [0.0] * len(reported)
    if not sampling.top_k:
        return list(reported)
    # The least likely token that is kept cannot lie below the filters' edge by more than rounding.
    return [min(0.0, own - _log_mass(sampling, kept)) for own, kept in zip(reported, top, strict=True)]


def _log_mass(sampling: SamplingParams, log_probs: Sequence[float]) -> float:
    """Log of the mass that the filters keep, of the `top_k` largest log-probs."""
    probs = sorted((math.exp(value) for value in log_probs), reverse=True)
    mass = sum(probs)
    kept = 0.0
    for prob in probs:
        if kept >= sampling.top_p * mass or prob < sampling.min_p * probs[0]:
            break
        kept += prob
    return math.log(kept)


def raw_log_probs(sampling: SamplingParams, reported: Sequence[float]) -> list[float] | None:
    """Log-probs under the model's own distribution, None where SGLang does not tell them."""
    held_back = sampling.min_tokens and sampling.stop_token_ids
    if sampling.temperature not in (0, 1) or sampling.logit_bias or held_back:
        return None
    return list(reported)
