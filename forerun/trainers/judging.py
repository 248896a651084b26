"""From completions to scored samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from forerun.data.prompts import Prompt
from forerun.errors import ForerunError
from forerun.rewards.protocol import RewardRequest, RewardResult
from forerun.rollout.protocol import Completion
from forerun.trainers.experience import Sample

logger = logging.getLogger(__name__)


class Scorer(Protocol):
    """What judges responses: `rewards.runner.RewardRunner`, or anything alike."""

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]: ...


def response_text(tokenizer: PreTrainedTokenizerBase, completion: Completion) -> str:
    """The response as the reward sees it."""
    return str(tokenizer.decode(completion.token_ids, skip_special_tokens=True))


def reward_request(prompt: Prompt, text: str) -> RewardRequest:
    return RewardRequest(
        prompt=prompt.messages,
        response=text,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra=prompt.extra_info,
    )


def judged_samples(
    reward: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    first: int = 0,
) -> list[Sample]:
    """Decode and score; equally many completions for each prompt, one prompt's next to each other.

    `first` is the group of the first prompt.
    """
    n = len(completions) // len(prompts)
    texts = [response_text(tokenizer, completion) for completion in completions]
    rewards = reward.score([reward_request(prompts[i // n], text) for i, text in enumerate(texts)])
    return [
        Sample(prompts[i // n], first + i // n, completion, text, result)
        for i, (completion, text, result) in enumerate(zip(completions, texts, rewards, strict=True))
    ]


def check_rewards(samples: Sequence[Sample], step: int) -> None:
    """Warn of rewards that failed, each kind of failure once.

    Raises:
        ForerunError: every one of them failed; nothing could be learned from that.
    """
    failed = {sample.reward.event: sample.reward for sample in samples if sample.reward.event is not None}
    if all(sample.reward.event is not None for sample in samples):
        example = next(iter(failed.values()))
        raise ForerunError(
            f"step {step}: the reward failed on all {len(samples)} responses ({example.event}: "
            f"{example.detail}): mend reward.function; the same command goes on from the last checkpoint"
        )
    for event in failed.values():
        logger.warning("step %d: reward %s, counted as 0: %s", step, event.event, event.detail)
