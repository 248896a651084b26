"""Export a head attached to a Llama-like trunk in a layout that a serving engine drafts with.

No engine knows an attached head (`forerun.families.ATTACHED`), but its layout is MiMo's, and vLLM serves MiMo with
speculative method mtp. MiMo's trunk is Qwen2's, which is Llama's with biases on the query, key and value projections;
where a trunk has none, zeros say the same. So the export adds zeros, writes another config.json, and changes no weight
unless it is asked to fold the final norm. What would not compute the same there is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from forerun.checkpoint.reader import CheckpointReader
from forerun.checkpoint.shards import SHARD_BYTES, new_directory, write_checkpoint
from forerun.checkpoint.tied import refuse_second_head
from forerun.errors import UsageError, one_line
from forerun.families import FamilyRecord, family_of, present_depth
from forerun.families.megatron import refuse_megatron_names
from forerun.families.serving import TARGETS, Target

_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_UNREAD = ".rotary_emb.inv_freq"  # a buffer in old files that every reader computes itself
# Not the recurrence: it says how tokens after the first are drafted, and a draft may be worse without being wrong.
_SAME_FORMULA = ("concat_order", "trunk_hidden", "final_norm", "zero_centred_norm")
# Settings that change what a trunk computes, with the value that leaves it as it is.
_NEUTRAL = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
# Tensors that a Llama-like layout has no place for, and what they say of the checkpoint.
_FOREIGN = {
    r"\.self_attn\.[qk]_norm\.": "normalises queries and keys",
    r"\.experts\.|\.router\.|\.mlp\.gate\.weight": "is a mixture of experts",
    r"\.o_proj\.bias$": "has a bias on its attention's output",
    r"\.mlp\..*\.bias$": "has biases in its MLP",
    r"^lm_head\.bias$": "has a bias on its LM head",
    r"_scale(_inv)?$|\.qweight$|\.qzeros$|\.g_idx$": "is quantised",
}


def export(
    source: str | Path,
    out: str | Path,
    to: str = "mimo",
    *,
    fold_norm: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint with an attached MTP block as one that a serving engine drafts with.

    Tensors are read and written one shard at a time. Tokenizer, chat template and generation config go along; tied
    embeddings stay tied. The directory appears whole or not at all.

    Args:
        source: a Hugging Face directory whose block `forerun.attach` made.
        out: the directory to write; it must not exist, or be empty.
        to: one of `forerun.families.serving.TARGETS`.
        fold_norm: multiply the weight of the trunk's final norm into the LM head (which is then untied, and rounded
            once more) and divide the block's final norm by it. With that norm at 1 the hidden before it and after it
            are the same to the block, so engines that hand on either draft alike, and tokens after the first as well.
        shard_bytes: the most that a file holds.

    Raises:
        UsageError: no such target; `out` is taken; or the source does not compute what the target's layout would. The
            line says why; nothing is written.
    """
    if to not in TARGETS:
        raise UsageError(f"cannot convert to {to!r}: choose one of {', '.join(sorted(TARGETS))}")
    target, out = TARGETS[to], new_directory(out)
    reader = CheckpointReader(source)
    refuse_megatron_names(source, reader.tensor_names)
    family = family_of(reader.config)
    depth = present_depth(family, reader.config, reader.tensor_names)
    if depth == 0:
        raise UsageError(f"{source} carries no MTP block: attach one with forerun.attach and train it first")
    refuse_second_head(reader)
    try:
        _check_family(family, target, reader)
        own = _source_config(reader)
        _check_values(own, target)
        rope = _rope_parameters(own, target)
        _check_formula(reader, target)
        config = _target_config(own, rope, target, depth)
        carried = _carried(reader, config)
        biases = _missing_biases(_expected(target, config, depth), carried)
        tensors = _tensors(reader, carried, biases)
        if fold_norm:
            tensors = _folded(tensors, reader, target, config, depth)
    except _Unfit as error:
        raise UsageError(f"{source} cannot be served as {to}: {error}") from None
    code = Path(__file__).with_name(target.code[0])
    write_checkpoint(out, tensors, config, reader.path, [code], shard_bytes)


