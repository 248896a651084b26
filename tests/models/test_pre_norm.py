"""A family whose block reads the trunk's hidden before its final norm: the same as taking it there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from forerun.errors import UsageError
from forerun.models.attach import attach
from forerun.models.training import mtp_forward
from forerun.models.trunk import UndoNorm, base_model
from forerun.mtp.config import MTPConfig
from tests.models.tiny import VOCAB, tiny_model


def losses(model: nn.Module, before_norm: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The MTP loss and gradients; with `before_norm`, of a block that is handed the norm's input instead."""
    model = copy.deepcopy(model)
    if before_norm:
        model.mtp.undo_norm = None
    taken: dict[str, Tensor] = {}
    norm = base_model(model).norm
    hook = norm.register_forward_hook(lambda _, args, out: taken.update(before=args[0], after=out))
    ids = torch.arange(24).view(2, 12) % VOCAB
    base_model(model)(input_ids=ids, use_cache=False)
    hook.remove()
    original = model.mtp.step

    def step(depth: int, hidden_states: Tensor, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, Tensor]:
        if before_norm and depth == 1:
            hidden_states = taken["before"] if hidden_states.requires_grad else taken["before"].detach()
        return original(depth, hidden_states, *args, **kwargs)

    model.mtp.step = step
    output = mtp_forward(
        model,
        taken["after"],
        input_ids=ids,
        position_ids=torch.arange(12).expand(2, -1),
        document_ids=torch.zeros_like(ids),
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
    )
    output.loss.backward()
    return output.loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("depths", [1, 2])
def test_undoing_the_norm_equals_taking_the_hidden_before_it(detach: bool, depths: int) -> None:
    torch.manual_seed(0)
    model = attach(
        tiny_model(), MTPConfig(enable=True, enable_train=True, detach_encoder=detach, num_layers=depths), init="plain"
    )
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.0  # what is left then is scale-invariant
    with torch.no_grad():
        base_model(model).norm.weight.uniform_(-2, 2)
    loss, grads = losses(model, before_norm=False)
    expected_loss, expected = losses(model, before_norm=True)
    torch.testing.assert_close(loss, expected_loss)
    norm = [name for name in grads if name.endswith("model.norm.weight")]
    for name in norm:
        # Through the block nothing reaches the norm's weight; what does comes from nowhere else here.
        torch.testing.assert_close(grads.pop(name), torch.zeros_like(model.get_parameter(name)), atol=1e-12, rtol=0)
        expected.pop(name, None)
    assert bool(norm) is not detach
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], msg=name)


def test_the_weight_of_a_zero_centred_norm_is_one_more() -> None:
    norm = Qwen3NextRMSNorm(4, eps=Qwen3NextConfig().rms_norm_eps)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, 1.0, -0.5, -3.0]))
    hidden = norm(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    ratio = UndoNorm(norm)(hidden)[0] / torch.tensor([1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(ratio, ratio[:1].expand(4))


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8)])
def test_a_norm_that_cannot_be_undone_is_refused(norm: nn.Module) -> None:
    with torch.no_grad():
        if isinstance(norm, nn.RMSNorm):
            norm.weight[3] = 0.0
    with pytest.raises(UsageError, match="zero weight, or is no RMS norm"):
        UndoNorm(norm)
