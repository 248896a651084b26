"""Tiny random models of real transformers classes, and batches for them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.families.tiny import VOCAB, tiny_trunk

KINDS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def tiny_model(
    kind: str = "llama", *, tied: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
) -> PreTrainedModel:
    sizes = {"intermediate_size": 32, "num_attention_heads": 4}
    return tiny_trunk(KINDS[kind], dtype=dtype, seed=seed, **sizes, tie_word_embeddings=tied).train()


def token_rows(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
