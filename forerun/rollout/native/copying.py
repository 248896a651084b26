"""A model in the engine's own copy: trunk, LM head and MTP block, and where each weight of the model lies in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.models.trunk import UndoNorm, base_model
from forerun.mtp.block import MTPBlock, MTPLayer
from forerun.rollout.native.layers import Head, WeightCopies
from forerun.rollout.native.products import ProductTable
from forerun.rollout.native.trunks import FusedTrunk, ModuleTrunk, Trunk, check_rows


class ModelCopy:
    """The copy.

    Args:
        model: the Hugging Face model; not kept.
        kind: of what the trunk is made.
        dtype: of the copy.
        device: of the copy.
        table: of the copy's linear layers.

    Attributes:
        block: the MTP block, if the model has one; `MTPBlock.step` is the one definition of what it computes.
        weights: by checkpoint name, the part of the copy that stands for it. Those that text does not need (a vision
            tower's) are on the meta device: they take an update and hold nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kind: type[Trunk],
        dtype: torch.dtype,
        device: torch.device,
        table: ProductTable,
    ) -> None:
        copies = WeightCopies(model, dtype, device, table)
        trunk = base_model(model)
        self.table = table
        self.trunk: Trunk = kind(trunk, copies)
        head: Any = model.get_output_embeddings()
        weight = copies.view_of(head.weight)
        self.head = Head(
            copies.copy(head.weight) if weight is None else weight,
            None if head.bias is None else copies.copy(head.bias),
            table,
            model.config.get_text_config(),
        )
        self.block: MTPBlock | None = None
        needed = [trunk, head]
        if isinstance(model, MTPCarrier):
            self.block = self._copy_block(model.mtp, copies)
            needed.append(model.mtp)
        self.weights = _name_weights(model, needed, copies)

    def _copy_block(self, block: MTPBlock, copies: WeightCopies) -> MTPBlock:
        undo_norm = None
        if block.undo_norm is not None:
            assert self.trunk.norm is not None
            undo_norm = UndoNorm(self.trunk.norm)
        layers = [self.trunk.copy_mtp_layer(layer, k, copies) for k, layer in enumerate(mtp_layers(block))]
        return MTPBlock(layers, block.num_depths, block.recurrence, undo_norm)


def mtp_layers(block: MTPBlock) -> list[MTPLayer]:
    """The block's layers, typed."""
    return [layer for layer in block.layers if isinstance(layer, MTPLayer)]


def kinds_for(model: PreTrainedModel) -> list[type[Trunk]]:
    """Of what the trunk can be made, the faster kind first.

    Raises:
        UsageError: of nothing; the line says why.
    """
    trunk: Any = base_model(model)
    check_rows(trunk)
    layers = mtp_layers(model.mtp) if isinstance(model, MTPCarrier) else []
    return [FusedTrunk, ModuleTrunk] if FusedTrunk.fits(trunk, layers) else [ModuleTrunk]


def _name_weights(model: PreTrainedModel, needed: list[Any], copies: WeightCopies) -> dict[str, Tensor]:
    storages = {tensor.data_ptr() for module in needed for tensor in module.state_dict().values()}
    weights = {}
    for name, weight in named_weights(model):
        view = copies.view_of(weight)
        if view is None:
            if weight.data_ptr() in storages:
                raise UsageError(f"the native engine has no place for the weight {name}: use another rollout backend")
            view = torch.empty_like(weight, device="meta")
        weights[name] = view
    return weights
