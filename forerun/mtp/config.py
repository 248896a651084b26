"""One configuration for MTP: the field names and meanings that verl's users have, and a few more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LossKind = Literal["ce", "soft_ce", "tv"]
MaskRule = Literal["target", "span"]
AcceptanceRule = Literal["greedy", "match", "rejection"]


@dataclass
class MTPConfig:
    """How a model's MTP block is built, trained and used for drafting.

    The first block of fields has verl's `MtpConfig` names, defaults and meanings, so settings carry over. `enable`
    keeps the block (loaded, saved, unused); `enable_train` adds its loss; `enable_rollout` drafts with it.

    Raises:
        ValueError: from `validate`, naming the field, the value and what is allowed.
    """

    enable: bool = False
    enable_train: bool = False
    enable_rollout: bool = False
    # True isolates the trunk, the embedding and the LM head from the MTP loss ("heads"); False trains all ("joint").
    detach_encoder: bool = False
    mtp_loss_scaling_factor: float = 0.1
    # SGLang's launch arguments.
    speculative_algorithm: str = "EAGLE"
    speculative_num_steps: int = 3
    speculative_eagle_topk: int = 1
    speculative_num_draft_tokens: int = 4
    # vLLM's, and the native engine's.
    method: str = "mtp"
    num_speculative_tokens: int = 1

    # Forerun's own.
    num_layers: int = 1
    repeat_layer: bool = False
    loss: LossKind = "ce"
    loss_top_k: int | None = None
    mask_rule: MaskRule = "target"
    # Positions whose logits exist at once; null is 64, and 1024 on CUDA.
    chunk_size: int | None = None
    acceptance: AcceptanceRule = "rejection"

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field; called on construction, and again after a configuration file was merged in."""
        for name, allowed in (
            ("loss", ("ce", "soft_ce", "tv")),
            ("mask_rule", ("target", "span")),
            ("acceptance", ("greedy", "match", "rejection")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"mtp.{name}={value!r} is not one of {', '.join(allowed)}")
        for name, lowest in (
            ("num_layers", 1),
            ("chunk_size", 1),
            ("num_speculative_tokens", 0),
            ("speculative_num_steps", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"mtp.{name}={value} must be at least {lowest}")
        if self.mtp_loss_scaling_factor < 0:
            raise ValueError(f"mtp.mtp_loss_scaling_factor={self.mtp_loss_scaling_factor} must not be negative")
        if self.loss_top_k is not None and self.loss_top_k < 1:
            raise ValueError(f"mtp.loss_top_k={self.loss_top_k} must be at least 1, or null for the full vocabulary")
        for name in ("enable_train", "enable_rollout"):
            if getattr(self, name) and not self.enable:
                raise ValueError(f"mtp.{name}=true needs mtp.enable=true")
