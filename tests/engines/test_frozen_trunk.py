"""train_trunk=false wins over a joint MTP loss: embedding and LM head are the trunk's, too."""

from __future__ import annotations

import pytest
import torch

from forerun.data.packing import Document
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.models.attach import attach
from forerun.mtp.config import MTPConfig
from forerun.trainers.batching import Rows
from tests.engines.test_counts import next_token_loss
from tests.models.tiny import tiny_model, token_rows


@pytest.mark.parametrize("tied", [True, False])
def test_a_frozen_trunk_stays_as_it_is_even_in_joint_training(tied: bool) -> None:
    model = attach(tiny_model(tied=tied), MTPConfig(enable=True, enable_train=True, detach_encoder=False))
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    config = TorchEngineConfig(optimizer=OptimizerConfig(lr=0.1, weight_decay=0.1), train_trunk=False)
    engine = TorchEngine(model, config)
    rows = Rows([Document(token_rows(1, 9)[0].tolist(), [True] * 9)], max_length=9, packing=True)
    for _ in range(2):
        engine.forward_backward(rows, next_token_loss)
        engine.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != name.startswith("mtp."), name
