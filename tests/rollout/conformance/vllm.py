"""The vLLM engine on a CPU: a head attached to a tied Llama is exported for it, and updates have the attached names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import forerun
from forerun.models.carrier import MTPCarrier
from forerun.models.serving import export
from forerun.rollout.vllm import LaunchSettings, VLLMEngine
from tests.oracles.conftest import find_oracle
from tests.oracles.served_models import VOCAB, randomise_norms
from tests.rollout.conformance.subjects import Subject

LACKS = {
    "logit_bias": "vLLM takes none while it drafts",
    "min_p": "vLLM takes none while it drafts",
}
# One thread, nothing compiled: it starts in seconds.
QUICK = {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}


@torch.no_grad()
def attached() -> MTPCarrier:
    """Tied, without biases, and right about a good part of what it drafts."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    trunk = LlamaForCausalLM(config).eval()
    trunk.model.embed_tokens.weight.mul_(4)
    generator = torch.Generator().manual_seed(1)
    randomise_norms(trunk, generator)
    rows = [torch.randint(1, VOCAB, (16, 48), generator=generator) for _ in range(4)]
    return forerun.attach(trunk, forerun.MTPConfig(enable=True), fit_to=rows)


def words() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i:03d}": i for i in range(VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w000")))


def exported(model: MTPCarrier, folder: Path) -> Path:
    model.save_pretrained(folder / "attached")
    words().save_pretrained(folder / "attached")
    export(folder / "attached", folder / "mimo")
    return folder / "mimo"


@contextmanager
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    python = find_oracle("vllm", lambda line: print(line, file=sys.stderr))
    model = attached()
    settings = LaunchSettings(
        python,
        num_speculative_tokens=2,
        max_model_len=128,
        max_num_seqs=16,
        kv_cache_bytes=64 << 20,
        enforce_eager=True,
        environment=QUICK,
    )
    with VLLMEngine.launch(exported(model, tmp_path_factory.mktemp("vllm")), settings) as engine:
        yield Subject(engine, model.eval(), engine.max_model_len, words(), lacks=LACKS)  # type: ignore[arg-type]
