"""What an engine keeps while it sleeps, and what a weight update allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forerun.engines.torch_engine import TorchEngine
from forerun.models.carrier import named_weights
from forerun.rollout.native.engine import NativeEngine
from tests.rollout import tiny


@pytest.mark.parametrize("vocabulary", [None, torch.arange(0, 61, 2)], ids=["full", "reduced"])
def test_sleep_alone_keeps_the_drafter(vocabulary: Tensor | None) -> None:
    """No update comes between sleep and wake, so whatever sleep dropped would stay dropped: drafts made, none kept."""
    engine = NativeEngine(
        tiny.perfect_carrier(), products="linear", num_speculative_tokens=2, draft_vocabulary=vocabulary
    )
    asked = tiny.requests(tiny.prompts(4), max_tokens=12, temperature=0)
    digest, before = engine.drafter_digest(), engine.generate(asked)
    assert sum(c.spec_num_accepted_tokens or 0 for c in before) > 0
    for _ in range(2):
        engine.sleep()
        engine.wake()
    assert engine.drafter_digest() == digest
    after = engine.generate(asked)
    assert [(c.token_ids, c.accepted_per_depth) for c in after] == [(c.token_ids, c.accepted_per_depth) for c in before]


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operations bring into being; views and in-place results are none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                continue
            if tensor.untyped_storage().data_ptr() not in given:
                self.bytes += tensor.untyped_storage().nbytes()
        return result


def test_a_weight_update_allocates_no_second_set_of_weights() -> None:
    """From the trainer's stream to the engine's copy: at most the draft head's rows are gathered once."""
    model = tiny.carrier()
    trainer = TorchEngine(model)
    vocabulary = torch.arange(0, 61, 2)
    engine = NativeEngine(model, products="linear", num_speculative_tokens=2, draft_vocabulary=vocabulary)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    with Allocations() as seen:
        engine.update_weights(trainer.named_weights(), version=1)
    head_rows = len(vocabulary) * model.config.hidden_size * 8
    assert seen.bytes <= head_rows + 1024
    assert all(torch.equal(engine.runner.weights[name], weight) for name, weight in named_weights(model))


def test_the_trainer_streams_its_live_tensors() -> None:
    trainer = TorchEngine(tiny.carrier())
    live = {parameter.data_ptr() for parameter in trainer.model.parameters()}
    assert {tensor.data_ptr() for _, tensor in trainer.named_weights()} == live
