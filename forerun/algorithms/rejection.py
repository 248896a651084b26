"""Rollout tokens or sequences that are too far from the trainer's policy to learn from: verl's rejection sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from forerun.algorithms.importance import LOG_RATIO_BOUND
from forerun.algorithms.sequences import over_sequences

Criterion = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]


class Bounds(NamedTuple):
    """What a statistic may be; `lower` is None for k2 and k3, which are not negative."""

    lower: float | None
    upper: float


def rejection_mask(
    trainer_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    document_ids: Tensor,
    criteria: Mapping[str, Bounds],
) -> Tensor:
    """`mask` without what any criterion rejects: the "masked" kind of importance sampling.

    With d = log pi_trainer - log pi_rollout, a token's k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (Schulman 2020).
    `token_*` judges each token by its own, `seq_sum_*`, `seq_mean_*` and `seq_max_*` a whole sequence by theirs
    (`seq_sum_k1`: the sequence's ratio, `seq_mean_k1`: its geometric mean). Names and arithmetic are those of verl's
    `rollout_correction.rollout_rs`.

    Args:
        trainer_log_probs, rollout_log_probs: float [B, S].
        mask: bool, same shape.
        document_ids: long, same shape; documents must be whole.
        criteria: `parse_criteria`.

    Returns:
        bool [B, S].
    """
    difference = torch.where(mask, trainer_log_probs - rollout_log_probs, 0.0).detach()
    difference = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    statistics = {"k1": -difference, "k2": 0.5 * difference**2, "k3": difference.exp() - 1 - difference}
    kept = mask
    for name, (lower, upper) in criteria.items():
        level, _, kind = name.rpartition("_")
        value = statistics[kind]
        if level == "seq_sum":
            value = over_sequences(value, mask, document_ids, "sum")
        elif level == "seq_mean":
            value = over_sequences(value, mask, document_ids, "mean")
        elif level == "seq_max":
            value = over_sequences(value, mask, document_ids, "amax")
        kept = kept & (value <= upper)
        if lower is not None:
            kept = kept & (value >= lower)
    return kept


def parse_criteria(rollout_rs: str, rollout_rs_threshold: str) -> dict[str, Bounds]:
    """verl's `rollout_rs` and `rollout_rs_threshold`: names separated by commas, one threshold for all or one each.

    A threshold of k1 is a range of ratios, "0.5_2.0" ("2.0" is short for that); of k2 and k3 an upper bound.

    Raises:
        ValueError: an unknown name, another number of thresholds, or one that is no positive number.
    """
    names = list(dict.fromkeys(name.strip() for name in rollout_rs.split(",") if name.strip()))
    thresholds = [text.strip() for text in rollout_rs_threshold.split(",") if text.strip()]
    if not names:
        raise ValueError("names no criterion")
    for name in names:
        if name not in get_args(Criterion):
            raise ValueError(f"{name!r} is not one of {', '.join(get_args(Criterion))}")
    if len(thresholds) == 1:
        thresholds *= len(names)
    if len(thresholds) != len(names):
        raise ValueError(f"has {len(names)} criteria and {len(thresholds)} thresholds: give one, or one for each")
    criteria = {}
    for name, text in zip(names, thresholds, strict=True):
        lower, upper = parse_range(text)
        if not name.endswith("k1"):
            if lower is not None:
                raise ValueError(f"{name} takes an upper bound alone, not {text!r}")
            criteria[name] = Bounds(None, upper)
            continue
        if lower is None and upper < 1:
            raise ValueError(f"{name}: {text} alone stands for 1/{text} to {text}, which is empty: give a range")
        # The statistic is a logarithm, the thresholds are ratios.
        criteria[name] = Bounds(math.log(1 / upper if lower is None else lower), math.log(upper))
    return criteria


def parse_range(text: str) -> tuple[float | None, float]:
    """ "5.0" -> (None, 5.0); "0.5_5.0" -> (0.5, 5.0).

    Raises:
        ValueError: not positive numbers in order.
    """
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not all(0 < number < math.inf for number in numbers) or numbers != sorted(numbers):
        raise ValueError(f"{text!r} is neither a positive number nor a range such as 0.5_5.0")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
