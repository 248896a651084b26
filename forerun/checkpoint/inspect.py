"""What is wrong with a checkpoint's MTP block, from config.json, the index and the shards' headers alone.

No tensor is read and no model built, so a directory of hundreds of gigabytes takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forerun.checkpoint.block_names import PACKED_DTYPES, BlockNames, Shape, matrix_of, unpacks
from forerun.checkpoint.contents import Stored, gather, listed
from forerun.checkpoint.files import shown
from forerun.checkpoint.findings import Inspection, TensorRow
from forerun.checkpoint.naming import LOOKS_LIKE_MTP, find_nested, report_strangers, unwrapped
from forerun.checkpoint.quantised import compare_quantisation
from forerun.checkpoint.reader import CheckpointReader
from forerun.checkpoint.trunk import TrunkHeaders, find_trunk
from forerun.families import MAX_DEPTH, FamilyRecord, declared_depth, family_of, trunk_layers
from forerun.families.megatron import refuse_megatron_names


@dataclass
class Examined:
    """A checkpoint whose headers were looked at, for whoever looks further.

    Attributes:
        reader: of the checkpoint.
        family: its record.
        names: the block's names.
        trunk: the trunk's headers.
        inspection: the findings.
        trunk_tensors: every tensor that is not the block's, by name without training wrappers.
        stored: name as the family has it -> what the files hold for it, of the block's tensors.
        copies: name as the family has it -> "embedding" or "head", of the block's copies of the trunk's tensors.
    """

    reader: CheckpointReader
    family: FamilyRecord
    names: BlockNames
    trunk: TrunkHeaders
    inspection: Inspection
    trunk_tensors: dict[str, Stored]
    stored: dict[str, Stored] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)


def examine(path: str | Path) -> Examined:
    """Look at everything that headers show.

    Raises:
        UsageError: it cannot be read: no checkpoint, or one of a family that is not supported.
    """
    reader = CheckpointReader(path)
    refuse_megatron_names(reader.path, reader.tensor_names)
    family = family_of(reader.config)
    declared = declared_depth(family, reader.config)
    inspection = Inspection(str(path), family.name, reader.config.get("model_type"), declared or 0, 0)
    held = gather(reader, inspection, LOOKS_LIKE_MTP)
    stored = unwrapped(held, inspection)
    names = BlockNames(family, trunk_layers(reader.config))
    aliases = find_nested(names, declared or 1, stored, inspection)

    def is_mtp(name: str) -> bool:
        return name in aliases or names.depth_of(name) is not None

    trunk = find_trunk(reader.config, stored, is_mtp, inspection)
    rest = {name: tensor for name, tensor in stored.items() if not is_mtp(name)}
    found = Examined(reader, family, names, trunk, inspection, rest)
    block = {aliases[name]: stored[name] for name in aliases}
    block |= {name: tensor for name, tensor in stored.items() if names.depth_of(name) is not None}
    _compare_depths(found, declared, block)
    _compare_tensors(found, block)
    report_strangers(names, stored, is_mtp, inspection)
    _report_written_twice(found, held)
    compare_quantisation(reader.config, rest, found.stored, inspection)
    if inspection.present_depth == 0 and not inspection.declared_depth and inspection.healthy:
        inspection.notes.append("no MTP block; attach one with forerun.attach")
    return found


def _compare_depths(found: Examined, declared: int | None, block: Mapping[str, object]) -> None:
    """The depth that config.json declares against the layers that are there."""
    inspection, key = found.inspection, found.family.depth_key
    depths = sorted({k for name in block if (k := found.names.depth_of(name)) is not None and k < MAX_DEPTH})
    inspection.present_depth = len(depths)
    if declared is None and depths:
        inspection.declared_depth = found.family.absent_depth
        if len(depths) == found.family.absent_depth:
            inspection.notes.append(f"config.json has no {key}; vLLM then takes it to be {len(depths)}, which is right")
            return
    if len(depths) == inspection.declared_depth:
        return
    said = f"config.json declares {key}={declared}" if declared is not None else f"config.json has no {key}"
    if not depths:
        inspection.report(
            "mtp_dropped",
            f"{said} and the files hold no MTP tensors: a save that does not know them drops them without a word, as "
            "transformers' save_pretrained does",
            f"copy the MTP tensors from the checkpoint that was trained (forerun keeps them), or set {key} to 0",
        )
    else:
        inspection.report(
            "depth_mismatch",
            f"{said}, the files hold {len(depths)} MTP layers",
            f"set {key} to {len(depths)}, or restore the missing tensors",
        )


def _compare_tensors(found: Examined, block: dict[str, Stored]) -> None:
    """A row for each tensor of the block: there, missing, of another shape, unknown."""
    inspection, names, trunk = found.inspection, found.names, found.trunk
    if not block and not inspection.declared_depth:
        return
    hidden_size = trunk.size("hidden_size")
    vocabulary = trunk.size("vocab_size")
    table: Shape = (vocabulary, hidden_size) if vocabulary and hidden_size else None
    packed = {matrix: name for name in block if (matrix := matrix_of(name)) is not None}
    depths = {k for name in block if (k := names.depth_of(name)) is not None and k < MAX_DEPTH}
    layers = sorted(depths | set(range(inspection.declared_depth)))
    expected: dict[str, Shape] = {}
    without_sibling = False
    for k in layers:
        expected |= names.core(k, hidden_size)
        decoder = names.decoder(k, trunk, block.keys())
        without_sibling |= not decoder
        expected |= decoder
    optional = {name: copy for k in layers for name, copy in names.duplicates(k).items()}
    if without_sibling:
        inspection.notes.append("the trunk has no layer like the MTP layer's, by which it could be checked")
    missing: list[str] = []
    copies_missing: list[str] = []
    wrong: list[str] = []
    unknown: list[str] = []
    for name, shape in expected.items():
        actual = name if name in block else packed.get(name)
        if actual is None:
            missing.append(name)
            inspection.tensors[name] = TensorRow(name, expected_shape=shape, states=["missing"])
        else:
            _add_row(found, name, block[actual], shape if actual == name else None, wrong)
    for name, (copy_of, always) in optional.items():
        if name in block:
            found.copies[name] = copy_of
            _add_row(found, name, block[name], table, wrong)
        elif always:
            copies_missing.append(name)
            inspection.tensors[name] = TensorRow(name, expected_shape=table, states=["missing"])
    known = expected.keys() | optional.keys()
    for name in sorted(block.keys() - known - {packed[matrix] for matrix in packed.keys() & known}):
        _add_row(found, name, block[name], None, wrong)
        weight = name.rpartition(".")[0] + ".weight"
        accounted = unpacks(name) or name.endswith("norm.bias")
        if not (without_sibling or (accounted and (weight in known or weight in block))):
            inspection.tensors[name].mark("unknown")
            unknown.append(block[name].name)
    if block:  # else the report on the depth says it all
        _report_tensors(found, missing, copies_missing, wrong, unknown)


def _add_row(found: Examined, name: str, tensor: Stored, shape: Shape, wrong: list[str]) -> None:
    row = TensorRow(tensor.name, tensor.files[0], tensor.header.shape, tensor.header.dtype, shape)
    found.inspection.tensors[name] = row
    found.stored[name] = tensor
    if row.name != name and matrix_of(row.name) != name:
        row.mark("prefixed")
    if len(tensor.files) > 1:
        row.mark("duplicated")
    if shape is not None and tensor.header.shape != shape and tensor.header.dtype not in PACKED_DTYPES:
        row.mark("wrong_shape")
        wrong.append(name)


def _report_tensors(
    found: Examined, missing: list[str], copies_missing: list[str], wrong: list[str], unknown: list[str]
) -> None:
    inspection = found.inspection
    if missing:
        inspection.report(
            "missing",
            f"{listed(missing)} of the MTP block are missing: they would stay at random values",
            "copy them from the checkpoint that was trained, under these names",
            missing,
        )
    if copies_missing:
        inspection.report(
            "copy_missing",
            f"{listed(copies_missing)} are missing that files of family {found.family.name} hold, copies of the "
            "trunk's embedding or LM head: engines that do not share the trunk's draft from uninitialised memory",
            "add the copies (save a newly attached block with forerun, or copy the trunk's tensors to these names)",
            copies_missing,
        )
    for name in wrong:
        row = inspection.tensors[name]
        inspection.report(
            "wrong_shape",
            f"{shown(row.name)} has shape {list(row.shape or ())}, config.json and the trunk imply "
            f"{list(row.expected_shape or ())}",
            "the head is another model's: copy the one that was trained on this trunk",
            [row.name],
        )
    if unknown:
        inspection.report(
            "unknown",
            f"{listed(unknown)} among the MTP tensors are none that family {found.family.name} has: loaders skip them",
            "rename them to the family's names (docs/doctor.md), or remove them if another save left them",
            unknown,
        )


def _report_written_twice(found: Examined, held: Mapping[str, Stored]) -> None:
    twice = sorted(name for name, tensor in held.items() if len(tensor.files) > 1)
    if not twice:
        return
    files = held[twice[0]].files
    found.inspection.report(
        "duplicated",
        f"{listed(twice)} lie in more than one shard ({', '.join(map(shown, files))}): which one counts is chance",
        "save the model again so that each tensor is written once",
        twice,
    )
