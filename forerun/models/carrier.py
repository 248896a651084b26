"""A Hugging Face causal LM that carries an MTP block: trained by any trainer, saved whole.

`MTPCarrier` is mixed into the model's own class. Hooks rather than a `forward` of its own do the work, because trainers
(TRL, Liger) replace `forward` on the instance:

- before the model's forward, its labels are noted and a hook is put on the trunk for this one call;
- when the trunk returns, the MTP loss is computed from its hidden states and grafted onto them;
- after the model's forward (also when it raised), the trunk's hook is gone.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from forerun.checkpoint.reader import CONFIG
from forerun.checkpoint.writer import carry_over, replace_files, restore_family_config, scratch_directory
from forerun.errors import ForerunError
from forerun.families import FamilyRecord
from forerun.models.layout import Layout, file_tensors, fill
from forerun.models.training import mtp_forward
from forerun.models.trunk import base_model
from forerun.mtp.block import MTPBlock
from forerun.mtp.config import MTPConfig
from forerun.mtp.graft import LossScale, graft
from forerun.mtp.shift import document_ids
from forerun.mtp.stats import MTPStats

IGNORED_LABEL = -100
_PREFIX = "mtp.layers."
_OTHER_MODALITIES = ("pixel_values", "pixel_values_videos", "input_features")


class MTPCarrier(PreTrainedModel):
    """What `attach` and `load` return: the model's own class with these attributes.

    Attributes:
        mtp: the block.
        mtp_config: how it is trained.
        mtp_family: what its checkpoints look like.
        mtp_layout: which of the family's ways its own checkpoint has.
        mtp_loss_scale: what the trainer multiplies its own loss by before backward, see `forerun.mtp.graft`; None is 1,
            as nobody has said.
        mtp_accumulation_steps: forwards per optimizer step; divides the loss where the trainer hands down no count of
            the whole batch (`num_items_in_batch`).
        mtp_stats: sums since the last `pop_mtp_stats`, over the forwards that grafted a loss.
        mtp_source: the checkpoint directory it was loaded from, whose tokenizer and code files a save carries over.
    """

    mtp: MTPBlock
    mtp_config: MTPConfig
    mtp_family: FamilyRecord
    mtp_layout: Layout
    mtp_loss_scale: LossScale | None
    mtp_accumulation_steps: int
    mtp_stats: MTPStats | None
    mtp_source: Path | None

    def pop_mtp_stats(self) -> MTPStats | None:
        """The sums gathered since the last call, and start anew. None if no forward grafted a loss."""
        stats, self.mtp_stats = self.mtp_stats, None
        return stats

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """As transformers does it, with the MTP tensors as the family's files hold them. Written whole or not at all.

        With `save_original_format=False` the trunk's and the block's tensors keep the shapes of the modules (experts
        stacked, no copies of embedding and head), which only transformers and Forerun read.

        Raises:
            ForerunError: an MTP parameter is missing from `state_dict`, or a name stands for two tensors; nothing is
                written.
        """
        own = self.state_dict() if state_dict is None else state_dict
        original = kwargs.pop("save_original_format", True)
        tensors = file_state_dict(self, own) if original else checkpoint_state_dict(self, own)
        with scratch_directory(save_directory) as scratch:
            super().save_pretrained(
                scratch, is_main_process=is_main_process, state_dict=tensors, save_original_format=False, **kwargs
            )
            if (scratch / CONFIG).exists():
                complete_files(self, scratch, Path(save_directory))
            replace_files(scratch, save_directory)


def make_carrier(
    model: PreTrainedModel, block: MTPBlock, mtp: MTPConfig, family: FamilyRecord, layout: Layout
) -> MTPCarrier:
    """Turn `model` into a carrier, in place."""
    cls = type(model)
    # The name stays the model's own: transformers writes it into config.json as the architecture.
    model.__class__ = type(cls.__name__, (MTPCarrier, cls), {"__module__": cls.__module__})
    assert isinstance(model, MTPCarrier)
    model.mtp = block
    model.mtp_config = mtp
    model.mtp_family = family
    model.mtp_layout = layout
    model.mtp_loss_scale = None
    model.mtp_accumulation_steps = 1
    model.mtp_stats = None
    model.mtp_source = None
    model.register_load_state_dict_pre_hook(_rename_on_load)
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model.register_forward_hook(_after_forward, always_call=True)
    return model


def complete_files(model: MTPCarrier, scratch: Path, target: Path) -> None:
    """Bring what transformers wrote besides the weights to what the family's checkpoints have.

    Args:
        scratch: where it lies.
        target: where it goes; what is there already is not brought along.
    """
    if model.mtp_family.trunk_model_type is not None:
        restore_family_config(scratch, model.mtp_family)
    if model.mtp_source is not None:
        carry_over(model.mtp_source, scratch, target)


def _before_forward(model: MTPCarrier, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not (model.training and torch.is_grad_enabled() and model.mtp_config.enable_train):
        return
    call = inspect.signature(type(model).forward).bind_partial(model, *args).arguments | kwargs
    labels = call.get("labels")
    if labels is None and call.get("shift_labels") is not None:
        labels = nn.functional.pad(call["shift_labels"][:, :-1], (1, 0), value=IGNORED_LABEL)
    if labels is None:
        warnings.warn(
            "MTP is to be trained but forward got no labels: this call trains the trunk only. "
            "Pass labels, or graft the loss with forerun.models.training.mtp_forward.",
            stacklevel=2,
        )
        return
    if call.get("input_ids") is None:
        raise ForerunError("MTP training needs input_ids: inputs_embeds alone do not say which tokens follow")
    if given := [name for name in _OTHER_MODALITIES if call.get(name) is not None]:
        raise ForerunError(
            f"forward got {given[0]}, and the MTP block sees token embeddings only: train it on text, "
            "or turn mtp.enable_train off for these batches"
        )

    def graft_loss(trunk: nn.Module, _: Any, output: Any) -> Any:
        if output.get("cache") is not None:
            _warn_if_packed(call.get("position_ids"))
        output["last_hidden_state"] = _grafted(model, output["last_hidden_state"], labels, call)
        return output

    model.__dict__["_mtp_hook"] = base_model(model).register_forward_hook(graft_loss)


def _warn_if_packed(position_ids: Tensor | None) -> None:
    if position_ids is not None and bool((position_ids[..., 1:] <= position_ids[..., :-1]).any()):
        warnings.warn(
            "this row is packed, and with use_cache=True the trunk takes it for one document (transformers looks for "
            "restarting position_ids only without a cache): pass use_cache=False, or set model.config.use_cache=False",
            stacklevel=3,
        )


def _after_forward(model: MTPCarrier, *_: Any) -> None:
    hook = model.__dict__.pop("_mtp_hook", None)
    if hook is not None:
        hook.remove()


def _grafted(model: MTPCarrier, hidden_states: Tensor, labels: Tensor, call: Mapping[str, Any]) -> Tensor:
    input_ids, attention_mask, position_ids = (
        call.get(name) for name in ("input_ids", "attention_mask", "position_ids")
    )
    assert input_ids is not None
    padding = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        documents = document_ids(attention_mask=torch.ones_like(input_ids) if padding is None else padding)
    else:
        if position_ids.dim() == 3:  # one row of positions each for text (or time), height and width: equal for text
            position_ids = position_ids[0]
        position_ids = position_ids.expand(input_ids.shape[0], -1)
        documents = document_ids(position_ids, padding)
    loss_mask = labels != IGNORED_LABEL
    # A trainer that normalises by the whole batch hands its count down; the same number then divides every depth, so
    # any split into micro-batches gives one gradient. Without it each forward divides by its own counts.
    items = call.get("num_items_in_batch")
    output = mtp_forward(
        model,
        hidden_states,
        input_ids=input_ids,
        position_ids=position_ids,
        document_ids=documents,
        loss_mask=loss_mask,
        labels=torch.where(loss_mask, labels, input_ids),
        attention_mask=attention_mask,
        counts=None if items is None else [items] * model.mtp.num_depths,
    )
    model.mtp_stats = output.stats if model.mtp_stats is None else model.mtp_stats.merge(output.stats)
    loss = output.loss if items is not None else output.loss / model.mtp_accumulation_steps
    scale = model.mtp_loss_scale
    if scale is None:
        scale = 1.0
        if items is not None and dist.is_initialized() and dist.get_world_size() > 1:
            _warn_of_ranks(dist.get_world_size())
    return graft(hidden_states, loss, scale)


@functools.cache
def _warn_of_ranks(num_ranks: int) -> None:
    warnings.warn(
        f"{num_ranks} ranks train, and a trainer that averages gradients over them multiplies its own loss by as many: "
        "the MTP block gets that part of its gradient unless the trainer gets callbacks=[MTPCallback()], from "
        "forerun.trainers.hf_callback (or model.mtp_loss_scale is set)",
        stacklevel=2,
    )


def _rename_on_load(model: MTPCarrier, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """A trainer resumes from the file it saved with `load_state_dict(strict=False)`: the family's names must arrive."""
    own = model.state_dict()
    given = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
    names = mtp_weight_names(model)
    for name, stored_name in names.items():
        if prefix + stored_name in state_dict:
            state_dict[prefix + name] = given[stored_name]
            continue
        pieces = model.mtp_family.piece_names(stored_name, len(own[name])) if own[name].dim() else None
        if pieces is not None and all(part in given for parts in pieces for part in parts):
            state_dict[prefix + name] = torch.empty_like(own[name])
            fill(model.mtp_family, stored_name, state_dict[prefix + name], given, given.__getitem__)
            for part in (part for parts in pieces for part in parts):
                del state_dict[prefix + part]
    copies = [name for name, _ in model.mtp_layout.duplicates]
    for stored_name in {*names.values(), *copies}:
        state_dict.pop(prefix + stored_name, None)


