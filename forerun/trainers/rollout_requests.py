"""From prompts to requests: how a run samples, and the seed of each response."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from forerun.config import RLConfig
from forerun.data.chat import encode_prompt
from forerun.data.prompts import Prompt
from forerun.rollout.protocol import Request, SamplingParams


@dataclass(frozen=True)
class RequestMaker:
    """Makes the requests of a run.

    Args:
        config: the run's.
        tokenizer: the model's.
        stop_token_ids: tokens that end a response.
    """

    config: RLConfig
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]

    def requests(self, prompt: Prompt, step: int, place: int, n: int, held_out: bool = False) -> list[Request]:
        """n requests for the prompt at `place` of an RL step; their ids are those three numbers.

        Those for a held-out prompt are sampled as `rollout.val_kwargs` says.
        Each has a seed of its own, from the run's seed, the step and its place: a resumed run samples the same. SGLang
        heeds seeds in its deterministic mode alone, and gets none otherwise.
        """
        rollout, seed = self.config.rollout, self.config.trainer.seed
        sampling = rollout.val_kwargs if held_out else rollout
        token_ids = encode_prompt(self.tokenizer, prompt.messages)
        seeded = rollout.engine != "sglang" or rollout.deterministic
        return [
            Request(
                f"{step}-{place}-{j}",
                token_ids,
                SamplingParams(
                    max_tokens=rollout.max_response_length,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    seed=random.Random(f"{seed}/{step}/{place}/{j}").getrandbits(31) if seeded else None,
                    stop_token_ids=self.stop_token_ids,
                ),
            )
            for j in range(n)
        ]

    def batch(
        self, prompts: Sequence[Prompt], step: int, first: int = 0, n: int | None = None, held_out: bool = False
    ) -> list[Request]:
        """Those of several prompts, the first of them at place `first`; n is `rollout.n` unless given."""
        count = self.config.rollout.n if n is None else n
        return [
            request
            for place, prompt in enumerate(prompts, start=first)
            for request in self.requests(prompt, step, place, count, held_out)
        ]
