"""Sampling settings in vLLM's terms, and the ones that it does not have."""

from __future__ import annotations

from typing import Any

from forerun.errors import UsageError
from forerun.rollout.protocol import Request, SamplingParams

# vLLM takes smaller ones for the first (above 1e-5) and refuses larger ones than the second.
_COLDEST, _HOTTEST = 0.01, 2.0
_SEEDS = 2**63


def check_sampling(request: Request, *, speculative: bool, has_tokenizer: bool) -> None:
    """Refuse what vLLM would refuse, or would do otherwise than asked; see `why_not`.

    Raises:
        UsageError: naming the request and the setting.
    """
    if (reason := why_not(request.sampling, speculative=speculative, has_tokenizer=has_tokenizer)) is not None:
        raise UsageError(f"request {request.request_id!r}: {reason}")


def why_not(sampling: SamplingParams, *, speculative: bool, has_tokenizer: bool) -> str | None:
    """Why vLLM cannot sample so, beginning with the setting; None if it can.

    Args:
        sampling: what is asked for.
        speculative: whether vLLM drafts; it then has neither min-p nor logit biases.
        has_tokenizer: whether it can turn tokens into text, to look for stop strings.
    """
    s = sampling
    if speculative and s.min_p:
        return f"min_p={s.min_p} is not supported by vLLM while it drafts: launch it without, or use top_p"
    if speculative and s.logit_bias:
        return "logit_bias is not supported by vLLM while it drafts: launch it with num_speculative_tokens=0"
    if s.temperature > _HOTTEST or 0 < s.temperature < _COLDEST:
        return f"temperature={s.temperature} is none of vLLM's, which are 0 and {_COLDEST} to {_HOTTEST}"
    if s.seed is not None and not 0 <= s.seed < _SEEDS:
        return f"seed={s.seed} must lie between 0 and 2**63 - 1 for vLLM"
    if s.stop and not has_tokenizer:
        return "stop needs a tokenizer, and the served checkpoint has none: use stop_token_ids"
    return None


def vllm_sampling(request: Request, max_model_len: int) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for a request that `check_sampling` let pass."""
    sampling = request.sampling
    # The server refuses what would not fit into the context, where the offline engine stops in time.
    room = min(sampling.max_tokens, max_model_len - len(request.prompt_token_ids))
    return {
        "max_tokens": room,
        "min_tokens": min(sampling.min_tokens, room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {int(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": True,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,  # a stop string may be one
        "ignore_eos": True,  # only what a request names ends it
        "logprobs": 0,  # of the sampled token alone
    }
