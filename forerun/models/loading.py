"""Load a checkpoint directory: trunk through transformers, MTP tensors under their family's names."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import logging as transformers_logging
from transformers.initialization import meta_device_safe_creation_ops

from forerun.checkpoint.ambiguity import refuse_ambiguous
from forerun.checkpoint.dequantise import refuse_quantised
from forerun.checkpoint.hub import local_directory
from forerun.checkpoint.reader import ADAPTER, CONFIG, CheckpointReader
from forerun.errors import ForerunError, UsageError, one_line
from forerun.families import FamilyRecord, declared_depth, family_of, present_depth
from forerun.families.megatron import refuse_megatron_names
from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier, mtp_weight_names, set_depth
from forerun.models.config_overrides import build_config, overridden_config
from forerun.models.layout import fill, found_layout
from forerun.mtp.config import MTPConfig

logger = logging.getLogger(__name__)

_MULTIMODAL = "ForConditionalGeneration"
_GENERATION = "generation_config.json"


def load(
    path: str | Path,
    mtp: MTPConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
    attn_implementation: str | None = None,
    meta: bool = False,
) -> PreTrainedModel:
    """A causal LM with the MTP block that its checkpoint holds.

    Args:
        path: a local Hugging Face directory, or a hub repository ("organisation/name").
        mtp: default keeps the block, if there is one. `enable=False` skips its tensors and sets the config's depth key
            to 0, also where it declares a block that the files lack.
        dtype: of all weights.
        trust_remote_code: let the directory's own Python files define the trunk, where transformers has no code for it.
        override_config: keys of config.json to set before the model is built, see `overridden_config`.
        attn_implementation: transformers' name of an attention function, "flash_attention_2" for instance; None leaves
            the choice to the model.
        meta: read no weight, and leave the model on the meta device, where it takes no memory: for ranks that get
            theirs from another (docs/scaling.md). What is wrong with the weights is then not found either.

    Returns:
        An `MTPCarrier`, or the plain model where the checkpoint has no block or `enable` is false.

    Raises:
        UsageError: not a checkpoint, or one with an adapter in it; `enable=True` on one without MTP; `repeat_layer` on
            one with several layers; a weight of the trunk missing, or a depth declared of which tensors are missing;
            quantised weights; files that can be read in two ways (see `forerun.checkpoint.ambiguity`); a family that is
            not supported; an override of a key that is not there.
        ForerunError: an MTP tensor has another shape than its place, is quantised, or is one that the family does not
            know; a copy of the embedding or the LM head differs from the trunk's.
    """
    reader = CheckpointReader(local_directory(path))
    if override_config:
        reader.config = overridden_config(reader, override_config, trust_remote_code)
    refuse_megatron_names(path, reader.tensor_names)
    refuse_quantised(reader)
    if os.path.lexists(reader.path / ADAPTER):  # which transformers reads or not, as peft is installed or not
        raise UsageError(
            f"{path} holds an adapter beside the model, {ADAPTER}: merge the two, by peft's merge_and_unload for "
            "instance, or remove the adapter's files"
        )
    family = family_of(reader.config)
    depth = present_depth(family, reader.config, reader.tensor_names)
    declared = declared_depth(family, reader.config)
    if mtp is not None and not mtp.enable:
        model = _load_trunk(reader, family, depth, dtype, trust_remote_code, attn_implementation, meta)
        if depth or declared:
            set_depth(model.config, family, 0)
        return model
    if declared is None:
        declared = depth
    if depth != declared:
        raise UsageError(
            f"{path} declares {family.depth_key}={declared} but holds {depth} MTP layers: "
            "correct config.json, restore the missing tensors, or load it with mtp.enable=false"
        )
    if mtp is not None and depth == 0:
        raise UsageError(f"{path} carries no MTP block: attach one with forerun.attach(model, mtp)")
    if mtp is not None and mtp.repeat_layer and depth > 1:
        raise UsageError(f"mtp.repeat_layer=true repeats one layer, and {path} holds {depth}: set it to false")
    model = _load_trunk(reader, family, depth, dtype, trust_remote_code, attn_implementation, meta)
    if depth == 0:
        return model
    mtp = mtp or MTPConfig(enable=True)
    wanted = replace(mtp, num_layers=mtp.num_layers if mtp.repeat_layer else depth)
    carrier = attach(model, wanted, init=None, family=family)
    layers = carrier.config.get_text_config().num_hidden_layers
    carrier.mtp_layout = found_layout(family, depth, layers, mtp_weight_names(carrier).values(), reader.tensor_names)
    if not meta:
        _load_block(carrier, reader, depth)
    carrier.mtp_source = reader.path
    return carrier


def _load_trunk(
    reader: CheckpointReader,
    family: FamilyRecord,
    depth: int,
    dtype: torch.dtype,
    trust_remote_code: bool,
    attn_implementation: str | None,
    meta: bool,
) -> PreTrainedModel:
    path = reader.path
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the block's tensors are "unexpected" to the trunk; we account for them
    try:
        config = build_config(reader, family, trust_remote_code)
        if attn_implementation is not None:
            config._attn_implementation = attn_implementation
        if meta:
            return _without_weights(reader, config, dtype, trust_remote_code)
        layers = config.get_text_config().num_hidden_layers
        refuse_ambiguous(reader, lambda name: family.owns(name, depth, layers))
        loaded: Any = _trunk_class(reader.config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except ForerunError:
        raise
    except Exception as error:  # a wrong value in config.json ends in whatever the model's code makes of it
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"{path} brings Python files of its own: read them, and set trust_remote_code=true to run them"
            ) from error
        if attn_implementation is not None and _refused_attention(error):
            raise UsageError(f"attn_implementation={attn_implementation}: {one_line(error):.200}") from error
        raise UsageError(
            f"transformers cannot load {path}: check config.json and weights ({one_line(error):.200})"
        ) from error
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
    others = (name for name in found["unexpected_keys"] if not family.owns(name, depth, layers))
    if unused := sorted(others):
        logger.warning("%s holds %d tensors that config.json has no use for, first %s", path, len(unused), unused[0])
    return cast(PreTrainedModel, model)


def _refused_attention(error: Exception) -> bool:
    """Whether transformers raised it as it checked whether model, machine and installation have that attention."""
    passed = traceback.extract_tb(error.__traceback__)
    return any(frame.name == PreTrainedModel._check_and_adjust_attn_implementation.__name__ for frame in passed)


def _without_weights(
    reader: CheckpointReader, config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    """What `from_pretrained` makes of a checkpoint, on the meta device."""
    config.name_or_path = str(reader.path)
    made = _trunk_class(reader.config)
    with torch.device("meta"), meta_device_safe_creation_ops():
        if made is AutoModelForCausalLM:
            model = made.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        else:
            model = made._from_config(config, dtype=dtype)
    if model.can_generate():
        own = os.path.lexists(reader.path / _GENERATION)
        more: dict[str, Any] = {} if own else {"config_file_name": CONFIG, "_from_model_config": True}
        model.generation_config = GenerationConfig.from_pretrained(reader.path, **more)
    return model.eval()


def _trunk_class(config: Mapping[str, Any]) -> Any:
    """The class that reads all of the checkpoint; AutoModelForCausalLM drops a multimodal one's other parts."""
    architectures = config.get("architectures")
    if isinstance(architectures, list) and str(architectures[0] if architectures else "").endswith(_MULTIMODAL):
        found = getattr(transformers, architectures[0], None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    return AutoModelForCausalLM


def _load_block(model: MTPCarrier, reader: CheckpointReader, depth: int) -> None:
    own = model.state_dict()
    family, names = model.mtp_family, reader.tensor_names
    stored_names = mtp_weight_names(model)
    layers = model.config.get_text_config().num_hidden_layers
    read: set[str] = set()
    for name, stored_name in stored_names.items():
        read.update(fill(family, stored_name, own[name], names, reader.tensor))
    for name, of in model.mtp_layout.duplicates:
        shared: Any = model.get_input_embeddings() if of == "embedding" else model.get_output_embeddings()
        _check_same(name, reader.tensor(name), of, shared.weight)
        read.add(name)
    # Old checkpoints hold a buffer that every reader computes itself.
    unknown = {n for n in names - read if family.owns(n, depth, layers) and not n.endswith("rotary_emb.inv_freq")}
    if unknown:
        raise ForerunError(
            f"{reader.path} holds {len(unknown)} MTP tensors that family {family.name} has no place for, first "
            f"{min(unknown)}: a save would lose them; remove them, or load with mtp.enable=false"
        )


def _check_same(name: str, copy: Tensor, of: str, trunk_weight: Tensor) -> None:
    copy = copy.to(trunk_weight.dtype)
    if not torch.equal(copy, trunk_weight.detach().cpu()):
        raise ForerunError(
            f"{name} differs from the trunk's {of}, of which it should be a copy: remove it from the files "
            "to go on with the trunk's"
        )
