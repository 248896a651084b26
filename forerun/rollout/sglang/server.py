"""What a running SGLang server says of itself: the settings that decide what it can be asked."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from forerun.checkpoint.files import read_json_object
from forerun.checkpoint.reader import CONFIG
from forerun.errors import UsageError
from forerun.families import text_section
from forerun.rollout.client import Client, Refused

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer_config.json"
# Names of the launch argument --dtype; "auto" is the checkpoint's.
_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
# Settings come at once from a server that is up, or after the step that it is at.
_FACTS_S = 60.0
_DRAFTING = ("EAGLE", "NEXTN")  # the server reports NEXTN as EAGLE


@dataclass(frozen=True)
class ServerFacts:
    """Settings of a server, under the names of its launch arguments where there is one.

    Attributes:
        version: SGLang's.
        model_path: what it serves, as its own machine names it.
        tp_size: ranks, each of which wants its own copy of a bucket.
        num_steps: depth of drafting, 0 where the server does not draft.
        topk: draft tokens per depth; above 1 drafts form a tree.
        context_length: most tokens of prompt and completion, what the server keeps back for drafts taken off.
        deterministic: seeds are obeyed and rows do not depend on their batch (--enable-deterministic-inference).
        memory_saver: whether it can give memory back (--enable-memory-saver).
        keeps_weights: whether weights survive that (--enable-weights-cpu-backup).
        has_tokenizer: whether it can match stop strings.
        dtype: of the weights; None is the checkpoint's.
    """

    version: str
    model_path: str
    tp_size: int
    num_steps: int
    topk: int
    context_length: int
    deterministic: bool
    memory_saver: bool
    keeps_weights: bool
    has_tokenizer: bool
    dtype: torch.dtype | None

    @property
    def drafts(self) -> bool:
        return self.num_steps > 0


def read_facts(client: Client) -> ServerFacts:
    """Ask a server.

    Raises:
        UsageError: it serves in a way that the engine cannot use.
        ForerunError: it does not answer.
    """
    try:
        info = client.get("/server_info", _FACTS_S)
    except Refused as error:
        if error.status != 404:
            raise
        info = client.get("/get_server_info", _FACTS_S)  # its older name
    if not isinstance(info, Mapping):
        raise UsageError(f"{client.base_url} is no SGLang server: /server_info gave no settings")
    models = client.get("/v1/models", _FACTS_S)
    with client.reading("/server_info and /v1/models"):
        return _facts(info, models)


def _facts(info: Mapping[str, Any], models: Any) -> ServerFacts:
    algorithm = info.get("speculative_algorithm")
    if algorithm is not None and algorithm not in _DRAFTING:
        raise UsageError(
            f"the SGLang server drafts with {algorithm}: launch it with --speculative-algorithm EAGLE, "
            "under which it drafts with the model's own MTP block"
        )
    if info.get("dp_size", 1) != 1:
        raise UsageError(f"the SGLang server has dp_size={info['dp_size']}, to which SGLang sends no weights: use 1")
    num_steps = int(info.get("speculative_num_steps") or 0) if algorithm else 0
    topk = int(info.get("speculative_eagle_topk") or 1)
    num_draft_tokens = int(info.get("speculative_num_draft_tokens") or 0) if algorithm else 0
    reserved = max(topk * num_steps, num_draft_tokens) if algorithm else 0
    return ServerFacts(
        version=str(info.get("version", "unknown")),
        model_path=str(info.get("model_path", "")),
        tp_size=int(info.get("tp_size", 1)),
        num_steps=num_steps,
        topk=topk,
        context_length=int(models["data"][0]["max_model_len"]) - reserved,
        deterministic=bool(info.get("enable_deterministic_inference", False)),
        memory_saver=bool(info.get("enable_memory_saver", False)),
        keeps_weights=bool(info.get("enable_weights_cpu_backup", False)),
        has_tokenizer=not info.get("skip_tokenizer_init", False),
        dtype=_DTYPES.get(str(info.get("dtype"))),
    )


def end_tokens(model_dir: Path) -> frozenset[int]:
    """The tokens that end a text for SGLang as soon as any stop token is named: the eos_token_id of config.json (or its
    model type's default), of generation_config.json and of the tokenizer, where there is one.
    """
    config = read_json_object(model_dir, CONFIG)
    sections: list[Mapping[str, Any]] = [config, text_section(config)]
    if not any("eos_token_id" in section for section in sections):
        with suppress(ValueError):  # a type that transformers does not know
            sections.append(AutoConfig.for_model(config.get("model_type", "")).to_dict())
    if (model_dir / GENERATION).exists():
        sections.append(read_json_object(model_dir, GENERATION))
    if (model_dir / TOKENIZER).exists():
        sections.append(
            {"eos_token_id": AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False).eos_token_id}
        )
    found: set[int] = set()
    for section in sections:
        value = section.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
