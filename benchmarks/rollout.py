"""Decode speed of the rollout engines side by side, as JSON lines.

    python benchmarks/rollout.py MODEL_DIR [--batches 1,8,32] [--depths 1,2] [--new-tokens 64] [--dtype float32]

MODEL_DIR holds a model with a trained MTP block of the attached kind (`forerun demo` makes one). Arms: transformers'
`generate`; the native engine plain and with k drafts; vLLM on the CPU, plain and with k drafts of its method mtp.
vLLM runs in its own environment (--vllm-python; by default the one that the tests build) on the same weights, as
`forerun convert --to mimo --fold-norm` writes them, in the same dtype and with as many threads.

All arms write the same number of tokens for the same prompts, greedily, past any end-of-text token. They take turns,
never two at a time, and the best of --repeats counts; a first round that does not count lets every engine compile and
measure what it wants to. A first line says what ran; then there is a line per arm:

- `over_plain`: speed over that of the same engine without drafts; `acceptance_length`: tokens per step, which is the
  speed-up that drafting would bring if a step over k + 1 tokens cost what one over 1 costs; `of_ideal`: their ratio.
- `same_texts`: how many texts are those of transformers. Rounding differs, so near-ties fall either way.

A last line per batch size compares the best arms of the engines, and the plain ones.
Exits with 1 if drafting changed a text of the native engine in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from transformers import AutoTokenizer

from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier
from forerun.models.loading import load
from forerun.models.serving import export
from forerun.planner.prompts import PROMPTS
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Request, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests know how to build vLLM's environment

MAX_LENGTH = 1024


class Written(NamedTuple):
    """What an arm wrote for a batch: token ids, seconds, verified steps with drafts, drafts accepted."""

    texts: list[list[int]]
    seconds: float
    steps: int = 0
    accepted: int = 0


Prompts = list[list[int]]
Arm = Callable[[Prompts, int], Written]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--depths", default="1,2")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--draft-words", type=int, default=8192, help="native drafts on the first N token ids; 0 is all"
    )
    parser.add_argument("--vllm-python", help="interpreter of vLLM's environment")
    parser.add_argument("--vllm-eager", action="store_true", help="do not let vLLM compile")
    parser.add_argument("--no-vllm", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batches, depths = ([int(n) for n in text.split(",")] for text in (args.batches, args.depths))

    model = load(args.model, dtype=getattr(torch, args.dtype)).eval()
    if not isinstance(model, MTPCarrier):
        raise UsageError(f"{args.model} has no MTP block: train one first, for instance with `forerun demo`")
    prompts = make_prompts(args.model, max(batches))
    about: dict[str, Any] = {"dtype": args.dtype, "threads": args.threads, "new_tokens": args.new_tokens}
    about |= {"torch": torch.__version__, "transformers": transformers.__version__}
    arms: dict[str, Arm] = {"transformers": transformers_arm(model)}
    with ExitStack() as stack:
        vocabulary = torch.arange(args.draft_words) if args.draft_words else None
        engine = NativeEngine(model, draft_vocabulary=vocabulary, max_num_seqs=max(batches))
        start = time.perf_counter()
        engine.runner.tune()
        about["native_tuning_s"] = round(time.perf_counter() - start, 2)
        arms |= {name_of("native", k): native_arm(engine, k) for k in (0, *depths)}
        if not args.no_vllm:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            export(args.model, folder / "mimo", "mimo", fold_norm=True)
            interpreter = args.vllm_python or str(tests_environment())
            for k in (0, *depths):
                settings = {"model": str(folder / "mimo"), "dtype": args.dtype, "k": k, "threads": args.threads}
                settings |= {"max_num_seqs": max(batches), "max_model_len": MAX_LENGTH, "eager": args.vllm_eager}
                child = stack.enter_context(VllmChild(interpreter, settings, folder / f"{k}.log"))
                arms[name_of("vllm", k)] = child
                about["vllm"] = child.about
        print(json.dumps(about), flush=True)
        lossless = [compare(arms, prompts[:batch], args.new_tokens, args.repeats) for batch in batches]
    return 0 if all(lossless) or args.dtype != "float32" else 1


def name_of(engine: str, k: int) -> str:
    return f"{engine} k={k}" if k else engine


def make_prompts(model: str, count: int) -> Prompts:
    """Different ones, so that no engine can share a prefix that another does not share."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for i in range(count):
        message = {"role": "user", "content": f"{i + 1}. {PROMPTS[i % len(PROMPTS)]}"}
        chat: Any = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)
        prompts.append(list(chat["input_ids"]))
    return prompts


