"""The prompts of an RL run: read from its files, and those left out that are too long."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from forerun.config import DataConfig
from forerun.data.chat import encode_prompt
from forerun.data.prompts import Prompt, read_prompts
from forerun.errors import UsageError

logger = logging.getLogger(__name__)


def read_files(files: Sequence[str], limit: int | None, data: DataConfig) -> list[Prompt]:
    """The first `limit` prompts of these files; None reads all.

    Raises:
        UsageError: a file or, as `data.on_bad_row` has it, a row cannot be used.
    """
    return [prompt for file in files for prompt in read_prompts(file, data.on_bad_row, logger.warning)][:limit]


def usable_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, limit: int, data: DataConfig
) -> list[Prompt]:
    """The prompts of at most `limit` tokens; a longer one stops the run or is left out, as `data.on_too_long` has it.

    Raises:
        UsageError: a prompt is too long and none may be, or none is left.
    """
    usable = []
    for index, prompt in enumerate(prompts):
        length = len(encode_prompt(tokenizer, prompt.messages, name=f"prompt {index}"))
        if length <= limit:
            usable.append(prompt)
            continue
        message = f"prompt {index} has {length} tokens, more than rollout.max_prompt_length={limit}"
        if data.on_too_long == "error":
            raise UsageError(f"{message}: raise it, or set data.on_too_long=skip")
        logger.warning("left out: %s", message)
    if not usable:
        raise UsageError(f"no prompt fits rollout.max_prompt_length={limit}: raise it, or give other prompts")
    return usable
