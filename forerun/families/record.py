"""What a family of MTP-carrying checkpoints looks like, as data.

Every family computes the same thing (forerun.mtp.block); a record says under which names its files hold the parts, in
which order the projection takes them, and which of the trunk's layers the block's decoder layer is a sibling of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from forerun.mtp.block import ConcatOrder, Recurrence

# How files hold a gated mixture of experts that the module holds stacked, [E, 2f, d] and [E, d, f].
GATED_EXPERTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mlp.experts.gate_up_proj", ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight")),
    ("mlp.experts.down_proj", ("mlp.experts.{e}.down_proj.weight",)),
)


@dataclass(frozen=True)
class LayerSource:
    """Which layer of the trunk is copied to make the block's: the last one that fits.

    Attributes:
        has, lacks: submodules that the layer must have and must not have.
        parts: where a trunk layer holds more than the block's: pairs (input_layernorm, self_attn,
            post_attention_layernorm or mlp; its path in the trunk's layer). Empty: the layer as a whole.
    """

    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    parts: tuple[tuple[str, str], ...] = ()

    def fits(self, holds: Callable[[str], bool]) -> bool:
        """Whether a layer is of this kind; `holds` says whether it has a submodule."""
        return all(map(holds, self.has)) and not any(map(holds, self.lacks))


@dataclass(frozen=True)
class Duplicate:
    """A copy of the trunk's embedding or LM head that a family's files hold for the block; shared in meaning.

    Attributes:
        of: which of the two it copies, "embedding" or "head".
        name: its name in the checkpoint, with the placeholders of `FamilyRecord.tensor_names`.
        written: whether a newly attached block writes it. A loaded one writes it if its file had it.
        optional: whether some published files of the family lack it.
    """

    of: str
    name: str
    written: bool
    optional: bool = False


@dataclass(frozen=True)
class FamilyRecord:
    """One family.

    Attributes:
        name: the family's own.
        model_types: values of `model_type` in config.json that belong to it, at its top or in its text_config.
        depth_key: config.json's key for the number of MTP layers, at its top or in its text_config.
        tensor_names: pairs (parameter prefix in `forerun.mtp.MTPLayer`, prefix in the checkpoint); `{k}` is the depth
            counted from 0 and `{layer}` that depth plus the trunk's layers. The longest matching prefix wins. A name
            without placeholder belongs to all depths together.
        concat_order: which half of the projection's input is the hidden.
        namespace: what the names of all MTP tensors begin with, and no others; "" where there is no such thing.
        absent_depth: MTP layers that vLLM takes a checkpoint to have where config.json lacks the key.
        layers: what the block's decoder layer is copied from; several make a chain.
        max_layers: MTP layers that a checkpoint of the family can hold; None is any number.
        trunk_hidden: what the first depth takes of the trunk, the hidden after its final norm (as the LM head does) or
            before it.
        recurrence: what the next depth takes, the hidden after the final norm or before it.
        final_norm: whether a norm follows the decoder layer.
        zero_centred_norm: the trunk's norms multiply by 1 + weight.
        always_masked: the trunk's attention reads its mask even where causality alone would do.
        pieces: stacked parameters that files hold apart: (end of the stacked name, what stands there for expert `{e}`,
            one for each equal part of the expert's rows).
        duplicates: copies of the embedding and the LM head in the files.
        trunk_model_type: the transformers model whose code runs the trunk, where transformers has none under the
            family's own `model_type`.
        architecture: config.json's `architectures` entry, where `trunk_model_type` is set.
        engine_zeroes_position_0: vLLM zeroes the drafter's embedding at position 0; no trainer does.
        engine_rope_offset: what vLLM adds to the hidden's position at depth 1. (transformers adds 1. Within a document
            plain RoPE gives the same values.)
        engine_recurrence: what vLLM hands on when it drafts further than one token, where that is not `recurrence`.
            (Its default runner drafts all of them with the first MTP layer, however many there are.)
        source: where these facts were read.
    """

    name: str
    model_types: tuple[str, ...]
    depth_key: str
    tensor_names: tuple[tuple[str, str], ...]
    concat_order: ConcatOrder
    namespace: str = ""
    absent_depth: int = 0
    layers: tuple[LayerSource, ...] = (LayerSource(),)
    max_layers: int | None = None
    trunk_hidden: Literal["post_norm", "pre_norm"] = "post_norm"
    recurrence: Recurrence = "post_norm"
    final_norm: bool = True
    zero_centred_norm: bool = False
    always_masked: bool = False
    pieces: tuple[tuple[str, tuple[str, ...]], ...] = GATED_EXPERTS
    duplicates: tuple[Duplicate, ...] = ()
    trunk_model_type: str | None = None
    architecture: str | None = None
    engine_zeroes_position_0: bool = False
    engine_rope_offset: int = 0
    engine_recurrence: Recurrence | None = None
    source: str = ""

    def tensor_name(self, k: int, parameter: str, trunk_layers: int = 0) -> str:
        """The checkpoint's name for a parameter of the MTP layer at depth k + 1 over a trunk of `trunk_layers` layers.

        Raises:
            KeyError: no prefix covers it; a live parameter must never be skipped.
        """
        for ours, theirs in sorted(self.tensor_names, key=lambda pair: -len(pair[0])):
            if parameter.startswith(ours):
                return theirs.format(k=k, layer=trunk_layers + k) + parameter[len(ours) :]
        raise KeyError(f"family {self.name!r} has no name for the MTP parameter {parameter!r}")

    def shared_between_depths(self, child: str) -> bool:
        """Whether a child of `forerun.mtp.MTPLayer` ("proj", ...) is one module for all depths."""
        return any(ours == f"{child}." and "{" not in theirs for ours, theirs in self.tensor_names)

    def prefixes(self, k: int, trunk_layers: int = 0, of: str = "") -> tuple[str, ...]:
        """What the checkpoint's names of the MTP layer at depth k + 1 begin with; `of` it all, or of a child."""
        return tuple(
            theirs.format(k=k, layer=trunk_layers + k) for ours, theirs in self.tensor_names if ours.startswith(of)
        )

    def owns(self, name: str, depth: int, trunk_layers: int = 0) -> bool:
        """Whether a checkpoint's tensor belongs to its MTP layers, of which there are `depth`."""
        if self.namespace and name.startswith(self.namespace):
            return True
        return any(name.startswith(self.prefixes(k, trunk_layers)) for k in range(depth))

    def duplicate_name(self, duplicate: Duplicate, k: int, trunk_layers: int = 0) -> str:
        """The checkpoint's name for depth k + 1's copy of the embedding or the LM head."""
        return duplicate.name.format(k=k, layer=trunk_layers + k)

    def piece_names(self, stored_name: str, experts: int) -> list[list[str]] | None:
        """Per expert the names of its parts in order, where files hold `stored_name` apart; None where they do not."""
        for end, parts in self.pieces:
            if stored_name.endswith(end):
                start = stored_name.removesuffix(end)
                return [[start + part.format(e=e) for part in parts] for e in range(experts)]
        return None
