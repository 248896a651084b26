"""Give a causal LM an MTP block."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.errors import UsageError
from forerun.families import ATTACHED, FamilyRecord
from forerun.models.carrier import MTPCarrier, make_carrier
from forerun.models.init import Init, fit_to_text, initialise
from forerun.models.trunk import UndoNorm, base_model
from forerun.mtp.block import MTPBlock, MTPLayer
from forerun.mtp.config import MTPConfig

def attach(
    model: PreTrainedModel,
    mtp: MTPConfig | None = None,
    *,
    init: Init = "carry",
    fit_to: Sequence[Tensor] = (),
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
        init: how the block starts. "carry": the projection passes the trunk's hidden on, the decoder layer is a copy of
            the trunk's with silent outputs, and the final norm keeps half the trunk's logit scale; so the head repeats
            the trunk's last prediction, and its loss starts below ln V. "plain": every matrix is drawn from
            N(0, initializer_range), as those of a model trained from nothing are.
        fit_to: text to solve for the projection on, as token ids, long [B, S] each, every row one document. The best
            start, for one forward of the trunk over it (`forerun.models.init.fit_projection`): give several times 2d
            tokens of what the model will write. Needs init="carry".
        family: layout of the tensors on disk.
        seed: of the random inits.

    Raises:
        UsageError: the model carries MTP already, or has no decoder layers that can be copied; or fit_to with
            init="plain".
    """
    mtp = mtp or MTPConfig(enable=True)
    if fit_to and init != "carry":
        raise UsageError(f"fit_to solves for a block that starts as its projection: give init='carry', not {init!r}")
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
        initialise(layer, norm, init, text_config.initializer_range, generator, family, first=k == 0)
        built.append(layer.requires_grad_(True))  # the copies of a frozen trunk's modules are frozen too
    undo_norm = UndoNorm(norm) if family.trunk_hidden == "pre_norm" else None
    block = MTPBlock(built, mtp.num_layers, family.recurrence, undo_norm)
    setattr(model.config, family.depth_key, len(built))
    carrier = make_carrier(model, block, mtp, family)
    if fit_to:
        fit_to_text(carrier, fit_to)
    return carrier


def _copy_layer(layer: nn.Module, k: int) -> nn.Module:
    """A decoder layer of the same kind whose key-value cache index is k: the block keeps a cache of its own."""
    made = copy.deepcopy(layer)
    for module in made.modules():
        if "layer_idx" in module.__dict__:
            module.__dict__["layer_idx"] = k
    return made
