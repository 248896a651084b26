"""Tiny random carriers and requests for the rollout tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier
from forerun.mtp.config import MTPConfig
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Request, SamplingParams
from tests.families.tiny import VOCAB, tiny_trunk

KINDS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def trunk(kind: str = "llama", *, tied: bool = True, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 96}
    model = tiny_trunk(KINDS[kind], dtype=dtype, **sizes, head_dim=8, tie_word_embeddings=tied)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers starts them at zero, where a lost bias would not be seen
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def carrier(
    kind: str = "llama", *, tied: bool = True, dtype: torch.dtype = torch.float64, layers: int = 1, repeat: bool = False
) -> MTPCarrier:
    """A head fitted to the trunk, so that some of its drafts are accepted, whose decoder layers do something."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(0, VOCAB, (8, 64), generator=generator)
    mtp = MTPConfig(True, num_layers=layers, repeat_layer=repeat)
    model = attach(trunk(kind, tied=tied, dtype=dtype), mtp, fit_to=[text])
    with torch.no_grad():
        for name, parameter in model.mtp.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def family_carrier(name: str, *, layers: int = 1, repeat: bool = False) -> MTPCarrier:
    """As `carrier`, of a family of `tests.families.tiny`, in float64."""
    model: Any = tiny_trunk(name, dtype=torch.float64)
    if "Experts" in "".join(type(module).__name__ for module in model.modules()):
        model.set_experts_implementation("eager")  # the default has no float64
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(0, VOCAB, (8, 64), generator=generator)
    return attach(model, MTPConfig(True, num_layers=layers, repeat_layer=repeat), fit_to=[text]).eval()


def perfect_carrier() -> MTPCarrier:
    """Acceptance is 1 at every depth, by construction.

    All decoder layers are identities, so the trunk's hidden is norm(E[t_i]). The block's projection passes the
    embedding half alone: its output for (h_i, E[t_{i+1}]) is norm(norm(E[t_{i+1}])), the trunk's hidden at i + 1.
    """
    model = attach(trunk(tied=False), MTPConfig(True), init="plain").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        size = model.config.hidden_size
        projection = model.mtp.layers[0].proj.weight
        projection.copy_(torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1))
    return model


def engine_of(model: PreTrainedModel, **settings: object) -> NativeEngine:
    return NativeEngine(model, **{"products": "linear", **settings})  # type: ignore[arg-type]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Of different lengths, with repeats."""
    generator = torch.Generator().manual_seed(seed)
    made: list[list[int]] = []
    for i in range(count):
        if i % 3 == 2:
            made.append(made[i - 2])
            continue
        length = int(torch.randint(1, 14, (1,), generator=generator))
        made.append(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
    return made


def requests(rows: list[list[int]], **sampling: object) -> list[Request]:
    """One request per prompt; `seed` counts up from the one given."""
    seed = sampling.pop("seed", None)
    return [
        Request(f"r{i}", row, SamplingParams(**sampling, seed=None if seed is None else seed + i))  # type: ignore[arg-type, operator]
        for i, row in enumerate(rows)
    ]


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> Tensor:
    """The model's own logits for each token of the completion, [len(completion), V]."""
    logits = model(torch.tensor([prompt + completion])).logits[0]
    return logits[len(prompt) - 1 : -1]


@torch.no_grad()
def generated(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What transformers' greedy generate writes."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
