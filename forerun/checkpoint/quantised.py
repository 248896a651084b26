"""A quantised trunk and its MTP block: whether config.json tells loaders the truth about which of the two is quantised.

A loader takes every linear layer for quantised unless `quantization_config` exempts it. An unquantised MTP block that
is not exempted is looked for under names that are not there, stays uninitialised, and no draft is ever accepted.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any

from forerun.checkpoint.block_names import matrix_of, unpacks
from forerun.checkpoint.contents import Stored, listed
from forerun.checkpoint.files import shown
from forerun.checkpoint.findings import Inspection
from forerun.checkpoint.reader import TensorHeader
from forerun.checkpoint.trunk import FLOATS
from forerun.families import text_section

# What quantisation methods call the list of modules that they leave alone.
_EXEMPTIONS = (
    *("modules_to_not_convert", "ignore", "ignored_layers"),
    *("exclude", "exclude_modules", "llm_int8_skip_modules"),
)


def compare_quantisation(
    config: Mapping[str, Any],
    trunk: Mapping[str, Stored],
    block: Mapping[str, Stored],
    inspection: Inspection,
) -> None:
    """Report an MTP block that is quantised otherwise than config.json makes loaders believe.

    Args:
        config: config.json.
        trunk: name -> tensor, of everything that is not the block's.
        block: the block's, as in `forerun.checkpoint.inspect.Examined.stored`.
        inspection: gets the problems.
    """
    settings = quantisation_settings(config)
    # What the trunk quantises under a module's name, the loader takes for quantised in the block too. Published blocks
    # leave their own projection unquantised, and engines know that.
    quantised = {_module(name) for name, tensor in trunk.items() if _is_quantised(name, tensor.header)}
    packed = [tensor.name for tensor in block.values() if _is_quantised(tensor.name, tensor.header)]
    plain = [
        name
        for name, tensor in block.items()
        if tensor.name.endswith(".weight") and tensor.header.dtype in FLOATS and _module(name) in quantised
    ]
    if packed and settings is None:
        inspection.report(
            "quantisation",
            f"{listed(sorted(packed))} of the MTP block are quantised and config.json has no quantization_config",
            "restore the quantization_config of the checkpoint that was quantised",
            sorted(packed),
        )
    if settings is None or not plain:
        return
    patterns = list(_patterns(settings))
    uncovered = sorted(name for name in plain if not any(_exempts(p, name.removesuffix(".weight")) for p in patterns))
    if uncovered:
        inspection.report(
            "quantisation",
            f"the trunk is quantised, {listed(uncovered)} of the MTP block are not, and quantization_config does not "
            "exempt them: engines look for quantised ones, skip these, and never accept a draft",
            f"add {shown(uncovered[0].removesuffix('.weight'))} and its like to quantization_config."
            f"{next((key for key in _EXEMPTIONS if key in settings), _EXEMPTIONS[0])}, or quantise the block too",
            uncovered,
        )
    else:
        inspection.notes.append("the trunk is quantised and the MTP block is not, as quantization_config says")


def quantisation_settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What config.json says of how weights are quantised; None: nothing."""
    for section in (config, text_section(config)):
        for key in ("quantization_config", "compression_config"):
            if isinstance(section.get(key), dict):
                found: Mapping[str, Any] = section[key]
                return found
    return None


def _is_quantised(name: str, header: TensorHeader) -> bool:
    return matrix_of(name) is not None or unpacks(name) or (name.endswith(".weight") and header.dtype not in FLOATS)


def _module(name: str) -> str:
    """The last part of the module's path: q_proj, gate_proj, ..."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _patterns(settings: Mapping[str, Any]) -> Iterator[str]:
    for key in _EXEMPTIONS:
        value = settings.get(key)
        if isinstance(value, list):
            yield from (pattern for pattern in value if isinstance(pattern, str) and pattern)


def _exempts(pattern: str, module: str) -> bool:
    """Whether an exemption covers a module: the same name, a parent, a part of its path, or a regular expression."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except (re.error, RecursionError):
            return False
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern.strip('.')}." in f".{module}." or module.startswith(pattern)
