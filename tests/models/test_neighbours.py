"""What lies before and after a document in its row changes nothing that it teaches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun import MTPConfig, attach
from forerun.data.packing import Document, pack
from forerun.models.training import mtp_forward
from forerun.models.trunk import base_model
from tests.models.tiny import gradients, tiny_model, token_rows


def document(length: int, seed: int, supervised: bool) -> Document:
    return Document(token_rows(1, length, seed)[0].tolist(), [supervised] * length)


def block_gradients(documents: list[Document], layout: str) -> dict[str, Tensor | None]:
    """Gradients of the MTP loss of two depths; the packed row ends in padding."""
    model = attach(tiny_model(), MTPConfig(enable=True, enable_train=True, num_layers=2), init="plain").double().train()
    (batch,) = pack(documents, 24, 4, layout, pad_to_multiple_of=8)  # type: ignore[arg-type]
    trunk = base_model(model)
    hidden = trunk(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).last_hidden_state
    mtp_forward(
        model,
        hidden,
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        document_ids=batch.document_ids,
        loss_mask=batch.loss_mask,
    ).loss.backward()
    return gradients(model)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_neighbours_on_both_sides_change_no_gradient(layout: str) -> None:
    """Packed, longest first: the supervised document stands between two others, the first of which it could see."""
    found = []
    for seed in (1, 2):
        others = document(9, seed, supervised=False), document(3, seed, supervised=False)
        found.append(block_gradients([others[0], document(6, 0, supervised=True), others[1]], layout))
    for name, grad in found[0].items():
        assert grad is not None, name
        torch.testing.assert_close(found[1][name], grad, rtol=0, atol=1e-12, msg=name)
    alone = block_gradients([document(6, 0, supervised=True)], layout)
    for name, grad in alone.items():
        torch.testing.assert_close(found[0][name], grad, rtol=1e-6, atol=1e-9, msg=name)
