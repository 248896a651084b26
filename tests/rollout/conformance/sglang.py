"""The SGLang engine in front of the protocol server, which computes with the native engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from forerun.rollout.sglang.engine import SGLangEngine
from tests.rollout import tiny
from tests.rollout.conformance.subjects import Subject
from tests.rollout.sglang_server import SGLangServer, serving

LACKS = {
    "repetition_penalty": "SGLang's leaves the prompt out",
    "min_tokens": "SGLang holds stop tokens back for whole steps while it drafts",
    "min_p": "SGLang passes over it while it drafts",
}


@contextmanager
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    model = tiny.carrier()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    path = tmp_path_factory.mktemp("sglang") / "model"
    model.save_pretrained(path)
    words = {f"w{i:02d}": i for i in range(tiny.VOCAB)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w00")))
    # The server loads updates into its own copy: what the tests compute with is not touched.
    with serving(SGLangServer(tiny.carrier(), path, tokenizer=tokenizer)) as url:
        engine = SGLangEngine(url, max_connections=32)
        try:
            yield Subject(engine, model, engine.facts.context_length, tokenizer, lacks=LACKS)  # type: ignore[arg-type]
        finally:
            engine.close()
