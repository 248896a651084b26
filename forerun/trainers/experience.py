"""What a rollout brought: scored responses, their figures, and the micro-batches they become."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from forerun.algorithms.advantages import advantages
from forerun.algorithms.filtering import informative_groups
from forerun.config import OverlongBufferConfig
from forerun.config_algorithm import AlgorithmConfig
from forerun.data.batch import Batch
from forerun.data.chat import response_document
from forerun.data.detokenize import Detokenizer
from forerun.data.packing import pack
from forerun.data.prompts import Prompt
from forerun.errors import UsageError
from forerun.rewards.overlong import overlong_penalty
from forerun.rewards.protocol import RewardResult
from forerun.rollout.protocol import Completion

Figures = dict[str, float | None]


@dataclass
class Sample:
    """One response. `group` is the index of its prompt within the step; `text` is what the reward saw.

    `overlong_penalty` is in the reward's score already.
    """

    prompt: Prompt
    group: int
    completion: Completion
    text: str
    reward: RewardResult
    overlong_penalty: float = 0.0
    advantage: float = 0.0


def shape_rewards(samples: Sequence[Sample], buffer: OverlongBufferConfig, max_response_length: int) -> None:
    """Add DAPO's penalty on nearly overlong responses to the scores, in place, where it is enabled."""
    if not buffer.enable:
        return
    for sample in samples:
        length = len(sample.completion.token_ids)
        sample.overlong_penalty = overlong_penalty(length, max_response_length, buffer.len, buffer.penalty_factor)
        sample.reward = replace(sample.reward, score=sample.reward.score + sample.overlong_penalty)


def informative_samples(samples: Sequence[Sample], metric: str) -> list[Sample]:
    """The samples of groups whose `metric` is not the same for all (`algorithm.filter_groups.metric`).

    Raises:
        UsageError: no reward has such a field.
    """
    values = [_metric(sample, metric) for sample in samples]
    if all(value is None for value in values):
        fields = {name for sample in samples for name in sample.reward.fields}
        raise UsageError(
            f"algorithm.filter_groups.metric={metric}: the reward function returns no such field; "
            f"there are {', '.join(sorted({'reward', 'acc', *fields}))}"
        )
    # A reward that failed has no fields, and a score of 0.
    known = torch.tensor([0.0 if value is None else value for value in values], dtype=torch.float64)
    kept = informative_groups(known, torch.tensor([sample.group for sample in samples]))
    return [sample for sample, keep in zip(samples, kept.tolist(), strict=True) if keep]


def _metric(sample: Sample, name: str) -> float | None:
    if name == "reward":
        return sample.reward.score
    if name == "acc" and not sample.reward.fields:
        return sample.reward.score - sample.overlong_penalty
    return sample.reward.fields.get(name)


def set_advantages(
    samples: Sequence[Sample], algorithm: AlgorithmConfig, penalties: Sequence[float] | None = None
) -> None:
    """Advantages from the rewards, in place (see `forerun.algorithms.advantages`).

    `penalties`, one for each sample, are taken from the rewards first.
    """
    rewards = torch.tensor([sample.reward.score for sample in samples], dtype=torch.float64)
    if penalties is not None:
        rewards -= torch.tensor(penalties, dtype=torch.float64)
    groups = torch.tensor([sample.group for sample in samples])
    found = advantages(rewards, groups, algorithm.adv_estimator, algorithm.norm_adv_by_std_in_grpo)
    for sample, advantage in zip(samples, found.tolist(), strict=True):
        sample.advantage = advantage


def sample_batches(
    samples: Sequence[Sample], micro_batch_size: int, temperature: float, max_row_length: int | None = None
) -> list[Batch]:
    """Micro-batches of at most `micro_batch_size` responses each, packed; longest responses first.

    With `max_row_length` a micro-batch is one row instead, of as many responses, prompts included, as have room in so
    many tokens.

    The extras are advantages, rollout_log_probs (at the sampling temperature), sample (which of `samples` it
    is) and truncated (1 where the length limit cut the response off), on the response's tokens.
    """
    # An engine may report both; without a temperature the unfiltered one is what a trainer computes too.
    raw = temperature == 1.0
    documents = [
        response_document(
            sample.completion.prompt_token_ids,
            sample.completion.token_ids,
            {
                "advantages": sample.advantage,
                "rollout_log_probs": _log_probs(sample.completion, raw),
                "sample": index,
                "truncated": int(sample.completion.finish_reason == "length"),
            },
        )
        for index, sample in enumerate(samples)
    ]
    if max_row_length is not None:
        return pack(documents, max_row_length, micro_batch_size=1)
    documents.sort(key=len, reverse=True)
    batches = []
    for start in range(0, len(documents), micro_batch_size):
        together = documents[start : start + micro_batch_size]
        batches += pack(together, len(together[0]), micro_batch_size)
    return batches


