"""What no engine can run, whichever it is."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.errors import UsageError
from forerun.rollout.protocol import Request


def check_requests(requests: Sequence[Request], max_model_len: int, vocab_size: int) -> None:
    """Refuse requests that cannot be told apart, prompts that cannot be run, and tokens that the model does not have.

    Raises:
        UsageError: naming the request.
    """
    seen: set[str] = set()
    for request in requests:
        name, prompt, sampling = request.request_id, request.prompt_token_ids, request.sampling
        if name in seen:
            raise UsageError(f"two requests have the id {name!r}: ids must differ")
        seen.add(name)
        if len(prompt) == 0:
            raise UsageError(f"request {name!r} has an empty prompt: give at least one token")
        if len(prompt) >= max_model_len:
            raise UsageError(
                f"request {name!r} has a prompt of {len(prompt)} tokens, which leaves no room in the context of "
                f"{max_model_len}: shorten it"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UsageError(f"request {name!r} holds token ids outside 0..{vocab_size - 1}")
        if sampling.logit_bias and not (min(sampling.logit_bias) >= 0 and max(sampling.logit_bias) < vocab_size):
            raise UsageError(f"request {name!r} has a logit_bias for token ids outside 0..{vocab_size - 1}")
        if sampling.min_tokens and len({t for t in sampling.stop_token_ids if 0 <= t < vocab_size}) == vocab_size:
            raise UsageError(f"request {name!r} has min_tokens={sampling.min_tokens}, and every token would stop it")
