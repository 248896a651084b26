"""The native engine, once for each rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from forerun.mtp.config import AcceptanceRule
from forerun.rollout.native.engine import NativeEngine
from tests.rollout import tiny
from tests.rollout.conformance.subjects import Subject


@contextmanager
def launch(_: pytest.TempPathFactory, acceptance: AcceptanceRule) -> Iterator[Subject]:
    model = tiny.carrier()
    words = {f"w{i:02d}": i for i in range(tiny.VOCAB)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w00")))
    engine = NativeEngine(
        model,
        tokenizer=tokenizer,
        products="linear",
        num_speculative_tokens=2,
        acceptance=acceptance,
        max_num_seqs=24,
    )
    try:
        yield Subject(engine, model, engine.max_model_len, tokenizer)
    finally:
        engine.close()


rejection = partial(launch, acceptance="rejection")
match = partial(launch, acceptance="match")
