"""The vLLM arm of benchmarks/rollout.py: one engine in vLLM's own environment, which generates when it is told to.

Settings come as JSON in the first argument: model, dtype, k (tokens to draft with method mtp, 0 for none), threads,
max_num_seqs, max_model_len, eager. Every line on the standard input is {"prompts": token ids per prompt, "max_tokens"};
the answer to it is a line {"seconds", "texts", "drafts", "accepted"}: token ids per prompt; verified drafts, and tokens
accepted of them. The first line of all says {"threads", "version"}. Between two orders the process waits in a read.
benchmarks/rollout.py sets the environment variables that vLLM reads when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

import torch
import vllm
from vllm import LLM, SamplingParams

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


def main() -> None:
    answers = own_output()
    speculation: dict[str, Any] = {}
    if SETTINGS["k"]:
        speculation = {"speculative_config": {"method": "mtp", "num_speculative_tokens": SETTINGS["k"]}}
    llm = LLM(
        SETTINGS["model"],
        dtype=SETTINGS["dtype"],
        trust_remote_code=True,
        skip_tokenizer_init=True,
        enforce_eager=SETTINGS["eager"],
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_model_len=SETTINGS["max_model_len"],
        max_num_seqs=SETTINGS["max_num_seqs"],
        **speculation,
    )
    say(answers, {"threads": torch.get_num_threads(), "version": vllm.__version__})
    for line in sys.stdin:
        order = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=order["max_tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
        before = counted(llm)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        drafts, accepted = (now - then for now, then in zip(counted(llm), before, strict=True))
        texts = [list(answer.outputs[0].token_ids) for answer in outputs]
        say(answers, {"seconds": seconds, "texts": texts, "drafts": drafts, "accepted": accepted})


def own_output() -> TextIO:
    """The standard output for answers alone: what anything else prints goes where errors go."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def counted(llm: LLM) -> list[int]:
    values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS}
    return [values.get(name, 0) for name in COUNTERS]


def say(answers: TextIO, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=answers, flush=True)


if __name__ == "__main__":
    main()