class _Unfit(Exception):
    """Why the source does not fit the target."""


def _check_family(family: FamilyRecord, target: Target, reader: CheckpointReader) -> None:
    if family.name == target.family.name:
        raise _Unfit("it is in that layout already")
    if reader.config.get("auto_map"):
        raise _Unfit("it brings Python code of its own, which says what its trunk computes")
    if family.tensor_names != target.family.tensor_names:
        raise _Unfit(f"it is of family {family.name}, which engines serve in a layout of its own")
    for field in _SAME_FORMULA:
        ours, theirs = getattr(family, field), getattr(target.family, field)
        if ours != theirs:
            raise _Unfit(f"the block of family {family.name} was trained with {field}={ours}, that layout has {theirs}")


def _source_config(reader: CheckpointReader) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(reader.path)
    except Exception as error:  # a wrong value in config.json ends in whatever transformers makes of it
        raise _Unfit(f"transformers cannot read its config.json ({one_line(error):.200})") from error


def _target_config(source: PreTrainedConfig, rope: dict[str, Any], target: Target, depth: int) -> dict[str, Any]:
    """The target's config.json."""
    layers = source.num_hidden_layers
    carried = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act"),
        *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
    # As config.json writes it: the dtype by its name.
    written = source.to_dict()
    return {name: written.get(name) for name in (*carried, "dtype", "transformers_version")} | {
        "architectures": [target.family.architecture],
        "auto_map": {"AutoConfig": f"{target.code[0].removesuffix('.py')}.{target.code[1]}"},
        "layer_types": ["full_attention"] * layers,
        "max_window_layers": layers,
        "model_type": target.family.model_types[0],
        "rope_parameters": rope,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
        target.family.depth_key: depth,
    }


def _check_values(source: PreTrainedConfig, target: Target) -> None:
    if source.get_text_config() is not source:
        raise _Unfit("it is multimodal, that layout is text alone")
    head_dim, heads = getattr(source, "head_dim", None), getattr(source, "num_attention_heads", None)
    if head_dim is not None and heads and head_dim * heads != source.hidden_size:
        raise _Unfit(
            f"its head_dim is {head_dim}, that layout has hidden_size / heads = {source.hidden_size} / {heads}"
        )
    kinds = set(getattr(source, "layer_types", None) or ()) - {"full_attention"}
    if kinds or (getattr(source, "sliding_window", None) and getattr(source, "use_sliding_window", True)):
        raise _Unfit(f"its attention is not full in every layer ({', '.join(sorted(kinds)) or 'sliding_window'})")
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(source, name, neutral)) not in (neutral, None):
            raise _Unfit(f"its trunk computes with {name}={value}, which that layout has no place for")
    activation = getattr(source, "hidden_act", None)
    if activation is not None and activation != target.activation:
        raise _Unfit(f"its activation is {activation}, that layout has {target.activation}")


def _rope_parameters(source: PreTrainedConfig, target: Target) -> dict[str, Any]:
    given = dict(getattr(source, "rope_parameters", None) or {})
    kind, known = given.get("rope_type", "default"), dict(target.rope_keys)
    if kind not in known:
        raise _Unfit(f"its rope type is {kind}, engines have {', '.join(known)} for that layout")
    if given.get("partial_rotary_factor") == 1.0:
        del given["partial_rotary_factor"]
    given = {key: value for key, value in given.items() if value is not None}
    if foreign := sorted(given.keys() - {"rope_type", "rope_theta", *known[kind]}):
        raise _Unfit(
            f"its rope parameters of type {kind} hold {foreign[0]}={given[foreign[0]]}, which engines do not read"
        )
    if "original_max_position_embeddings" in known[kind]:
        given.setdefault("original_max_position_embeddings", source.max_position_embeddings)
    return {"rope_type": kind} | given


