"""The block against its formula, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from forerun.mtp.block import MTPBlock, MTPLayer

D = 6


class Layer(nn.Module):
    """A decoder layer that mixes positions causally, so a depth's output depends on the ones before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x.cumsum(dim=1)))


def make_layer(order: str = "hidden_embed", final_norm: bool = True) -> MTPLayer:
    layer = MTPLayer(D, Layer(), lambda: nn.RMSNorm(D), order, final_norm).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize("order", ["hidden_embed", "embed_hidden"])
@pytest.mark.parametrize("recurrence", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("final_norm", [True, False])
def test_depths_follow_the_formula(order: str, recurrence: str, final_norm: bool) -> None:
    torch.manual_seed(0)
    layers = [make_layer(order, final_norm) for _ in range(3)]
    block = MTPBlock(layers, 3, recurrence)
    hidden = torch.randn(2, 5, D, dtype=torch.float64)
    embeds = [torch.randn(2, 5, D, dtype=torch.float64) for _ in range(3)]
    outputs = block(hidden, lambda k: embeds[k - 1])
    for layer, embedded, output in zip(layers, embeds, outputs, strict=True):
        halves = [layer.hidden_norm(hidden), layer.embed_norm(embedded)]
        if order == "embed_hidden":
            halves.reverse()
        raw = layer.decoder(torch.cat(halves, -1) @ layer.proj.weight.T)
        for_head = layer.final_norm(raw)
        torch.testing.assert_close(output, for_head)
        hidden = for_head if recurrence == "post_norm" else raw


def test_one_layer_repeated_shares_its_parameters() -> None:
    torch.manual_seed(0)
    layer = make_layer()
    block = MTPBlock([layer], 2)
    assert len(block.layers) == 1 < block.num_depths
    hidden, embedded = torch.randn(1, 4, D, dtype=torch.float64), torch.randn(1, 4, D, dtype=torch.float64)
    first, second = block(hidden, lambda _: embedded)
    torch.testing.assert_close(second, layer(first, embedded)[0])


def test_the_loss_at_depth_2_reaches_the_block_of_depth_1() -> None:
    torch.manual_seed(0)
    block = MTPBlock([make_layer(), make_layer()], 2)
    hidden = torch.randn(1, 4, D, dtype=torch.float64)
    block(hidden, lambda _: hidden)[1].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in block.layers[0].proj.parameters())


def test_layers_must_fit_the_depths() -> None:
    with pytest.raises(ValueError, match="2 layers cannot serve 3 depths"):
        MTPBlock([make_layer(), make_layer()], 3)
