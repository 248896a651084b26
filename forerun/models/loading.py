"""Load a checkpoint directory: trunk through transformers, MTP tensors under their family's names."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import logging as transformers_logging

from forerun.checkpoint.reader import CheckpointReader
from forerun.errors import ForerunError, UsageError
from forerun.families import FamilyRecord, declared_depth, family_of, present_depth
from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier, mtp_weight_names
from forerun.mtp.config import MTPConfig

logger = logging.getLogger(__name__)


def load(
    path: str | Path,
    mtp: MTPConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal LM with the MTP block that its checkpoint holds.

    Args:
        path: a local Hugging Face directory.
        mtp: default keeps the block, if there is one. `enable=False` skips its tensors and sets the config's depth key
            to 0.
        dtype: of all weights.
        trust_remote_code: let the directory's own Python files define the trunk, where transformers has no code for it.

    Returns:
        An `MTPCarrier`, or the plain model where the checkpoint has no block or `enable` is false.

    Raises:
        UsageError: not a checkpoint; `enable=True` on one without MTP; `repeat_layer` on one with several layers; a
            weight of the trunk missing, or a depth declared of which tensors are missing.
    """
    reader = CheckpointReader(path)
    family = family_of(reader.config)
    depth = present_depth(family, reader.tensor_names)
    declared = declared_depth(family, reader.config)
    if depth != declared:
        raise UsageError(
            f"{path} declares {family.depth_key}={declared} but holds {depth} MTP layers: "
            "correct config.json, or restore the missing tensors"
        )
    if mtp is not None and mtp.enable and depth == 0:
        raise UsageError(f"{path} carries no MTP block: attach one with forerun.attach(model, mtp)")
    if mtp is not None and mtp.enable and mtp.repeat_layer and depth > 1:
        raise UsageError(f"mtp.repeat_layer=true repeats one layer, and {path} holds {depth}: set it to false")
    model = _load_trunk(reader, family, depth, dtype, trust_remote_code)
    if depth == 0:
        return model
    if mtp is not None and not mtp.enable:
        setattr(model.config, family.depth_key, 0)
        return model
    mtp = mtp or MTPConfig(enable=True)
    carrier = attach(model, replace(mtp, num_layers=mtp.num_layers if mtp.repeat_layer else depth), family=family)
    _load_block(carrier, reader)
    carrier.mtp_source = reader.path
    return carrier


def _load_trunk(
    reader: CheckpointReader, family: FamilyRecord, depth: int, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    path = reader.path
    config = None
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the block's tensors are "unexpected" to the trunk; we account for them
    try:
        if family.trunk_model_type is not None:
            own = {k: v for k, v in reader.config.items() if k not in ("model_type", "architectures", "auto_map")}
            config = AutoConfig.for_model(family.trunk_model_type, **own)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # a wrong value in config.json ends in whatever the model's code makes of it
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"{path} brings Python files of its own: read them, and set trust_remote_code=true to run them"
            ) from error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"transformers cannot load {path}: check config.json and weights ({reason:.200})") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, found = loaded
    if mismatched := sorted(found["mismatched_keys"]):
        name, stored, needed = mismatched[0]
        raise UsageError(
            f"{path}: {name} has shape {tuple(stored)}, config.json asks for {tuple(needed)} "
            f"({len(mismatched)} weights in all): the two do not belong together"
        )
    if missing := sorted(found["missing_keys"]):  # transformers has filled them with random numbers
        raise UsageError(f"{path} lacks {len(missing)} of the trunk's weights, first {missing[0]}: restore them")
    blocks = tuple(prefix.format(k=k) for _, prefix in family.tensor_names for k in range(depth))
    if unused := sorted(name for name in found["unexpected_keys"] if not name.startswith(blocks)):
        logger.warning("%s holds %d tensors that config.json has no use for, first %s", path, len(unused), unused[0])
    return cast(PreTrainedModel, model)


@torch.no_grad()
def _load_block(model: MTPCarrier, reader: CheckpointReader) -> None:
    own = model.state_dict()
    for name, stored_name in mtp_weight_names(model).items():
        tensor = reader.tensor(stored_name)
        if tensor.shape != own[name].shape:
            raise ForerunError(
                f"{stored_name} has shape {tuple(tensor.shape)}, the block needs {tuple(own[name].shape)}"
            )
        own[name].copy_(tensor)