def _log_probs(completion: Completion, raw: bool) -> list[float]:
    return completion.raw_log_probs if raw and completion.raw_log_probs is not None else completion.log_probs


def best_of_groups(samples: Sequence[Sample]) -> float:
    """The best reward among a prompt's responses, in the mean over prompts."""
    best: dict[int, float] = {}
    for sample in samples:
        best[sample.group] = max(best.get(sample.group, -math.inf), sample.reward.score)
    return statistics.fmean(best.values())


def rollout_figures(samples: Sequence[Sample]) -> Figures:
    """Rewards, response lengths and speculation of one rollout; None where the engine cannot say."""
    rewards = [sample.reward.score for sample in samples]
    lengths = [len(sample.completion.token_ids) for sample in samples]
    solved: dict[int, set[float]] = {}
    for sample in samples:
        solved.setdefault(sample.group, set()).add(sample.reward.score)
    figures: Figures = {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "reward_max": max(rewards),
        "reward_min": min(rewards),
        "reward_events": float(sum(sample.reward.event is not None for sample in samples)),
        # Groups with equal rewards teach nothing.
        "informative_groups": sum(len(scores) > 1 for scores in solved.values()) / len(solved),
        "response_length_mean": statistics.fmean(lengths),
        "response_length_max": float(max(lengths)),
        "response_clip_ratio": statistics.fmean(s.completion.finish_reason == "length" for s in samples),
    }
    for name in sorted({name for sample in samples for name in sample.reward.fields}):
        figures[f"reward/{name}"] = statistics.fmean(s.reward.fields[name] for s in samples if name in s.reward.fields)
    if any(sample.overlong_penalty for sample in samples):
        figures["overlong_penalty_mean"] = statistics.fmean(sample.overlong_penalty for sample in samples)
    return figures | speculation_figures([sample.completion for sample in samples])


def speculation_figures(completions: Sequence[Completion]) -> Figures:
    """spec_num_* summed, acceptance_length, acceptance_rate, acceptance/depth_{k} (accepted / drafted at depth k)."""
    drafted, accepted, steps = (
        _sum_or_none([getattr(completion, name) for completion in completions])
        for name in ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
    )
    figures: Figures = {
        "spec_num_draft_tokens": drafted,
        "spec_num_accepted_tokens": accepted,
        "spec_num_verify_steps": steps,
        "acceptance_length": 1 + accepted / steps if steps and accepted is not None else None,
        "acceptance_rate": accepted / drafted if drafted and accepted is not None else None,
    }
    per_depth: dict[int, list[int]] = {}
    for completion in completions:
        pairs = zip(completion.drafted_per_depth or [], completion.accepted_per_depth or [], strict=True)
        for depth, (tried, kept) in enumerate(pairs, start=1):
            sums = per_depth.setdefault(depth, [0, 0])
            sums[0] += tried
            sums[1] += kept
    for depth, (tried, kept) in per_depth.items():
        figures[f"acceptance/depth_{depth}"] = kept / tried if tried else None
    return figures


def _sum_or_none(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(sum(known)) if len(known) == len(values) else None


def text_table(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[Mapping[str, object]]:
    """The first responses as rows for people: prompt, response, reward, acceptance length, and the response's tokens.

    `tokens` are pieces of text that make up the response, and `accepted_draft` says which of them were accepted drafts;
    None where the engine cannot say.
    """
    return [
        {
            "prompt": sample.prompt.messages[-1]["content"],
            "response": sample.text,
            "reward": sample.reward.score,
            "event": sample.reward.event,
            "acceptance_length": sample.completion.acceptance_length,
            "tokens": token_pieces(sample.completion.token_ids, sample.text, tokenizer),
            "accepted_draft": sample.completion.accepted_draft,
        }
        for sample in samples[:limit]
    ]


def token_pieces(token_ids: Sequence[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
    """What each token adds to `text`, which they decode to without special tokens: their concatenation is `text`.

    A token inside a character adds nothing, the one that completes it the character. None where the tokenizer writes
    the tokens otherwise as a whole than one after the other.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.push(token) for token in token_ids]
    written = "".join(pieces)
    if not text.startswith(written):
        return None
    if pieces:  # bytes of a character that was never finished
        pieces[-1] += text[len(written) :]
    return pieces
