"""What differs between the megatron-core versions that Forerun drives: 0.16 (the newest for Python 3.11) and 0.19.

Nothing else here looks at the version. Importing this module needs no megatron-core.
"""

from __future__ import annotations

import functools
from importlib import metadata

from forerun.errors import UsageError

# (major, minor) that the parity tests run with; those between have not been tried.
TESTED = ((0, 16), (0, 19))


@functools.cache  # reading it takes longer than copying most weights
def megatron_version() -> tuple[int, int]:
    """(major, minor) of the megatron-core that is installed.

    Raises:
        UsageError: there is none, or one that is too old.
    """
    version = _installed()
    if version is None:
        raise UsageError(
            "engine.strategy=megatron needs megatron-core: pip install -e '.[megatron]', or set engine.strategy=torch"
        )
    if version < TESTED[0]:
        raise UsageError(f"megatron-core {version[0]}.{version[1]} is too old: install 0.16 or 0.19")
    return version


def _installed() -> tuple[int, int] | None:
    try:
        parts = metadata.version("megatron-core").split(".")
    except metadata.PackageNotFoundError:
        return None
    return int(parts[0]), int(parts[1])


def inner_layer_name() -> str:
    """The attribute of a MultiTokenPredictionLayer, and the part of its weights' names, that is its decoder layer."""
    return "transformer_layer" if megatron_version() < (0, 17) else "mtp_model_layer"


def check_recompute(granularity: str | None) -> None:
    """Refuse full recompute where megatron-core's MTP layer fails in it.

    That is 0.18: the layer hands its own recomputation a padding mask that it does not take.

    Raises:
        UsageError
    """
    if granularity == "full" and _installed() == (0, 18):
        raise UsageError(
            "megatron-core 0.18 cannot recompute its MTP layers (TypeError: padding_mask): set "
            "engine.megatron.recompute_granularity=selective, or install 0.16 or 0.19"
        )


def mend_import_errors() -> None:
    """Give megatron-core 0.16 the names that it expects and does not import without Transformer Engine.

    Its router looks for a kernel under a name that only a successful import defines, and its latent attention asks
    whether a layer is an instance of a class that is None. Nothing is changed where the names are right.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(getattr(multi_latent_attention, "TELinear", object), type):
        multi_latent_attention.HAVE_TE = False
