"""The engines that the conformance suite judges.

An engine joins with a module here (as native.py) that has one function, a context manager: it launches the engine once
for the whole session, drafting on, yields a `Subject`, and closes the engine. The function goes into `ENGINES`, with
the marker `oracle` if it needs an outside program; it may call `pytest.skip` where that is missing, and gets pytest's
`tmp_path_factory`. What an engine cannot do it names in `lacks`, with the reason; the tests of that are then skipped
with it. Everything else it has to do as the protocol says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from forerun.models.carrier import MTPCarrier, mtp_weight_names, named_weights
from forerun.rollout.protocol import Completion, Request, RolloutEngine, SamplingParams
from forerun.rollout.scoring import TokenScores, score_texts

# Those named as a sampling setting: sampling with it, and reporting the log-probs of the distribution it leaves.
Capability = Literal[
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "seeds",  # a seed fixes a text whatever else is in the batch
    "stop strings",
    "digest",
    "sleep",
    "add",  # requests join a call of `generate` that runs
]


@dataclass
class Subject:
    """An engine under test and what is known of it.

    Attributes:
        engine: drafts at least one token per step.
        model: the model that it was launched with, to compute what it ought to.
        max_model_len: longest prompt + completion.
        tokenizer: the engine's, for stop strings.
        log_prob_tolerance: what its rounding may do to a log-probability.
        lacks: what it cannot do, and why.
    """

    engine: RolloutEngine
    model: MTPCarrier
    max_model_len: int
    tokenizer: PreTrainedTokenizerBase | None = None
    log_prob_tolerance: float = 1e-4
    lacks: Mapping[Capability, str] = field(default_factory=dict)

    def require(self, *capabilities: str) -> None:
        """Skip the test if the engine lacks one of these."""
        for capability, reason in self.lacks.items():
            if capability in capabilities:
                pytest.skip(f"no {capability}: {reason}")

    @property
    def words(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def prompts(self, count: int, seed: int = 0) -> list[list[int]]:
        """Of 1 to 12 tokens, every third one a repetition."""
        generator = torch.Generator().manual_seed(seed)
        made: list[list[int]] = []
        for i in range(count):
            length = int(torch.randint(1, 13, (1,), generator=generator))
            fresh = torch.randint(3, self.words, (length,), generator=generator).tolist()
            made.append(made[i - 2] if i % 3 == 2 else fresh)
        return made

    def scores(self, completions: list[Completion], sampling: SamplingParams) -> list[TokenScores]:
        return score_texts(self.model, completions, sampling)

    def drafter_names(self) -> set[str]:
        return set(mtp_weight_names(self.model).values())

    def perturbed(self, *, trunk: bool, drafter: bool) -> MTPCarrier:
        """Another model of the same shapes."""
        other = copy.deepcopy(self.model)
        names = self.drafter_names()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, tensor in named_weights(other):
                if drafter if name in names else trunk:
                    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
                    tensor.add_(noise * tensor.float().std(correction=0).clamp(min=0.5).to(tensor))
        return other

    @contextmanager
    def holding(self, model: MTPCarrier, version: int) -> Iterator[None]:
        """The engine with these weights, and afterwards with its own again."""
        try:
            self.engine.update_weights(named_weights(model), version)
            yield
        finally:
            self.engine.update_weights(named_weights(self.model), version + 1)


def requests(prompts: list[list[int]], seed: int | None = None, name: str = "r", **sampling: object) -> list[Request]:
    """One request per prompt; seeds count up from the one given."""
    return [
        Request(f"{name}{i}", prompt, SamplingParams(**sampling, seed=None if seed is None else seed + i))  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts)
    ]


def texts(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


def accepted(completions: list[Completion]) -> int:
    return sum(c.spec_num_accepted_tokens or 0 for c in completions)


Launch = Callable[[pytest.TempPathFactory], AbstractContextManager[Subject]]