def tests_environment() -> Path:
    from tests.oracles.environments import environment

    return environment("vllm", say=lambda line: print(line, file=sys.stderr))


def transformers_arm(model: MTPCarrier) -> Arm:
    generation: Any = model.generation_config
    generation.eos_token_id = None  # write on past the end
    generation.pad_token_id = pad = 0

    def write(prompts: Prompts, new: int) -> Written:
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
        start = time.perf_counter()
        out = cast(Any, model).generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
        return Written(out[:, width:].tolist(), time.perf_counter() - start)

    return write


def native_arm(engine: NativeEngine, k: int) -> Arm:
    def write(prompts: Prompts, new: int) -> Written:
        engine.num_speculative_tokens = k
        sampling = SamplingParams(max_tokens=new, temperature=0)
        requests = [Request(str(i), row, sampling) for i, row in enumerate(prompts)]
        start = time.perf_counter()
        done = engine.generate(requests)
        seconds = time.perf_counter() - start
        steps, accepted = (
            sum(getattr(c, name) or 0 for c in done) for name in ("spec_num_verify_steps", "spec_num_accepted_tokens")
        )
        return Written([c.token_ids for c in done], seconds, steps, accepted)

    return write


class VllmChild:
    """benchmarks/rollout_vllm.py in vLLM's environment, which sleeps while it is not asked."""

    def __init__(self, interpreter: str, settings: dict[str, Any], log: Path) -> None:
        self._log = log
        script = Path(__file__).with_name("rollout_vllm.py")
        # One process, whose threads are bound to the first processors.
        environment = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(settings["threads"]),
            "TORCH_COMPILE_DISABLE": str(int(settings["eager"])),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings['threads'] - 1}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [interpreter, str(script), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | environment,
                text=True,
            )
        self.about = self._answer()

    def __call__(self, prompts: Prompts, new: int) -> Written:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": new}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Written(answer["texts"], answer["seconds"], answer["drafts"], answer["accepted"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended: {self._log.read_text()[-2000:]}")
        return json.loads(line)

    def __enter__(self) -> VllmChild:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def compare(arms: dict[str, Arm], prompts: Prompts, new: int, repeats: int) -> bool:
    """One batch size. Returns whether drafting left the native engine's texts as they were."""
    best: dict[str, Written] = {name: arm(prompts, new) for name, arm in arms.items()}  # does not count
    best = {name: written._replace(seconds=float("inf")) for name, written in best.items()}
    for _ in range(repeats):
        for name, arm in arms.items():
            best[name] = min(best[name], arm(prompts, new), key=lambda written: written.seconds)
    tokens = len(prompts) * new
    for name, written in best.items():
        assert all(len(text) == new for text in written.texts), f"{name} did not write {new} tokens per prompt"
        same = sum(a == b for a, b in zip(written.texts, best["transformers"].texts, strict=True))
        line: dict[str, Any] = {"arm": name, "batch": len(prompts), "tokens_per_s": round(tokens / written.seconds, 1)}
        line |= {"seconds": round(written.seconds, 3), "same_texts": f"{same}/{len(prompts)}"}
        line["over_transformers"] = ratio(best, name, "transformers")
        if written.steps:
            length = 1 + written.accepted / written.steps
            over_plain = ratio(best, name, name.split()[0])
            line |= {"over_plain": over_plain, "acceptance_length": round(length, 3)}
            line["of_ideal"] = round(over_plain / length, 3)
        print(json.dumps(line), flush=True)
    native, vllm = (fastest(best, engine) for engine in ("native", "vllm"))
    summary: dict[str, Any] = {"batch": len(prompts), "native": native}
    summary["native_over_transformers"] = ratio(best, native, "transformers")
    if vllm:
        summary |= {"plain_over_vllm_plain": ratio(best, "native", "vllm")}
        summary |= {"vllm": vllm, "native_over_vllm": ratio(best, native, vllm)}
    print(json.dumps(summary), flush=True)
    return all(w.texts == best["native"].texts for name, w in best.items() if name.startswith("native"))


def ratio(best: dict[str, Written], name: str, base: str) -> float:
    """Speed over that of another arm."""
    return round(best[base].seconds / best[name].seconds, 3)


def fastest(best: dict[str, Written], engine: str) -> str:
    """The fastest arm of an engine, "" if it did not run."""
    names = [name for name in best if name.split()[0] == engine]
    return min(names, key=lambda name: best[name].seconds, default="")


if __name__ == "__main__":
    sys.exit(main())
