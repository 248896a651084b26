"""Tiny random models of real transformers classes, and batches for them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

VOCAB = 61


def tiny_model(
    kind: str = "llama", *, tied: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
) -> PreTrainedModel:
    torch.manual_seed(seed)
    config_class, model_class = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[
        kind
    ]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return model_class(config).to(dtype)


def token_rows(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
