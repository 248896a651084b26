"""`forerun generate`: answers to prompts by the native engine as they grow, with what speculation did for them."""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from forerun.config import EngineConfig, ModelConfig
from forerun.data.chat import encode_prompt, stop_token_ids
from forerun.data.detokenize import Detokenizer
from forerun.data.rows import is_text
from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier
from forerun.models.loading import load
from forerun.report.progress import ProgressBar
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Completion, Request, SamplingParams
from forerun.trainers.experience import speculation_figures
from forerun.trainers.setup import load_tokenizer, resolve_device


@dataclass(frozen=True)
class GenerateOptions:
    """How to answer; `num_speculative_tokens=None` drafts as the MTP block is set to, and not at all without one."""

    num_speculative_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    max_tokens: int = 256
    n: int = 1
    seed: int = 0


def generate_text(model_path: Path, prompts: Sequence[str], options: GenerateOptions) -> int:
    """Print `options.n` answers to each prompt (one turn of a user) on stdout, and the figures on stderr.

    Answers are printed in their order, each as it grows.

    Returns:
        0, the exit code.

    Raises:
        UsageError: settings out of range, no checkpoint, a prompt that fills the context, drafting without a block.
    """
    if unusable := [text for text in options.stop if not is_text(text)]:
        raise UsageError(f"--stop {unusable[0]!r} is not valid UTF-8: give it as text")
    try:
        sampling = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            stop=options.stop,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    tokenizer = load_tokenizer(ModelConfig(path=str(model_path)))
    model = load(model_path)
    if options.num_speculative_tokens and not isinstance(model, MTPCarrier):
        raise UsageError(
            f"{model_path} carries no MTP block to draft with: train one with `forerun sft recipes/sft_heads.yaml`, "
            "or leave --num-speculative-tokens out"
        )
    engine = NativeEngine(
        model,
        tokenizer=tokenizer,
        num_speculative_tokens=options.num_speculative_tokens,
        device=resolve_device(EngineConfig()),
    )
    stops = stop_token_ids(tokenizer, model.generation_config)
    requests = []
    for i, prompt in enumerate(prompts):
        name = f"prompt {i + 1}"
        token_ids = encode_prompt(tokenizer, [{"role": "user", "content": prompt}], engine.max_model_len, name)
        for j in range(options.n):
            # A seed for each answer: they differ among themselves, and the same command gives the same text.
            seed = random.Random(f"{options.seed}/{i}/{j}").getrandbits(31)
            params = replace(sampling, seed=seed, stop_token_ids=stops)
            requests.append(Request(f"{name}, answer {j + 1}", token_ids, params))
    answers = Answers(tokenizer, [request.request_id for request in requests])
    # Where the answers themselves cannot be watched, a bar shows that work goes on.
    watched = sys.stdout.isatty() or not sys.stderr.isatty()
    with torch.inference_mode():
        engine.runner.tune()  # seconds of measuring, once: no part of the rate at which it answers
    started = time.perf_counter()
    with nullcontext() if watched else ProgressBar("generate", len(requests), "answers") as bar:

        def on_finish(completion: Completion) -> None:
            answers.finish(completion)
            if bar is not None:
                bar.advance(1)

        completions = engine.generate(requests, on_finish, answers.grow)
    print(figures(completions, time.perf_counter() - started), file=sys.stderr)
    return 0


class Answers:
    """Prints answers in their order: the first that has not ended as it grows, later ones when it is their turn.

    Args:
        tokenizer: the model's.
        names: the answers' names, which are printed above them if there are several.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, names: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._detokenizers = {name: Detokenizer(tokenizer, skip_special_tokens=True) for name in names}
        self._texts = dict.fromkeys(names, "")
        self._shown = 0  # characters of the first of `_left`
        self._left = deque(names)
        self._ended: set[str] = set()
        self._headed = len(names) > 1
        self._begin()

    def grow(self, name: str, tokens: Sequence[int]) -> None:
        """Take new tokens of an answer."""
        self._texts[name] += "".join(map(self._detokenizers[name].push, tokens))
        self._show()

    def finish(self, completion: Completion) -> None:
        """Take an answer that has ended: its text may have a last character that stayed incomplete."""
        name = completion.request_id
        whole = self._tokenizer.decode(
            completion.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(whole, str)
        self._texts[name] = whole
        self._ended.add(name)
        self._show()

    def _begin(self) -> None:
        if self._headed and self._left:
            print(f"--- {self._left[0]}", flush=True)

    def _show(self) -> None:
        while self._left:
            name = self._left[0]
            text = self._texts[name]
            print(text[self._shown :], end="", flush=True)
            self._shown = len(text)
            if name not in self._ended:
                return
            print(flush=True)
            self._left.popleft()
            self._shown = 0
            self._begin()


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
