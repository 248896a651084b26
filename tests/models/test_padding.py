"""Padding is token 0 and never trained on, even where a collator left it in the labels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from forerun import MTPConfig, attach
from forerun.models.training import mtp_forward
from forerun.models.trunk import base_model
from forerun.mtp.shift import document_ids
from tests.models.tiny import tiny_model, token_rows


@pytest.mark.parametrize("padding", [(3, 0), (0, 3)], ids=["left", "right"])
def test_token_zero_gets_no_gradient_from_padding(padding: tuple[int, int]) -> None:
    ids = F.pad(token_rows(2, 8), padding)
    attention = (ids != 0).long()
    mtp = MTPConfig(enable=True, enable_train=True, num_layers=2)
    model = attach(tiny_model(tied=False), mtp, init="plain").double().train()
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    trunk = base_model(model)
    hidden = trunk(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False).last_hidden_state
    output = mtp_forward(
        model,
        hidden,
        input_ids=ids,
        position_ids=positions,
        document_ids=document_ids(attention_mask=attention),
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
        attention_mask=attention,
    )
    output.loss.backward()
    assert output.stats.sums[:, 0].tolist() == [2 * 6, 2 * 5]
    embedding = model.get_input_embeddings().weight.grad
    assert embedding is not None and embedding.abs().sum() > 0 and not embedding[0].any()
