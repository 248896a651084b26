"""What a carrier's loss is divided by where it is easily forgotten: repeated layers, micro-batches without a target."""

from __future__ import annotations

import pytest
import torch

from forerun import MTPConfig, attach
from forerun.models.carrier import MTPCarrier
from forerun.models.training import mtp_forward
from forerun.models.trunk import base_model
from tests.models.tiny import gradients, tiny_model, token_rows


def carrier(**settings: object) -> MTPCarrier:
    mtp = MTPConfig(enable=True, enable_train=True, num_layers=2, detach_encoder=True, **settings)  # type: ignore[arg-type]
    return attach(tiny_model(), mtp, init="plain").double().train()


def test_a_repeated_layer_is_divided_by_its_depths() -> None:
    """One layer run twice has the gradient of two equal layers, both together."""
    ids = token_rows(2, 12)
    repeated, several = carrier(repeat_layer=True), carrier()
    assert len(repeated.mtp.layers) == 1 and repeated.mtp.num_depths == 2
    for layer in several.mtp.layers:
        layer.load_state_dict(repeated.mtp.layers[0].state_dict())
    repeated(input_ids=ids, labels=ids).loss.backward()
    several(input_ids=ids, labels=ids).loss.backward()
    expected = gradients(several)
    for name, grad in gradients(repeated).items():
        if name.startswith("mtp."):
            first, second = expected[name], expected[name.replace("layers.0.", "layers.1.")]
            assert first is not None and second is not None and second.abs().sum() > 0
            torch.testing.assert_close(grad, first + second, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("supervised", [0, 1, 2])
def test_a_micro_batch_without_a_target_adds_nothing(supervised: int) -> None:
    """Its row has no target at all, one that only the trunk can predict, or none left for depth 2."""
    model = carrier()
    ids = token_rows(1, 8)
    labels = torch.full_like(ids, -100)
    labels[:, 1 : 1 + supervised] = ids[:, 1 : 1 + supervised]
    positions = torch.arange(8).unsqueeze(0)
    output = mtp_forward(
        model,
        base_model(model)(input_ids=ids, use_cache=False).last_hidden_state,
        input_ids=ids,
        position_ids=positions,
        document_ids=torch.zeros_like(ids),
        loss_mask=labels != -100,
    )
    assert torch.isfinite(output.loss) and bool(output.loss > 0) == (supervised == 2)
    model(input_ids=ids, labels=labels).logits.sum().backward()
    for name, grad in gradients(model).items():
        if name.startswith("mtp."):
            assert grad is not None and torch.isfinite(grad).all(), name
            trained = supervised == 2 and name.startswith("mtp.layers.0.")
            assert bool(grad.any()) == trained, name
