"""`forerun generate`: answers to prompts by the native engine, with what speculation did for them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.config import ModelConfig
from forerun.data.chat import encode_prompt, stop_token_ids
from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier
from forerun.models.loading import load
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Completion, Request, SamplingParams
from forerun.trainers.experience import speculation_figures
from forerun.trainers.setup import load_tokenizer


@dataclass(frozen=True)
class GenerateOptions:
    """How to answer; `num_speculative_tokens=None` drafts as the MTP block is set to, and not at all without one."""

    num_speculative_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 256
    n: int = 1
    seed: int = 0


def generate_text(model_path: Path, prompts: Sequence[str], options: GenerateOptions) -> int:
    """Print `options.n` answers to each prompt (one turn of a user) on stdout, and the figures on stderr.

    Returns:
        0, the exit code.

    Raises:
        UsageError: settings out of range, no checkpoint, a prompt that fills the context, drafting without a block.
    """
    try:
        sampling = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p)
    except ValueError as error:
        raise UsageError(str(error)) from error
    tokenizer = load_tokenizer(ModelConfig(path=str(model_path)))
    model = load(model_path)
    if options.num_speculative_tokens and not isinstance(model, MTPCarrier):
        raise UsageError(
            f"{model_path} carries no MTP block to draft with: train one with `forerun sft recipes/sft_heads.yaml`, "
            "or leave --num-speculative-tokens out"
        )
    engine = NativeEngine.from_model(model, num_speculative_tokens=options.num_speculative_tokens)
    stops = stop_token_ids(tokenizer, model.generation_config)
    requests = []
    for i, prompt in enumerate(prompts):
        name = f"prompt {i + 1}"
        token_ids = encode_prompt(tokenizer, [{"role": "user", "content": prompt}], engine.max_model_len, name)
        for j in range(options.n):
            # A seed for each answer: they differ among themselves, and the same command gives the same text.
            seed = random.Random(f"{options.seed}/{i}/{j}").getrandbits(31)
            params = SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=seed,
                stop_token_ids=stops,
            )
            requests.append(Request(f"{name}, answer {j + 1}", token_ids, params))
    started = time.perf_counter()
    completions = engine.generate(requests)
    seconds = time.perf_counter() - started
    for completion in completions:
        if len(completions) > 1:
            print(f"--- {completion.request_id}")
        print(tokenizer.decode(completion.token_ids, skip_special_tokens=True))
    print(figures(completions, seconds), file=sys.stderr)
    return 0


def figures(completions: Sequence[Completion], seconds: float) -> str:
    """One line: tokens, rate, and what was drafted and accepted."""
    tokens = sum(len(completion.token_ids) for completion in completions)
    line = f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s)"
    found = speculation_figures(completions)
    if not found["acceptance_length"]:
        return f"{line}, without drafting"
    return (
        f"{line}, {found['spec_num_accepted_tokens']:.0f} of {found['spec_num_draft_tokens']:.0f} drafted tokens "
        f"accepted, acceptance length {found['acceptance_length']:.2f}"
    )
