"""A Hugging Face configuration as megatron-core's GPTModel with its own MTP block, in the chunks that this rank holds.

The layers are megatron-core's local ones: torch modules that run with or without a GPU. Its own attention refuses
packed rows, context parallelism and MLA, its norm sequence parallelism: `attention.DocumentAttention` and
`parts.ParallelRMSNorm` stand there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from forerun.engines.megatron.attention import DocumentAttention
from forerun.engines.megatron.layout import ParallelLayout
from forerun.engines.megatron.parts import LatentAttention, ParallelRMSNorm, mend_latent_attention, read_before_norm
from forerun.engines.megatron.version import mend_import_errors
from forerun.errors import ForerunError, UsageError, one_line
from forerun.families import FamilyRecord, declared_depth, family_of
from forerun.families.megatron import TrunkShape, trunk_shape
from forerun.families.megatron_trunks import MegatronTrunk, megatron_trunk, rotary_settings, transformer_settings
from forerun.mtp.config import MTPConfig


@dataclass(frozen=True)
class Blueprint:
    """What a chunk was built from; each bears it as `.blueprint`.

    Attributes:
        config: the Hugging Face configuration as a dictionary, defaults filled in.
        family: what its checkpoints look like.
        shape: the trunk's.
        depths: MTP layers that it has weights of. (`mtp.repeat_layer` runs one at several depths.)
        tied: the LM head is the embedding.
        vocab_size: tokens, without the rows by which embedding and LM head are padded to divide evenly.
        layout: as given.
    """

    config: Mapping[str, Any]
    family: FamilyRecord
    shape: TrunkShape
    depths: int
    tied: bool
    vocab_size: int
    layout: ParallelLayout


def build_model(
    config: Mapping[str, Any] | PreTrainedConfig,
    mtp: MTPConfig,
    layout: ParallelLayout,
    *,
    family: FamilyRecord | None = None,
    model_class: type[GPTModel] = GPTModel,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> list[GPTModel]:
    """This rank's chunks of the model, one per virtual pipeline stage, without weights (`weights.load_weights`).

    The last stage bears the MTP block. Embedding and LM head get rows without a token, zero, where the vocabulary does
    not divide; whoever computes probabilities leaves them out (`chunk.blueprint.vocab_size`).

    Args:
        config: config.json or transformers' configuration. It says how many MTP layers there are.
        mtp: `enable=False` builds none.
        layout: what megatron-core's parallel state was initialised with.
        family: how its checkpoints look; None is by `model_type`.
        model_class: the class of the chunks.
        dtype: of the weights.
        settings: further fields of TransformerConfig, recompute's for instance.

    Raises:
        UsageError: GPTModel cannot be this model; the line says why.
    """
    if isinstance(config, PreTrainedConfig):
        family, full = family or family_of(config.to_dict()), config.to_dict()
    else:
        family = family or family_of(config)
        full = _with_defaults(config, family)
    trunk = megatron_trunk(full.get("model_type"))
    rotary, rotary_of_model = rotary_settings(trunk, full)
    depth = _depth(family, full, mtp)
    fields = (
        transformer_settings(trunk, full) | rotary | _parallel_settings(trunk, layout, full, depth, dtype) | settings
    )
    if depth:
        fields |= {"mtp_num_layers": depth, "mtp_loss_scaling_factor": mtp.mtp_loss_scaling_factor}
    try:
        transformer = (MLATransformerConfig if trunk.latent else TransformerConfig)(**fields)
    except (AssertionError, TypeError, ValueError) as error:
        raise UsageError(f"megatron-core refuses this configuration: {one_line(error):.200}") from error
    blueprint = Blueprint(
        config=full,
        family=family,
        shape=trunk_shape(family, full),
        depths=1 if depth and mtp.repeat_layer else depth,
        tied=bool(full.get("tie_word_embeddings")),
        vocab_size=full["vocab_size"],
        layout=layout,
    )
    _check_state(layout)
    mend_import_errors()
    chunks = []
    for stage in range(layout.chunks):
        chunk = _chunk(blueprint, transformer, stage, model_class, rotary_of_model)
        _settle(chunk, blueprint, mtp)
        chunks.append(chunk)
    return chunks


def _with_defaults(config: Mapping[str, Any], family: FamilyRecord) -> dict[str, Any]:
    own = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "auto_map")}
    model_type = family.trunk_model_type or str(config.get("model_type"))
    megatron_trunk(model_type)  # before transformers is asked for a type that it may not know
    try:
        return AutoConfig.for_model(model_type, **own).to_dict()
    except Exception as error:  # a wrong value ends in whatever the class makes of it
        raise UsageError(f"transformers cannot read this config.json: {one_line(error):.200}") from error


def _check_state(layout: ParallelLayout) -> None:
    if not parallel_state.model_parallel_is_initialized():
        raise ForerunError("megatron-core's parallel state is not initialised: call initialize_model_parallel first")
    for found, wanted in (
        (parallel_state.get_tensor_model_parallel_world_size(), layout.tensor_model_parallel_size),
        (parallel_state.get_pipeline_model_parallel_world_size(), layout.pipeline_model_parallel_size),
        (parallel_state.get_context_parallel_world_size(), layout.context_parallel_size),
        (parallel_state.get_expert_model_parallel_world_size(), layout.expert_model_parallel_size),
        (parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1, layout.chunks),
    ):
        if found != wanted:
            raise ForerunError(f"megatron-core's parallel state has a size of {found} where the layout has {wanted}")


def _depth(family: FamilyRecord, config: Mapping[str, Any], mtp: MTPConfig) -> int:
    if not mtp.enable:
        return 0
    declared = declared_depth(family, config) or 0
    if declared == 0:
        raise UsageError(
            f"config.json declares no MTP layers ({family.depth_key}): attach a block and save the model first"
        )
    if not mtp.repeat_layer:
        return declared
    if declared > 1:
        raise UsageError(f"mtp.repeat_layer=true repeats one layer, and the model has {declared}: set it to false")
    if family.trunk_hidden == "pre_norm" and mtp.num_layers > 1:
        raise UsageError(
            f"family {family.name} reads hiddens before their norm, which differs from depth to depth: megatron-core's "
            "block cannot repeat one layer so, set mtp.repeat_layer=false"
        )
    return mtp.num_layers


def _leave(weight: Tensor) -> Tensor:
    return weight


def _parallel_settings(
    trunk: MegatronTrunk, layout: ParallelLayout, config: Mapping[str, Any], depth: int, dtype: torch.dtype
) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    sizes = layout.stage_sizes(layers)
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (config.get(key) or 1) % layout.tensor_model_parallel_size:
            raise UsageError(
                f"config.json has {key}={config[key]}, which tensor_model_parallel_size="
                f"{layout.tensor_model_parallel_size} does not divide: choose one that does"
            )
    if (trunk.experts or trunk.latent) and layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
        raise UsageError(
            "megatron-core trains experts and latent attention under tensor parallelism only with sequence "
            "parallelism: set sequence_parallel=true"
        )
    stages: list[list[str]] | None = None
    if len(set(sizes)) > 1:  # megatron-core divides only evenly by itself
        stages = [["decoder"] * size for size in sizes]
        stages[0].insert(0, "embedding")
        stages[-1] += ["mtp"] * depth + ["loss"]
    on_gpu = torch.cuda.is_available()
    return {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": layout.chunks if layout.chunks > 1 else None,
        "pipeline_model_parallel_layout": stages,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "sequence_parallel": layout.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        # Weights come from a checkpoint. Without any initialisation 0.16 would not mark which are divided, either.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "use_cpu_initialization": not on_gpu,
        # Kernels of Apex, of Transformer Engine, or for float16 alone.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
    }


def _layer_spec(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        qk_layernorm=config.qk_layernorm or config.multi_latent_attention,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = DocumentAttention
    for owner, names in (
        (layer, ("input_layernorm", "pre_mlp_layernorm")),
        (attention, ("q_layernorm", "k_layernorm", "kv_layernorm")),
    ):
        for name in names:
            if getattr(owner, name, IdentityOp) not in (None, IdentityOp):
                setattr(owner, name, ParallelRMSNorm)
    if config.multi_latent_attention:
        spec.submodules.self_attention.module = LatentAttention
    return spec


def _chunk(
    blueprint: Blueprint,
    config: TransformerConfig,
    virtual_stage: int,
    model_class: type[GPTModel],
    rotary: Mapping[str, Any],
) -> GPTModel:
    layout, shape = blueprint.layout, blueprint.shape
    sizes = layout.stage_sizes(shape.layers)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stage = virtual_stage * layout.pipeline_model_parallel_size + rank
    first, last = stage == 0, stage == len(sizes) - 1
    start = sum(sizes[:stage])

    def layer(n: int) -> ModuleSpec:
        return _layer_spec(config, shape.experts if shape.expert_layer(n) else None)

    block = None
    if last and blueprint.depths:
        mtp = get_mtp_layer_spec_for_backend(layer(shape.layers), LocalSpecProvider())
        parts = mtp.submodules
        parts.enorm = parts.hnorm = parts.layer_norm = ParallelRMSNorm
        block = MultiTokenPredictionBlockSubmodules(layer_specs=[mtp] * blueprint.depths)
    divisor = layout.tensor_model_parallel_size
    return model_class(
        config,
        TransformerBlockSubmodules(
            layer_specs=[layer(n) for n in range(start, start + sizes[stage])], layer_norm=ParallelRMSNorm
        ),
        vocab_size=-(-blueprint.vocab_size // divisor) * divisor,
        max_sequence_length=blueprint.config["max_position_embeddings"],
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=blueprint.tied,
        mtp_block_spec=block,
        vp_stage=virtual_stage if layout.chunks > 1 else None,
        **rotary,
    )


def _settle(chunk: Any, blueprint: Blueprint, mtp: MTPConfig) -> None:
    """What comes after construction."""
    chunk.blueprint = blueprint
    mend_latent_attention(chunk)
    if chunk.mtp_process:
        block = chunk.mtp.layers
        family = blueprint.family
        if family.trunk_hidden == "pre_norm":
            read_before_norm(block[0].hnorm, chunk.decoder.final_layernorm, isolated=mtp.detach_encoder)
        if family.recurrence == "pre_norm":
            for before, after in pairwise(block):
                read_before_norm(after.hnorm, before.final_layernorm, isolated=False)
        depth = chunk.config.mtp_num_layers
        chunk.mtp.layers = torch.nn.ModuleList([block[min(k, len(block) - 1)] for k in range(depth)])
        if blueprint.tied and not chunk.pre_process:
            # The copy of the embedding, which the MTP block needs here, is the LM head, too.
            chunk.output_layer.weight = None
    if torch.cuda.is_available():
        chunk.cuda(torch.cuda.current_device())
