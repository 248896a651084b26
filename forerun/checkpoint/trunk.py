"""The trunk of a checkpoint as its headers show it: its layers, of which the MTP block's layer is a sibling."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.checkpoint.contents import Stored
from forerun.checkpoint.files import shown
from forerun.checkpoint.findings import Inspection
from forerun.checkpoint.reader import TensorHeader
from forerun.errors import UsageError
from forerun.families import MAX_LAYERS, text_section

_LAYER = re.compile(r"(?P<prefix>(?:.*\.)?layers)\.(?P<index>\d{1,5})\.(?P<rest>.+)")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight", "wte.weight", "word_embeddings.weight")
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

Layer = dict[str, TensorHeader]


@dataclass
class TrunkHeaders:
    """The trunk's part of the files.

    Attributes:
        config: the part of config.json that describes the language model.
        layers: per decoder layer, name inside the layer -> header.
        embedding, head: names of the token embedding and the LM head; None where there is none.
    """

    config: Mapping[str, Any]
    layers: dict[int, Layer] = field(default_factory=dict)
    embedding: str | None = None
    head: str | None = None

    def size(self, key: str) -> int | None:
        """A dimension from the configuration, None if it has none.

        Raises:
            UsageError: it is no positive number.
        """
        value = self.config.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**40:
            raise UsageError(f"config.json has {key}={str(value)[:40]!r}: give a positive whole number")
        return value


def find_trunk(
    config: Mapping[str, Any], stored: Mapping[str, Stored], is_mtp: Callable[[str], bool], inspection: Inspection
) -> TrunkHeaders:
    """The trunk among all tensors; what contradicts config.json about it is reported.

    Args:
        config: config.json, whole.
        stored: every tensor of the files.
        is_mtp: whether a name belongs to the MTP block.
        inspection: gets the problems.

    Raises:
        UsageError: a dimension in config.json is no positive number.
    """
    trunk = TrunkHeaders(text_section(config))
    stacks: dict[str, dict[int, Layer]] = {}
    for name, tensor in stored.items():
        if is_mtp(name):
            continue
        if found := _LAYER.fullmatch(name):
            layers = stacks.setdefault(found["prefix"], {})
            layers.setdefault(int(found["index"]), {})[found["rest"]] = tensor.header
        elif name.endswith(_EMBEDDINGS):
            # A vision tower has embeddings of its own; the language model's lies highest.
            trunk.embedding = min(filter(None, (trunk.embedding, name)), key=lambda n: (n.count("."), n))
        elif name == "lm_head.weight" or name.endswith(".lm_head.weight"):
            trunk.head = name
    # LongCat counts sublayers in num_hidden_layers and what its files call layers in num_layers.
    declared = trunk.size("num_layers") or trunk.size("num_hidden_layers")
    if stacks:
        count = declared or MAX_LAYERS
        # The stack that fills the declared layers best; a vision tower's comes second.
        prefix = max(stacks, key=lambda p: (sum(i < count for i in stacks[p]), -len(p), p))
        trunk.layers = {i: layer for i, layer in stacks[prefix].items() if i < count}
        if declared is not None and len(trunk.layers) < declared:
            inspection.report(
                "trunk_layers_missing",
                f"config.json declares {declared} layers of the trunk, the files hold {len(trunk.layers)}",
                "copy the missing shards, or restore the config.json that was saved with them",
            )
    _check_shapes(trunk, stored, inspection)
    return trunk


def _check_shapes(trunk: TrunkHeaders, stored: Mapping[str, Stored], inspection: Inspection) -> None:
    """Where config.json and the trunk disagree, config.json belongs to another checkpoint."""
    hidden, vocabulary = trunk.size("hidden_size"), trunk.size("vocab_size")
    wrong = []
    for name in (trunk.embedding, trunk.head):
        if name is None or hidden is None or vocabulary is None:
            continue
        header = stored[name].header
        if header.dtype in FLOATS and header.shape != (vocabulary, hidden):
            wrong.append((name, header.shape, (vocabulary, hidden)))
    heads = trunk.size("num_attention_heads")
    key_heads = trunk.size("num_key_value_heads") or heads
    head_size = trunk.size("head_dim") or (hidden // heads if hidden and heads else None)
    if trunk.layers and hidden and key_heads and head_size:
        name = "self_attn.k_proj.weight"
        found = [layer[name] for layer in trunk.layers.values() if name in layer and layer[name].dtype in FLOATS]
        implied = (key_heads * head_size, hidden)
        # Layers may differ among themselves (sliding windows with other head counts): one that fits is enough.
        if found and all(header.shape != implied for header in found):
            wrong.append((name, found[0].shape, implied))
    for name, shape, implied in wrong:
        inspection.report(
            "config_contradicts_trunk",
            f"{shown(name)} of the trunk has shape {list(shape)}, config.json implies {list(implied)}",
            "the two do not belong together: restore the config.json that was saved with these weights",
            [name],
        )
