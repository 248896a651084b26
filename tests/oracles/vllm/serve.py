"""Runs in vLLM's environment: greedy text of several checkpoints, one engine after the other in this one process.

FOLDER/settings.json is a list of {"name", "model", "dtype", "k", "max_tokens", "prompts"}: directory, precision, tokens
to draft with method mtp (0: no speculation), tokens to write per prompt, prompts as token ids. FOLDER/answer.json is
then {name: {"texts", "accepted", "drafted", "counters"}}: token ids per prompt; per prompt, for every verified draft in
order, how many tokens were accepted and how many drafted; vLLM's own counters, summed over the prompts.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

# Read when vLLM is imported. One thread, one process, nothing compiled: engines start in seconds.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import LLM, ModelRegistry, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

COUNTERS = "vllm:spec_decode_num_"
# Architecture -> (module, class) of those whose modules import torchvision, for the images of a multimodal sibling.
# torchvision has no build without CUDA on the package index, and text needs none of it.
IMAGE_READERS = {"Qwen3_5ForCausalLM": (("qwen3_5", "Qwen3_5ForCausalLM"), ("qwen3_5_mtp", "Qwen3_5MTP"))}
ABSENT = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


def register(model: str) -> None:
    """Make vLLM know the classes of a checkpoint whose modules it could not import by itself."""
    (architecture,) = json.loads((Path(model) / "config.json").read_text())["architectures"]
    if not (classes := IMAGE_READERS.get(architecture, ())):
        return
    for name in ABSENT:  # empty modules: whatever of them was used would fail
        sys.modules[name] = ModuleType(name)
    sys.modules[ABSENT[-2]].__dict__["functional"] = sys.modules[ABSENT[-1]]
    for module, name in classes:
        ModelRegistry.register_model(name, getattr(import_module(f"vllm.model_executor.models.{module}"), name))
    for name in ABSENT:
        del sys.modules[name]


def serve(run: dict[str, Any]) -> dict[str, Any]:
    """One engine's answer."""
    register(run["model"])
    speculation: dict[str, Any] = {}
    if run["k"]:
        speculation = {
            "speculative_config": {"method": "mtp", "num_speculative_tokens": run["k"]},
            "per_request_spec_decode_metrics": "detailed",
        }
    llm = LLM(
        run["model"],
        dtype=run["dtype"],
        trust_remote_code=True,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_model_len=256,
        max_num_seqs=16,
        **speculation,
    )
    params = SamplingParams(temperature=0.0, max_tokens=run["max_tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in run["prompts"]]
    outputs = [answer.outputs[0] for answer in llm.generate(prompts, params, use_tqdm=False)]
    metrics = [output.spec_decode_metrics for output in outputs]
    return {
        "texts": [list(output.token_ids) for output in outputs],
        "accepted": [list(metric.per_step_accepted) if metric else [] for metric in metrics],
        "drafted": [list(metric.per_step_drafted) if metric else [] for metric in metrics],
        "counters": {
            metric.name.removeprefix(COUNTERS): metric.values if hasattr(metric, "values") else metric.value
            for metric in llm.get_metrics()
            if metric.name.startswith(COUNTERS)
        },
    }


def main(folder: Path) -> None:
    answers = {}
    for run in json.loads((folder / "settings.json").read_text()):
        answers[run["name"]] = serve(run)
        gc.collect()  # the engine is gone only then, and the next one wants its process groups
        cleanup_dist_env_and_memory()
    (folder / "answer.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
