"""MTP-carrying checkpoints made without Forerun: a trunk as transformers saves it, and MTP tensors under the names that
the family's own files have, written down here by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families.tiny import tiny_trunk

# Where a family's file has the parts of the formula: norm of the embedding, norm of the hidden, projection, final norm.
_NEXTN = (
    "model.layers.2.enorm.weight",
    "model.layers.2.hnorm.weight",
    "model.layers.2.eh_proj.weight",
    "model.layers.2.shared_head.norm.weight",
)
_MTP = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight", "mtp.norm.weight")
_MIMO = tuple(
    f"model.mtp_layers.0.{name}.weight"
    for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
)
_ERNIE = (
    "model.mtp_emb_norm.0.weight",
    "model.mtp_hidden_norm.0.weight",
    "model.mtp_linear_proj.0.weight",
    None,
)
PARTS: dict[str, tuple[str | None, ...]] = {
    "deepseek_v3": _NEXTN,
    "deepseek_v32": _NEXTN,
    "glm4_moe": _NEXTN,
    "glm_moe_dsa": _NEXTN,
    "qwen3_next": _MTP,
    "qwen3_5": _MTP,
    "qwen3_5_text": _MTP,
    "qwen3_5_moe": _MTP,
    "qwen3_5_moe_text": _MTP,
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": _ERNIE,
    "longcat_flash": (
        "model.mtp.layers.0.enorm.m.weight",
        "model.mtp.layers.0.hnorm.m.weight",
        "model.mtp.layers.0.eh_proj.weight",
        "model.mtp.norm.weight",
    ),
    "nemotron_h": (
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.hnorm.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.1.final_layernorm.weight",
    ),
    "mimo": _MIMO,
    "attached": _MIMO,
    "attached_moe": _MIMO,
    "attached_gemma": _MIMO,
}

# The decoder layer's names: (a trunk layer of the same kind in transformers' file, the MTP layer in the family's).
_LAST = ((r"model\.layers\.1\.", "model.layers.2."),)
DECODER: dict[str, tuple[tuple[str, str], ...]] = {
    "deepseek_v3": _LAST,
    "deepseek_v32": _LAST,
    "glm4_moe": _LAST,
    "glm_moe_dsa": _LAST,
    "qwen3_next": ((r"model\.layers\.0\.", "mtp.layers.0."),),
    "qwen3_5": ((r"model\.language_model\.layers\.0\.", "mtp.layers.0."),),
    "qwen3_5_text": ((r"model\.layers\.0\.", "mtp.layers.0."),),
    "qwen3_5_moe": ((r"model\.language_model\.layers\.0\.", "mtp.layers.0."),),
    "qwen3_5_moe_text": ((r"model\.layers\.0\.", "mtp.layers.0."),),
    "ernie4_5": ((r"model\.layers\.1\.", "model.mtp_block.0."),),
    "ernie4_5_moe": ((r"model\.layers\.0\.", "model.mtp_block.0."),),
    "longcat_flash": (
        (r"model\.layers\.1\.mlps\.1\.", "model.mtp.layers.0.transformer_layer.mlp."),
        (
            r"model\.layers\.1\.(self_attn|input_layernorm|post_attention_layernorm)\.1\.",
            r"model.mtp.layers.0.\1.",
        ),
    ),
    "nemotron_h": (
        (r"(?:model|backbone)\.layers\.1\.", "mtp.layers.0."),
        (r"(?:model|backbone)\.layers\.2\.", "mtp.layers.1."),
    ),
    "mimo": ((r"model\.layers\.1\.", "model.mtp_layers.0."),),
    "attached": ((r"model\.layers\.1\.", "model.mtp_layers.0."),),
    "attached_moe": ((r"model\.layers\.1\.", "model.mtp_layers.0."),),
    "attached_gemma": ((r"model\.layers\.1\.", "model.mtp_layers.0."),),
}
# Copies of the embedding and the LM head in the file.
COPIES: dict[str, tuple[tuple[str, str], ...]] = {
    "deepseek_v3": (
        ("model.layers.2.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.2.shared_head.head.weight", "lm_head.weight"),
    ),
    "deepseek_v32": (("model.layers.2.embed_tokens.weight", "model.embed_tokens.weight"),),  # the head's is omitted
    "longcat_flash": (("model.mtp.embed_tokens.weight", "model.embed_tokens.weight"),),
}
DEPTH_KEY = {name: "mtp_num_hidden_layers" for name in PARTS if name.startswith("qwen3_5")}


def decoder_tensors(name: str, trunk: dict[str, Tensor], seed: int = 7) -> dict[str, Tensor]:
    """Random tensors of an MTP decoder layer, in the shapes of the trunk's layer of that kind."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for stored, tensor in trunk.items():
        for pattern, target in DECODER[name]:
            if re.match(pattern, stored):
                made[re.sub(pattern, target, stored, count=1)] = _random(tensor, generator)
    return made


def mtp_tensors(name: str, trunk: dict[str, Tensor], hidden_size: int = 16, seed: int = 7) -> dict[str, Tensor]:
    """All MTP tensors of one depth, as the family's files hold them."""
    generator = torch.Generator().manual_seed(seed + 1)
    made = decoder_tensors(name, trunk, seed)
    for part in PARTS[name]:
        if part is not None:
            shape = (hidden_size, 2 * hidden_size) if "proj" in part or "fc" in part.split(".") else (hidden_size,)
            made[part] = _random(torch.empty(shape), generator)
    made |= {copy: trunk[of].clone() for copy, of in COPIES.get(name, ())}
    return made


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randn(like.shape, generator=generator) * 0.3).to(like.dtype)


def checkpoint(
    path: Path, name: str, *, shards: int = 1, without: tuple[str, ...] = (), **settings: Any
) -> dict[str, Tensor]:
    """Write a carrier of the family; returns what its files hold. `settings` are of the trunk."""
    tiny_trunk(name, **settings).save_pretrained(path)
    trunk = load_file(path / "model.safetensors")
    tensors = trunk | mtp_tensors(name, trunk)
    tensors = {stored: tensor for stored, tensor in tensors.items() if stored not in without}
    write(path, tensors, shards)
    config = json.loads((path / "config.json").read_text())
    section = config.get("text_config", config)
    section[DEPTH_KEY.get(name, "num_nextn_predict_layers")] = 1
    if name == "mimo":
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    return tensors


def write(path: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """Tensors into one file, or dealt out in turn to several, so that MTP and trunk tensors share each of them."""
    (path / "model.safetensors").unlink(missing_ok=True)
    if shards == 1:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {stored: files[i % shards] for i, stored in enumerate(sorted(tensors))}
    for file in files:
        save_file({s: t for s, t in tensors.items() if where[s] == file}, path / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor of a directory."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def depth_in(path: Path, name: str) -> Any:
    """What config.json declares, where the family has it."""
    config = json.loads((path / "config.json").read_text())
    return config.get("text_config", config)[DEPTH_KEY.get(name, "num_nextn_predict_layers")]
