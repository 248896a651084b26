"""Text that the trunk itself wrote for real prompts: what a drafting head has to imitate.

For SmolLM2-135M-Instruct such text ships with the package (`smollm2_text.jsonl.gz`), because writing it takes longer
than training on it. It was made, and can be made again, by

    python -m forerun.demo.self_text MODEL_DIR OUT.jsonl.gz bfloat16

For any other model the demo writes its own, fewer tokens, into its output directory.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from forerun.data.chat import encode_prompt, response_document, stop_token_ids
from forerun.data.packing import Document
from forerun.data.sources import SOURCES, Split, load_source
from forerun.errors import ForerunError
from forerun.models.loading import load
from forerun.report.atomic import write_bytes
from forerun.report.progress import ProgressBar
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Completion, Request, SamplingParams

PACKAGED = "smollm2_text.jsonl.gz"
SPLITS: tuple[Split, ...] = ("train", "held_out")
# Half of the responses greedy, half sampled: rollouts meet both. Sources that are finite are asked more than once.
PROMPTS_PER_SOURCE = {"gsm8k": 84, "gsm_symbolic": 500, "arithmetic": 150, "champ": 254, "chat": 158}
SAMPLES_PER_PROMPT = {"gsm8k": 3, "gsm_symbolic": 1, "arithmetic": 1, "champ": 2, "chat": 3}
NUM_HELD_OUT = 16
MAX_PROMPT_TOKENS = 256
MAX_NEW_TOKENS = 192


@dataclass(frozen=True)
class Response:
    """One prompt with what the trunk answered."""

    source: str
    split: Split
    prompt_ids: list[int]
    response_ids: list[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def document(self, prompt_too: bool) -> Document:
        """The response's tokens are targets; with `prompt_too` the prompt's as well: the trunk foresees those too."""
        document = response_document(self.prompt_ids, self.response_ids)
        return Document(document.token_ids, [True] * len(self)) if prompt_too else document


def packaged() -> list[Response]:
    """The responses that ship with the package, in an order that mixes the sources evenly."""
    return _read(resources.files("forerun.demo").joinpath(PACKAGED).read_bytes(), PACKAGED)


def read(path: Path) -> list[Response]:
    """Responses that `write` put into a file."""
    return _read(path.read_bytes(), str(path))


def _read(data: bytes, name: str) -> list[Response]:
    try:
        return [Response(**json.loads(line)) for line in gzip.decompress(data).decode().splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise ForerunError(f"{name} holds no responses ({error}): delete it, and it is written again") from None


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    seed: int,
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Response]:
    """Let the model answer every source's prompts and write the responses to `path`, whole.

    Args:
        max_tokens: stop asking once that many tokens are expected; None asks everything.
        dtype: of the engine; bfloat16 is twice as fast on CPUs that compute in it, and slower on others.
    """
    rng = random.Random(seed)
    jobs = [
        (source, split, prompt.messages)
        for source in SOURCES
        for split in SPLITS
        for prompt in load_source(source, split, PROMPTS_PER_SOURCE[source], NUM_HELD_OUT, seed)
        for _ in range(SAMPLES_PER_PROMPT[source] if split == "train" else 1)
    ]
    rng.shuffle(jobs)
    stops = stop_token_ids(tokenizer, model.generation_config)
    requests: list[Request] = []
    origin: dict[str, tuple[str, Split]] = {}
    expected = 0
    for index, (source, split, messages) in enumerate(jobs):
        ids = encode_prompt(tokenizer, messages, None, f"prompt {index}")
        if len(ids) > MAX_PROMPT_TOKENS or (max_tokens is not None and expected >= max_tokens):
            continue
        expected += len(ids) + MAX_NEW_TOKENS
        sampling = SamplingParams(
            max_tokens=MAX_NEW_TOKENS,
            temperature=float(index % 2),
            seed=rng.getrandbits(31),
            stop_token_ids=stops,
        )
        name = f"response {index}"
        origin[name] = (source, split)
        requests.append(Request(name, ids, sampling))
    # One spelling of the products: the same seed then gives the same text, and large batches gain nothing from others.
    engine = NativeEngine(
        model, num_speculative_tokens=0, max_num_seqs=128, max_model_len=512, dtype=dtype, products="linear"
    )
    with ProgressBar("text", len(requests), "responses") as progress:

        def on_finish(_: Completion) -> None:
            progress.advance(1)

        completions = engine.generate(requests, on_finish)
    responses = []
    for completion in completions:
        source, split = origin[completion.request_id]
        responses.append(Response(source, split, completion.prompt_token_ids, completion.token_ids))
    lines = "".join(json.dumps(vars(r), separators=(",", ":")) + "\n" for r in responses)
    write_bytes(path, gzip.compress(lines.encode(), mtime=0))
    return responses


def take(responses: Iterable[Response], split: Split, max_tokens: int) -> list[Response]:
    """The first responses of a split, up to `max_tokens` tokens."""
    chosen, tokens = [], 0
    for response in responses:
        if response.split == split and response.response_ids:
            tokens += len(response)
            if tokens > max_tokens:
                break
            chosen.append(response)
    return chosen


def by_source(responses: Sequence[Response]) -> dict[str, list[Document]]:
    """Documents, responses as targets, under the name of their source."""
    found: dict[str, list[Document]] = {}
    for response in responses:
        found.setdefault(response.source, []).append(response.document(prompt_too=False))
    return dict(sorted(found.items()))


def draft_vocabulary(responses: Sequence[Response], vocab_size: int) -> torch.Tensor:
    """long [min(8192, vocab_size)], sorted: the tokens these responses use most, filled up with the lowest ids.

    In byte-pair vocabularies low ids are early merges, so the filling is of frequent tokens too.
    """
    size = 8192
    counts = Counter(token for response in responses for token in response.response_ids)
    frequent = [token for token, _ in counts.most_common(size)]
    rest = (token for token in range(vocab_size) if token not in counts)
    chosen = frequent + [token for _, token in zip(range(size - len(frequent)), rest, strict=False)]
    return torch.tensor(sorted(chosen))


def coverage(responses: Sequence[Response], vocabulary: torch.Tensor) -> float:
    """Share of the responses' tokens that the vocabulary holds."""
    tokens = torch.tensor([token for response in responses for token in response.response_ids])
    return torch.isin(tokens, vocabulary).double().mean().item()


def _main(arguments: Sequence[str]) -> Iterator[str]:
    if len(arguments) != 3:
        yield "usage: python -m forerun.demo.self_text MODEL_DIR OUT.jsonl.gz float32|bfloat16"
        return
    model_dir, path, dtype = arguments
    responses = write(
        load(model_dir),
        AutoTokenizer.from_pretrained(model_dir),
        Path(path),
        seed=0,
        dtype=getattr(torch, dtype),
    )
    for split in SPLITS:
        chosen = [response for response in responses if response.split == split]
        yield f"{split}: {len(chosen)} responses, {sum(map(len, chosen))} tokens"


if __name__ == "__main__":
    for line in _main(sys.argv[1:]):
        print(line)
