"""What multi-token prediction is: configuration, shifts, block, losses, graft, statistics. Imports torch only."""

from forerun.mtp.block import MTPBlock, MTPLayer
from forerun.mtp.config import MTPConfig
from forerun.mtp.graft import graft
from forerun.mtp.log_probs import chunked_log_probs
from forerun.mtp.losses import LossSpec, fused_loss
from forerun.mtp.shift import depth_counts, depth_targets, document_ids, document_ids_from_cu_seqlens
from forerun.mtp.stats import MTPStats, reduce_counts

__all__ = [
    "LossSpec",
    "MTPBlock",
    "MTPConfig",
    "MTPLayer",
    "MTPStats",
    "chunked_log_probs",
    "depth_counts",
    "depth_targets",
    "document_ids",
    "document_ids_from_cu_seqlens",
    "fused_loss",
    "graft",
    "reduce_counts",
]
