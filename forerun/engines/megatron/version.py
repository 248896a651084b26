"""What differs between the megatron-core versions that Forerun drives: 0.16 (the newest for Python 3.11) and 0.19.

Nothing else here looks at the version. Importing this module needs no megatron-core.
"""

from __future__ import annotations

from importlib import metadata

from forerun.errors import UsageError

# (major, minor) that the parity tests run with; those between have not been tried.
TESTED = ((0, 16), (0, 19))


def megatron_version() -> tuple[int, int]:
    """(major, minor) of the megatron-core that is installed.

    Raises:
        UsageError: there is none, or one that is too old.
    """
    try:
        parts = metadata.version("megatron-core").split(".")
    except metadata.PackageNotFoundError:
        raise UsageError(
            "engine.strategy=megatron needs megatron-core: pip install 'forerun[megatron]', or set "
            "engine.strategy=torch"
        ) from None
    version = int(parts[0]), int(parts[1])
    if version < TESTED[0]:
        raise UsageError(f"megatron-core {version[0]}.{version[1]} is too old: install 0.16 or 0.19")
    return version


def inner_layer_name() -> str:
    """The attribute of a MultiTokenPredictionLayer, and the part of its weights' names, that is its decoder layer."""
    return "transformer_layer" if megatron_version() < (0, 18) else "mtp_model_layer"


def check_recompute(granularity: str | None) -> None:
    """Refuse full recompute of the MTP block where megatron-core hands its layer the arguments in the wrong order.

    Between 0.17 and 0.18 the recomputed layer takes them by position, and a padding mask that was added to one of the
    two signatures shifts those after it.

    Raises:
        UsageError
    """
    version = megatron_version()
    if granularity == "full" and TESTED[0] < version < TESTED[1]:
        raise UsageError(
            f"megatron-core {version[0]}.{version[1]} recomputes its MTP block with arguments in the wrong order: set "
            "engine.megatron.recompute_granularity=selective, or install megatron-core 0.16 or 0.19"
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