def set_depth(config: PreTrainedConfig, family: FamilyRecord, depth: int) -> None:
    """Declare `depth` MTP layers in a model's configuration, wherever the family has the key."""
    text_config = config.get_text_config()
    setattr(text_config, family.depth_key, depth)
    if text_config is not config and hasattr(config, family.depth_key):
        setattr(config, family.depth_key, depth)


def mtp_weight_names(model: MTPCarrier) -> dict[str, str]:
    """Name in `state_dict()` -> name in the checkpoint, for every parameter and buffer of the block; experts stacked.

    Depths that share a module share its name in the checkpoint.
    """
    names = {}
    trunk_layers = model.config.get_text_config().num_hidden_layers
    for name in model.state_dict():
        if name.startswith(_PREFIX):
            k, parameter = name[len(_PREFIX) :].split(".", 1)
            names[name] = model.mtp_family.tensor_name(int(k), parameter, trunk_layers)
    return names


def checkpoint_state_dict(model: MTPCarrier, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state_dict` with the block's entries under the family's names; every one must be there."""
    names = mtp_weight_names(model)
    missing = [name for name in names if name not in state_dict]
    if missing:
        raise ForerunError(
            f"the state dict to save lacks {len(missing)} of {len(names)} MTP tensors (first: {missing[0]}): "
            "pass the whole model's state dict"
        )
    return {names.get(name, name): tensor for name, tensor in state_dict.items()}


def file_state_dict(model: MTPCarrier, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state_dict` as the family's files hold it: names, experts, copies of embedding and LM head. Every name once.

    Raises:
        ForerunError: an MTP tensor is missing, or its name is the trunk's, too.
    """
    whole = checkpoint_state_dict(model, state_dict)
    stored_names = set(mtp_weight_names(model).values())
    stored = {name: tensor for name, tensor in whole.items() if name in stored_names}
    trunk = {name: tensor for name, tensor in whole.items() if name not in stored_names}
    block = dict(file_tensors(model.mtp_family, model.mtp_layout, stored))
    for copy, name in copied_weights(model, state_dict).items():
        block[copy] = state_dict[name].clone()  # safetensors refuses one tensor under two names
    trunk = revert_weight_conversion(model, trunk)
    if twice := sorted(block.keys() & trunk.keys()):
        raise ForerunError(f"{twice[0]} is the name of an MTP tensor and of one of the trunk's: report this as a bug")
    return trunk | block


def copied_weights(model: MTPCarrier, names: Collection[str]) -> dict[str, str]:
    """Name in the files of each copy of embedding or LM head -> of the original in `state_dict()`, out of `names`.

    Raises:
        ForerunError: `names` lack it.
    """
    copies: dict[str, str] = {}
    for copy, of in model.mtp_layout.duplicates:
        module: Any = model.get_input_embeddings() if of == "embedding" else model.get_output_embeddings()
        same = (n for n, tensor in model.state_dict(keep_vars=True).items() if tensor is module.weight and n in names)
        if (name := next(same, None)) is None:
            raise ForerunError(f"the state dict to save lacks the {of}: pass the whole model's state dict")
        copies[copy] = name
    return copies


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight and saved buffer under its checkpoint name, tied ones once, experts stacked. Detached, no copies."""
    names = mtp_weight_names(model) if isinstance(model, MTPCarrier) else {}
    saved = model.state_dict().keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):  # each yields a tied one under one name
        if name in saved:
            yield names.get(name, name), tensor.detach()


@torch.no_grad()
def load_named_weights(model: PreTrainedModel, named_tensors: Mapping[str, Tensor]) -> None:
    """Copy weights in, in place. All are checked before any is written.

    Raises:
        ForerunError: one is missing, unknown or of another shape; the message names it.
    """
    own = dict(named_weights(model))
    check_names(own, named_tensors)
    for name, tensor in named_tensors.items():
        own[name].copy_(tensor)


def check_names(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise a `ForerunError` that names the first weight missing from, unknown to, or shaped unlike `own`."""
    missing = sorted(own.keys() - given.keys())
    unknown = sorted(given.keys() - own.keys())
    if missing:
        raise ForerunError(f"{len(missing)} weights are missing, first {missing[0]}: every one is needed, MTP included")
    if unknown:
        raise ForerunError(f"{len(unknown)} weights have no place in the model, first {unknown[0]}")
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise ForerunError(f"{name} has shape {tuple(tensor.shape)}, the model's is {tuple(own[name].shape)}")
