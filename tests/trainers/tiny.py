"""A tiny random Llama and a word tokenizer to go with it."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.families.tiny import tiny_trunk

WORDS = ["<eos>", "<pad>", *"abcdefgh", "say", "twice"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>")


def make_model(seed: int = 0, **changes: Any) -> PreTrainedModel:
    ids = {"vocab_size": len(WORDS), "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    sizes = {"intermediate_size": 32, "num_key_value_heads": 1, "initializer_range": 0.02, "tie_word_embeddings": True}
    return tiny_trunk("attached", seed=seed, **ids | sizes | changes).train()