def _carried(reader: CheckpointReader, config: dict[str, Any]) -> set[str]:
    """The names to carry over; not those of a head that tied embeddings make unused."""
    tied = {_HEAD} if config["tie_word_embeddings"] else set()
    return {name for name in reader.tensor_names if not name.endswith(_UNREAD)} - tied


def _expected(target: Target, config: dict[str, Any], depth: int) -> set[str]:
    """Every name of the target's files."""
    record, layers = target.family, range(config["num_hidden_layers"])
    parts = [f"{name}.weight" for name, _ in target.projections]
    parts += [f"{name}.bias" for name, has_bias in target.projections if has_bias]
    parts += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names = {_EMBEDDING, _NORM} | (set() if config["tie_word_embeddings"] else {_HEAD})
    names |= {f"model.layers.{layer}.{part}" for layer in layers for part in parts}
    block = [f"decoder.{part}" for part in parts]
    block += ["hidden_norm.weight", "embed_norm.weight", "proj.weight", "final_norm.weight"]
    return names | {record.tensor_name(k, part, len(layers)) for k in range(depth) for part in block}


def _check_formula(reader: CheckpointReader, target: Target) -> None:
    for pattern, meaning in _FOREIGN.items():
        if found := sorted(name for name in reader.tensor_names if re.search(pattern, name)):
            raise _Unfit(f"it {meaning} ({found[0]}), which that layout has no place for")
    model_type = reader.config.get("model_type")
    if model_type not in target.trunks:
        raise _Unfit(f"its trunk is of model_type {model_type}, that layout computes what {_listed(target.trunks)} do")


def _missing_biases(expected: set[str], carried: set[str]) -> set[str]:
    """The biases that the target has and the source has not; nothing else may be missing or left over."""
    if foreign := sorted(carried - expected):
        raise _Unfit(f"it holds {len(foreign)} tensors that the layout has no place for, first {foreign[0]}")
    biases = {name for name in expected - carried if name.endswith(".bias")}
    if missing := sorted(expected - carried - biases):
        raise _Unfit(f"it lacks {len(missing)} tensors, first {missing[0]}: restore them")
    return biases


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _tensors(reader: CheckpointReader, names: set[str], biases: set[str]) -> Iterator[tuple[str, Tensor]]:
    """The source's tensors in the order of its files; beside a weight that lacks its bias, that bias in zeros."""
    for name in sorted(names, key=lambda name: (reader.file_of(name), name)):
        tensor = reader.tensor(name)
        yield name, tensor
        bias = f"{name.removesuffix('.weight')}.bias"
        if bias in biases:
            yield bias, torch.zeros(len(tensor), dtype=tensor.dtype)


def _folded(
    tensors: Iterator[tuple[str, Tensor]], reader: CheckpointReader, target: Target, config: dict[str, Any], depth: int
) -> Iterator[tuple[str, Tensor]]:
    """The tensors with the trunk's final norm moved into the LM head; `config` is untied to match."""
    scale = reader.tensor(_NORM).float()
    if scale.shape != (config["hidden_size"],):
        raise _Unfit(f"{_NORM} has shape {tuple(scale.shape)}, config.json says hidden_size={config['hidden_size']}")
    if not bool(scale.all()):
        raise _Unfit(f"{_NORM} has a zero, which cannot be divided out of the block's norm: leave --fold-norm out")
    tied, config["tie_word_embeddings"] = config["tie_word_embeddings"], False
    block_norms = {target.family.tensor_name(k, "final_norm.weight", config["num_hidden_layers"]) for k in range(depth)}

    def change() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name == _NORM:
                yield name, torch.ones_like(tensor)
            elif name in block_norms:
                yield name, (tensor.float() / scale).to(tensor.dtype)
            elif name == _HEAD:
                yield name, (tensor.float() * scale).to(tensor.dtype)
            else:
                yield name, tensor
            if tied and name == _EMBEDDING:
                yield _HEAD, (tensor.float() * scale).to(tensor.dtype)

    return change()
