"""Give a causal LM an MTP block."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun.errors import UsageError
from forerun.families import FamilyRecord, family_of
from forerun.models.carrier import MTPCarrier, make_carrier, set_depth
from forerun.models.init import Init, fit_to_text, initialise, norm_scale, set_norm_scale
from forerun.models.layers import make_decoder
from forerun.models.layout import new_layout
from forerun.models.trunk import UndoNorm, base_model, final_norm
from forerun.mtp.block import MTPBlock, MTPLayer
from forerun.mtp.config import MTPConfig


def attach(
    model: PreTrainedModel,
    mtp: MTPConfig | None = None,
    *,
    init: Init | None = "carry",
    fit_to: Sequence[Tensor] = (),
    family: FamilyRecord | None = None,
    seed: int = 0,
) -> MTPCarrier:
    """Attach an MTP block to a model that has none. The model is changed in place and returned.

    Its class becomes a subclass of its own class: `isinstance` checks, `generate`, Trainer and TRL see the model they
    know. In training mode, a forward with labels grafts the MTP loss into the graph, and `save_pretrained` writes the
    block's tensors under the family's names with the config key set.

    Args:
        model: a decoder-only causal LM of transformers whose layers are called as Llama's are.
        mtp: default is `MTPConfig(enable=True)`.
        init: how the block starts. "carry": the projection passes the trunk's hidden on, the decoder layer is drawn
            with silent outputs, and the final norm keeps half the trunk's logit scale; so the head repeats the trunk's
            last prediction, and its loss starts below ln V. "plain": every matrix is drawn from
            N(0, initializer_range), as those of a model trained from nothing are. None: left as the copies come, for
            weights that are loaded next.
        fit_to: text to solve for the projection on, as token ids, long [B, S] each, every row one document. The best
            start, for one forward of the trunk over it (`forerun.models.init.fit_projection`): give several times 2d
            tokens of what the model will write. Needs init="carry".
        family: how its checkpoints look; None is the model's own family, or `ATTACHED` for a model that has none.
        seed: of the random inits.

    Raises:
        UsageError: the model carries MTP already, or has no decoder layers that can be copied; or a family whose
            checkpoints hold one layer was asked for several; or fit_to without init="carry".
    """
    mtp = mtp or MTPConfig(enable=True)
    if fit_to and init != "carry":
        raise UsageError(f"fit_to solves for a block that starts as its projection: give init='carry', not {init!r}")
    if isinstance(model, MTPCarrier):
        raise UsageError("the model carries an MTP block already: load it with forerun.load and use it as it is")
    trunk = base_model(model)
    layers = getattr(trunk, "layers", None)
    norm: Any = final_norm(trunk)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0 or norm is None:
        raise UsageError(
            f"cannot attach MTP to {type(model).__name__}: its trunk has no .layers and .norm as Llama has"
        )
    text_config = model.config.get_text_config()
    family = family or family_of(model.config.to_dict())
    count = 1 if mtp.repeat_layer else mtp.num_layers
    if family.max_layers is not None and count > family.max_layers:
        raise UsageError(
            f"checkpoints of family {family.name} hold {family.max_layers} MTP layer, mtp.num_layers={count} asks for "
            "more: set mtp.repeat_layer=true to run one at every depth"
        )
    generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def make_norm() -> nn.Module:
        made = copy.deepcopy(norm)
        set_norm_scale(made, torch.ones_like(norm_scale(made)))
        return made

    built: list[MTPLayer] = []
    for k in range(count):
        decoder = make_decoder(layers, text_config, family, k)
        layer = MTPLayer(text_config.hidden_size, decoder, make_norm, family.concat_order, family.final_norm)
        # The decoder keeps the trunk's own mixture of dtypes: routers stay in float32 in a bfloat16 trunk.
        layer.proj.to(dtype=norm.weight.dtype, device=norm.weight.device)
        if init is not None:
            initialise(layer, norm, init, text_config.initializer_range, generator, family, first=k == 0)
        for child in ("hidden_norm", "embed_norm", "proj", "final_norm"):
            if built and family.shared_between_depths(child):
                setattr(layer, child, getattr(built[0], child))
        built.append(layer.requires_grad_(True))  # the copies of a frozen trunk's modules are frozen too
    undo_norm = UndoNorm(norm) if family.trunk_hidden == "pre_norm" else None
    block = MTPBlock(built, mtp.num_layers, family.recurrence, undo_norm)
    set_depth(model.config, family, len(built))
    layout = new_layout(family, len(built), text_config.num_hidden_layers)
    carrier = make_carrier(model, block, mtp, family, layout)
    if fit_to:
        fit_to_text(carrier, fit_to)
    return carrier
