"""Phase 3: the same prompts decoded plainly and speculatively; text must not differ, time should."""

from __future__ import annotations

import time
from typing import Any

from forerun.data.chat import encode_prompt, stop_token_ids
from forerun.data.sources import load_source
from forerun.demo.workspace import Workspace
from forerun.report.progress import ProgressBar
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Request, SamplingParams
from forerun.trainers.experience import speculation_figures

BATCH_SIZES = (1, 8)
# Half of the prompts are mathematics, half are chat: heads do better on the former.
SOURCES = ("gsm_symbolic", "gsm8k", "champ", "chat")
CONTEXT = 512


def compare_decoding(workspace: Workspace) -> dict[str, Any]:
    """Figures of every batch size and number of drafts: tokens/s, acceptance, speed-up measured and ideal."""
    model = workspace.drafting_model()
    engine = NativeEngine(
        model, draft_vocabulary=workspace.draft_vocabulary, max_model_len=CONTEXT, num_speculative_tokens=0
    )
    requests = greedy_requests(workspace, model.generation_config)
    depths = (0, *workspace.sizes.draft_depths)
    figures: dict[str, Any] = {"prompts": len(requests), "draft_vocabulary": len(workspace.draft_vocabulary)}
    lengths = [r.sampling.max_tokens for r in requests]  # until they are known: the text is the same every time
    for batch_size in BATCH_SIZES:
        plain: list[list[int]] = []
        plain_rate = 0.0
        for depth in depths:
            # The first batch of a shape also measures how to compute it: not the decoding that is compared.
            engine.num_speculative_tokens = depth
            engine.max_num_seqs = batch_size
            engine.generate(
                [
                    Request(f"warm-up {i}", r.prompt_token_ids, SamplingParams(max_tokens=4, temperature=0))
                    for i, r in enumerate(requests[:batch_size])
                ]
            )
        with ProgressBar(f"rollout, batch {batch_size}", len(depths) * sum(lengths), "tokens") as progress:
            for depth in depths:
                engine.num_speculative_tokens = depth
                started = time.perf_counter()
                completions = engine.generate(requests, on_tokens=lambda _, tokens: progress.advance(len(tokens)))
                rate = sum(len(c.token_ids) for c in completions) / (time.perf_counter() - started)
                texts = [c.token_ids for c in completions]
                lengths = [len(text) for text in texts]
                progress.expect(len(depths) * sum(lengths))
                if depth == 0:
                    plain, plain_rate = texts, rate
                    figures[f"batch_{batch_size}"] = {"plain_tokens_per_second": rate}
                    continue
                length = speculation_figures(completions)["acceptance_length"]
                figures[f"batch_{batch_size}"][f"drafts_{depth}"] = {
                    "identical_greedy_text": texts == plain,
                    "acceptance_length": length,
                    "tokens_per_second": rate,
                    "speed_up": rate / plain_rate,
                    "ideal_speed_up": length,
                }
    return figures


def greedy_requests(workspace: Workspace, generation_config: Any) -> list[Request]:
    """Held-out prompts, taken from the sources in turn."""
    count = workspace.sizes.rollout_prompts
    pools = [load_source(source, "held_out", count, seed=workspace.options.seed) for source in SOURCES]
    prompts = [pool[index] for index in range(count) for pool in pools][:count]
    sampling = SamplingParams(
        max_tokens=workspace.sizes.rollout_tokens,
        temperature=0.0,
        stop_token_ids=stop_token_ids(workspace.tokenizer, generation_config),
    )
    limit = CONTEXT - workspace.sizes.rollout_tokens
    return [
        Request(f"prompt {i}", encode_prompt(workspace.tokenizer, prompt.messages, limit, f"prompt {i}"), sampling)
        for i, prompt in enumerate(prompts)
    ]
