"""Which names of a checkpoint belong to its MTP block, and which tensors, of which shapes, the block should have.

Everything is read off the family's record, config.json, and the headers of the trunk's layers: the block's decoder
layer is a sibling of one of them, so it has the same tensors in the same shapes. No model is built.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import partial

from forerun.checkpoint.trunk import Layer, TrunkHeaders
from forerun.families import FamilyRecord, LayerSource

# A quantised matrix W has other names than W.weight: its packed form, and what unpacks it.
_PACKED = (".qweight", ".weight_packed")
_UNPACKING = (
    *(".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
    *(".scales", ".qzeros", ".g_idx", ".input_scale", ".output_scale"),
)

# Dtypes in which several weights may lie in one element, so that a shape says nothing.
PACKED_DTYPES = frozenset({"F4", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"})

Shape = tuple[int, ...] | None
"""A shape, or None where nothing implies one."""


def matrix_of(name: str) -> str | None:
    """The weight that a tensor of a quantised checkpoint packs ("x.qweight" -> "x.weight"); None for any other."""
    for ending in _PACKED:
        if name.endswith(ending):
            return name.removesuffix(ending) + ".weight"
    return None


def unpacks(name: str) -> bool:
    """Whether it is a scale, a zero point or the like of a quantised weight."""
    return name.endswith(_UNPACKING)


class BlockNames:
    """The names of a family's MTP block over a trunk of `trunk_layers` layers."""

    def __init__(self, record: FamilyRecord, trunk_layers: int) -> None:
        self.record = record
        self.trunk_layers = trunk_layers
        templates = [theirs for _, theirs in record.tensor_names] + [copy.name for copy in record.duplicates]
        self._by_depth = _any_of(t for t in templates if "{k}" in t)
        self._by_layer = _any_of(t for t in templates if "{layer}" in t)
        self._shared = tuple(t for t in [*templates, record.namespace] if t and "{" not in t)

    def depth_of(self, name: str) -> int | None:
        """The depth, from 0, whose layer a name belongs to; 0 for what all depths share; None for any other tensor."""
        if found := self._by_depth.match(name):
            return int(found[found.lastindex or 1])
        if (found := self._by_layer.match(name)) and (k := int(found[found.lastindex or 1]) - self.trunk_layers) >= 0:
            return k
        return 0 if name.startswith(self._shared) else None

    def name(self, k: int, parameter: str) -> str:
        """See `FamilyRecord.tensor_name`."""
        return self.record.tensor_name(k, parameter, self.trunk_layers)

    def core(self, k: int, hidden_size: int | None) -> dict[str, Shape]:
        """Name -> shape of the norms and the projection of depth k + 1."""
        norm, proj = (None, None) if hidden_size is None else ((hidden_size,), (hidden_size, 2 * hidden_size))
        wanted = {"embed_norm.weight": norm, "hidden_norm.weight": norm, "proj.weight": proj}
        if self.record.final_norm:
            wanted["final_norm.weight"] = norm
        return {self.name(k, parameter): shape for parameter, shape in wanted.items()}

    def decoder(self, k: int, trunk: TrunkHeaders, found: Collection[str]) -> dict[str, Shape]:
        """Name -> shape of the decoder layer of depth k + 1, by the trunk's layers; {} if none of them is like it.

        Args:
            k: the depth, from 0.
            trunk: the trunk's headers.
            found: the names that the files hold, which say whether experts lie stacked or apart.
        """
        wanted: dict[str, Shape] = {}
        for index, source in enumerate(self.record.layers):
            chain = f"{index}." if len(self.record.layers) > 1 else ""
            layer = _sibling(trunk, source)
            for inside, shape in _as_stored_shapes(layer).items():
                if (place := _place(source, inside)) is not None:
                    wanted[self.name(k, f"decoder.{chain}{place}")] = shape
        for end, parts in self.record.pieces:
            wanted = _experts_as_found(wanted, found, end, parts)
        return wanted

    def duplicates(self, k: int) -> dict[str, tuple[str, bool]]:
        """Name -> (what it copies: "embedding" or "head", whether the family's files always hold it) at depth k + 1."""
        return {
            self.record.duplicate_name(copy, k, self.trunk_layers): (copy.of, not copy.optional)
            for copy in self.record.duplicates
        }


def _any_of(templates: Iterable[str]) -> re.Pattern[str]:
    patterns = [re.sub(r"\\{(k|layer)\\}", r"(\\d{1,5})", re.escape(template)) for template in templates]
    return re.compile("|".join(patterns) or r"(?!)")


def _sibling(trunk: TrunkHeaders, source: LayerSource) -> Layer:
    """The trunk's last layer of the kind that the block's layer is copied from; {} without one."""
    for _, layer in sorted(trunk.layers.items(), reverse=True):
        if source.fits(partial(_has, layer)):
            return layer
    return {}


def _has(layer: Layer, path: str) -> bool:
    return any(name == path or name.startswith(f"{path}.") for name in layer)


def _place(source: LayerSource, name: str) -> str | None:
    """Where a tensor of the trunk's layer stands in the block's; None for one that the block's layer does not have."""
    if not source.parts:
        return name
    for ours, theirs in source.parts:
        if name.startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    return None


def _as_stored_shapes(layer: Layer) -> dict[str, Shape]:
    """The layer's weights; quantised matrices under the names of unquantised ones, and without shape."""
    shapes: dict[str, Shape] = {}
    for name, header in layer.items():
        if unpacks(name):
            continue
        matrix = matrix_of(name)
        shapes[matrix or name] = None if matrix is not None or header.dtype in PACKED_DTYPES else header.shape
    return shapes


def _experts_as_found(
    wanted: dict[str, Shape], found: Collection[str], end: str, parts: tuple[str, ...]
) -> dict[str, Shape]:
    """`wanted` with experts stacked or apart as the block's own files have them, if the trunk's are the other way."""
    piece = re.compile("|".join(re.escape(part).replace(r"\{e\}", r"(\d{1,6})") for part in parts) + r"\Z")
    result: dict[str, Shape] = {}
    for name, shape in wanted.items():
        if name.endswith(end):  # stacked in the trunk
            start = name.removesuffix(end)
            apart = any(other.startswith(start + parts[0].split("{e}")[0]) for other in found)
            if name in found or not apart or not shape:
                result[name] = shape
                continue
            rows = shape[1] // len(parts)
            result |= {start + part.format(e=e): (rows, *shape[2:]) for e in range(shape[0]) for part in parts}
        elif (match := piece.search(name)) and (stacked := name[: match.start()] + end) in found:
            before = result.get(stacked)
            experts = max(int(match[match.lastindex or 1]) + 1, before[0] if before else 0)
            result[stacked] = None if shape is None else (experts, shape[0] * len(parts), *shape[1:])
        else:
            result[name] = shape
    return result
