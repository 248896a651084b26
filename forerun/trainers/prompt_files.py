"""The prompts of an RL run: read from its files, and those left out that are too long."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from forerun.config import DataConfig
from forerun.data.chat import encode_prompt
from forerun.data.prompts import Prompt, read_prompts
from forerun.data.rows import first_few
from forerun.errors import UsageError
from forerun.rewards.worker import picked

logger = logging.getLogger(__name__)


def read_files(files: Sequence[str], limit: int | None, data: DataConfig) -> list[Prompt]:
    """The first `limit` prompts of these files; None reads all.

    Raises:
        UsageError: a file or, as `data.on_bad_row` has it, a row cannot be used.
    """
    return [prompt for file in files for prompt in read_prompts(file, data.on_bad_row, logger.warning)][:limit]


def check_ground_truth(prompts: Sequence[Prompt], function: str) -> None:
    """Refuse prompts without what a built-in reward compares an answer with.

    Args:
        function: `reward.function`; one of the user's own may do without.

    Raises:
        UsageError
    """

    def compares(prompt: Prompt) -> bool:
        name = picked(prompt.data_source, prompt.extra_info) if function == "auto" else function
        return name in ("math", "exact_match")  # a task of reasoning-gym scores by itself

    bare = [prompt.place for prompt in prompts if prompt.ground_truth is None and compares(prompt)]
    if bare:
        raise UsageError(
            f"{len(bare)} of {len(prompts)} prompts have no ground truth for reward.function={function} to compare "
            f"with ({first_few(bare)}): give each row a column ground_truth, answer or solution, or verl's "
            "reward_model.ground_truth, or write a reward.function of your own"
        )


def usable_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, limit: int, data: DataConfig
) -> list[Prompt]:
    """The prompts of at most `limit` tokens; longer ones stop the run or are left out, as `data.on_too_long` has it.

    Raises:
        UsageError: prompts are too long and none may be, or none is left.
    """
    usable: list[Prompt] = []
    bad: list[str] = []
    long: list[str] = []
    longest = 0
    for index, prompt in enumerate(prompts):
        name = prompt.place or f"prompt {index}"
        try:
            length = len(encode_prompt(tokenizer, prompt.messages, name=name))
        except UsageError as error:
            bad.append(str(error))
            continue
        if length <= limit:
            usable.append(prompt)
            continue
        long.append(f"{name}: {length}")
        longest = max(longest, length)
    if bad:
        raise UsageError(f"{len(bad)} of {len(prompts)} prompts cannot be used: {first_few(bad)}")
    said = (
        f"{len(long)} of {len(prompts)} prompts have more tokens than rollout.max_prompt_length={limit} "
        f"({first_few(long)})"
    )
    if long and (data.on_too_long == "error" or not usable):
        skip = ", or data.on_too_long=skip" if usable else ""
        raise UsageError(f"{said}: set rollout.max_prompt_length={longest}{skip}")
    if long:
        logger.warning("%s: they are left out", said)
    return usable
