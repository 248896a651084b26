"""Give a causal LM an MTP block."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from forerun.errors import UsageError
from forerun.families import ATTACHED, FamilyRecord
from forerun.models.carrier import MTPCarrier, make_carrier
from forerun.models.trunk import UndoNorm, base_model
from forerun.mtp.block import MTPBlock, MTPLayer
from forerun.mtp.config import MTPConfig

Init = Literal["copy_last", "plain", "identity"]


def attach(
    model: PreTrainedModel,
    mtp: MTPConfig | None = None,
    *,
    init: Init = "copy_last",
    family: FamilyRecord = ATTACHED,
    seed: int = 0,
) -> MTPCarrier:
    """Attach an MTP block to a model that has none. The model is changed in place and returned.

    Its class becomes a subclass of its own class: `isinstance` checks, `generate`, Trainer and TRL see the model they
    know. In training mode, a forward with labels grafts the MTP loss into the graph, and `save_pretrained` writes the
    block's tensors under the family's names with the config key set.

    Args:
        model: a decoder-only causal LM of transformers whose layers are called as Llama's are.
        mtp: default is `MTPConfig(enable=True)`.
        init: "copy_last" copies the trunk's last layer and starts the projection as the sum of both halves; "plain"
            draws every matrix from N(0, initializer_range); "identity" draws the same but zeroes the layer's output
            projections, so the block starts as its projection alone (for `forerun.models.init.fit_projection`).
        family: layout of the tensors on disk.
        seed: of the random inits.

    Raises:
        UsageError: the model carries MTP already, or has no decoder layers that can be copied.
    """
    mtp = mtp or MTPConfig(enable=True)
    if isinstance(model, MTPCarrier):
        raise UsageError("the model carries an MTP block already: load it with forerun.load and use it as it is")
    trunk = base_model(model)
    layers = getattr(trunk, "layers", None)
    norm = getattr(trunk, "norm", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0 or norm is None or not hasattr(trunk, "rotary_emb"):
        raise UsageError(
            f"cannot attach MTP to {type(model).__name__}: its trunk has no .layers, .norm and .rotary_emb as Llama has"
        )
    text_config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(seed)

    def make_norm() -> nn.Module:
        made = copy.deepcopy(norm)
        nn.init.ones_(made.weight)
        return made

    built = []
    for k in range(1 if mtp.repeat_layer else mtp.num_layers):
        layer = MTPLayer(
            text_config.hidden_size, _copy_layer(layers[-1], k), make_norm, family.concat_order, family.final_norm
        ).to(dtype=norm.weight.dtype, device=norm.weight.device)
        _initialise(layer, norm, init, text_config.initializer_range, generator)
        built.append(layer.requires_grad_(True))  # the copies of a frozen trunk's modules are frozen too
    undo_norm = UndoNorm(norm) if family.trunk_hidden == "pre_norm" else None
    block = MTPBlock(built, mtp.num_layers, family.recurrence, undo_norm)
    setattr(model.config, family.depth_key, len(built))
    return make_carrier(model, block, mtp, family)


def _copy_layer(layer: nn.Module, k: int) -> nn.Module:
    """A decoder layer of the same kind whose key-value cache index is k: the block keeps a cache of its own."""
    made = copy.deepcopy(layer)
    for module in made.modules():
        if "layer_idx" in module.__dict__:
            module.__dict__["layer_idx"] = k
    return made


@torch.no_grad()
def _initialise(layer: MTPLayer, norm: nn.Module, init: Init, std: float, generator: torch.Generator) -> None:
    if isinstance(layer.final_norm, type(norm)):
        layer.final_norm.load_state_dict(norm.state_dict())
    size = layer.proj.out_features
    if init == "copy_last":
        eye = torch.eye(size, dtype=layer.proj.weight.dtype, device=layer.proj.weight.device)
        layer.proj.weight.copy_(torch.cat([eye, eye], dim=1))
        return
    if init not in ("plain", "identity"):
        raise UsageError(f"init={init!r} is not one of copy_last, plain, identity")
    for name, parameter in layer.named_parameters():
        if parameter.dim() >= 2:
            drawn = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(drawn)
        elif name.endswith("bias"):
            parameter.zero_()
        elif "decoder" in name:
            parameter.fill_(1.0)
    if init == "identity":
        for name, parameter in layer.decoder.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
