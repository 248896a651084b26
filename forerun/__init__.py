"""Multi-token prediction for LLM post-training: train the MTP block, spend it on lossless speculative rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.models.attach import attach
    from forerun.models.loading import load
    from forerun.mtp.config import MTPConfig
    from forerun.rollout.lossless import check_lossless

__version__ = "0.1.0"
__all__ = ["MTPConfig", "__version__", "attach", "check_lossless", "load"]

_HOMES = {
    "attach": "forerun.models.attach",
    "check_lossless": "forerun.rollout.lossless",
    "load": "forerun.models.loading",
    "MTPConfig": "forerun.mtp.config",
}


def __getattr__(name: str) -> Any:
    # Imported on use: `forerun --version` should not wait for torch.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")
