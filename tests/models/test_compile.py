"""A compiled trunk under MTP trains as an uncompiled one, by the carrier's hooks and with the loss grafted by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

from forerun import MTPConfig, attach
from forerun.models.carrier import MTPCarrier
from forerun.models.training import mtp_forward
from forerun.models.trunk import base_model, project
from forerun.mtp import graft
from tests.models.tiny import gradients, tiny_model, token_rows

COMPILER = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler: g++, clang++ or c++")


def carrier(detach_encoder: bool) -> MTPCarrier:
    mtp = MTPConfig(enable=True, enable_train=True, detach_encoder=detach_encoder, num_layers=2)
    return attach(tiny_model(dtype=torch.float32), mtp, init="plain").train()


def by_the_hooks(model: MTPCarrier, ids: Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()


def grafted_by_hand(model: MTPCarrier, ids: Tensor) -> None:
    """A loop of the user's own, whose main loss knows nothing of MTP."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = base_model(model)(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    mtp = mtp_forward(
        model,
        hidden,
        input_ids=ids,
        position_ids=positions,
        document_ids=torch.zeros_like(ids),
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
    )
    logits = project(model, graft(hidden, mtp.loss))
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()


@pytest.mark.parametrize(
    ("backend", "detach_encoder"),
    [
        pytest.param("aot_eager", True, id="aot_eager-heads"),
        pytest.param("aot_eager", False, id="aot_eager-joint"),
        pytest.param("inductor", False, id="inductor-joint", marks=needs_compiler),  # the trunk's graph is the same
    ],
)
@pytest.mark.parametrize("path", [by_the_hooks, grafted_by_hand])
def test_a_compiled_trunk_gets_the_same_gradients(
    backend: str, path: Callable[[MTPCarrier, Tensor], None], detach_encoder: bool
) -> None:
    """`fullgraph` turns every graph break inside the trunk into an error."""
    torch._dynamo.reset()
    plain, compiled = carrier(detach_encoder), carrier(detach_encoder)
    trunk = base_model(compiled)
    compiled_calls = torch._dynamo.testing.CompileCounterWithBackend(backend)
    trunk.forward = torch.compile(trunk.forward, backend=compiled_calls, fullgraph=True)
    for seed in (0, 1):  # the second reuses what the first compiled
        ids = token_rows(2, 12, seed=seed)
        path(plain, ids)
        path(compiled, ids)
    assert compiled_calls.frame_count == 1
    expected, found = gradients(plain), gradients(compiled)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad is not None and found[name] is not None, name
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
