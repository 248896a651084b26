"""MTP tensors under names where no loader of their family looks: wrapped, nested, doubled, another family's.

Such a block loads without a word and stays at random values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from forerun.checkpoint.block_names import BlockNames
from forerun.checkpoint.contents import Stored, listed
from forerun.checkpoint.files import shown
from forerun.checkpoint.findings import Inspection, TensorRow

# What MTP tensors are called in one family or another.
LOOKS_LIKE_MTP = re.compile(r"(?<![^.])(?:mtp(?:_\w+)?|nextn\w*|eh_proj|enorm|hnorm)\.")

# Pieces that training wrappers leave in names: DDP, FSDP, activation checkpointing, torch.compile.
_WRAPPERS = re.compile(r"(?<![^.])(?:module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")

_RENAME = "rename them, or save the model again (unwrapped, with forerun): as they are they are left at random values"


def unwrapped(held: Mapping[str, Stored], inspection: Inspection) -> dict[str, Stored]:
    """The tensors without what training wrappers leave in their names, which is reported."""
    stored = {}
    wrapped, twice = [], []
    for name, tensor in held.items():
        clean = _WRAPPERS.sub("", name)
        if clean != name:
            wrapped.append(name)
            if clean in held:
                twice.append(name)
                continue
        stored[clean] = tensor
    if wrapped:
        inspection.report(
            "prefixed",
            f"{listed(sorted(wrapped))} carry the name of a training wrapper (module., _orig_mod., ...)",
            _RENAME,
            sorted(wrapped),
        )
    _report_second_names(sorted(twice), inspection)
    return stored


def find_nested(names: BlockNames, depth: int, stored: Mapping[str, Stored], inspection: Inspection) -> dict[str, str]:
    """Name in the files -> the family's name, of MTP tensors under a prefix that the family does not have.

    Args:
        names: the family's.
        depth: number of MTP layers to look for.
        stored: every tensor.
        inspection: gets the problems.
    """
    # What follows "model." may lie under "model.language_model." or "language_model.model.", or without any.
    ends = {name.removeprefix("model."): name for k in range(depth) for name in names.core(k, None)}
    prefixes: dict[str, str] = {}
    for name in stored:
        for end, right in ends.items():
            before = name.removesuffix(end)
            if before != name and (not before or before.endswith(".")) and names.depth_of(name) is None:
                prefixes[before] = right.removesuffix(end)
    aliases = {}
    for before, right in prefixes.items():
        for name in stored:
            if name.startswith(before) and names.depth_of(name) is None:
                clean = right + name.removeprefix(before)
                if names.depth_of(clean) is not None:
                    aliases[name] = clean
    twice = sorted(name for name, clean in aliases.items() if clean in stored)
    _report_second_names(twice, inspection)
    if nested := sorted(aliases.keys() - set(twice)):
        inspection.report(
            "prefixed",
            f"{listed(nested)} lie under a prefix where loaders of family {names.record.name} do not look: they should "
            f"be {shown(aliases[nested[0]])} and so on",
            _RENAME,
            nested,
        )
    return aliases


def _report_second_names(names: list[str], inspection: Inspection) -> None:
    if names:
        inspection.report(
            "duplicated",
            f"{listed(names)} are second names of tensors that are there under their right names",
            "remove those under the second names",
            names,
        )


def report_strangers(
    names: BlockNames, stored: Mapping[str, Stored], is_mtp: Callable[[str], bool], inspection: Inspection
) -> None:
    """Tensors that are called like MTP ones and that no loader of this family would take for such."""
    strangers = sorted(name for name in stored if LOOKS_LIKE_MTP.search(name) and not is_mtp(name))
    for name in strangers:
        tensor = stored[name]
        inspection.tensors[name] = TensorRow(
            name, tensor.files[0], tensor.header.shape, tensor.header.dtype, states=["unknown"]
        )
    if strangers:
        inspection.report(
            "unknown",
            f"{listed(strangers)} are called like MTP tensors, but family {names.record.name} calls its own "
            f"{shown(names.name(0, 'proj.weight'))} and so on: loaders leave the block at random values",
            "rename them to the family's names, or give config.json the model_type that they belong to",
            strangers,
        )
