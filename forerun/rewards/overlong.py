"""DAPO's soft penalty on answers that come close to the length limit."""

from __future__ import annotations


def overlong_penalty(
    response_length: int, max_response_length: int, overlong_buffer_len: int, penalty_factor: float = 1.0
) -> float:
    """A number in [-penalty_factor, 0] to add to an answer's score.

    0 up to max_response_length - overlong_buffer_len tokens, then falling linearly to -penalty_factor at
    max_response_length (DAPO, arXiv 2503.14476, section 3.4, equation 13; verl's `overlong_buffer`).

    Args:
        response_length: tokens of the answer, its end token included.

    Raises:
        ValueError: a buffer that is empty or larger than the limit.
    """
    if not 0 < overlong_buffer_len <= max_response_length:
        raise ValueError(
            f"overlong_buffer_len={overlong_buffer_len} must lie in 1..max_response_length={max_response_length}"
        )
    exceeded = response_length - (max_response_length - overlong_buffer_len)
    return -penalty_factor * min(max(exceeded / overlong_buffer_len, 0.0), 1.0)
