"""Signs that always mean a fault and never "still training", each with its name and its mend.

Nearly every MTP fault is silent: nothing crashes, drafts are merely never accepted. So a trainer asks here after every
step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from forerun.errors import ForerunError
from forerun.mtp.config import LossKind

logger = logging.getLogger(__name__)

OnAlarm = Literal["warn", "stop"]

# Drafted tokens after which not one accepted is no longer bad luck. A head no better than a uniform guess over a
# vocabulary of 50 k would also show this; it ought to be seen as well.
MIN_DRAFTED_TOKENS = 512


class AlarmError(ForerunError):
    """An alarm under on_alarm=stop."""


@dataclass(frozen=True)
class Alarm:
    """A name from {acceptance_never, mtp_loss_above_uniform, drafter_digest_mismatch} and one line for people."""

    name: str
    step: int
    message: str


class Alarms:
    """Watches a run; keeps what was raised in `raised`, and tells `record` of it where that is set.

    Args:
        on_alarm: "warn" logs each alarm once per kind, "stop" raises AlarmError.
        vocab_size: V, for the loss of a uniform guess.
        loss: the MTP loss kind; "tv" is bounded by 1 and has no such limit.
        warmup_steps: steps during which a high MTP loss is no alarm.
    """

    def __init__(self, on_alarm: OnAlarm, vocab_size: int, loss: LossKind = "ce", warmup_steps: int = 20) -> None:
        self.on_alarm = on_alarm
        self.uniform_loss = math.log(vocab_size)
        self.loss = loss
        self.warmup_steps = warmup_steps
        self.raised: list[Alarm] = []
        self.record: Callable[[Alarm], None] | None = None
        self._drafted_in_vain = 0.0

    def mtp_loss(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """`mtp/depth_{k}/loss` above ln V after warm-up: worse than knowing nothing."""
        if self.loss == "tv" or step <= self.warmup_steps:
            return
        for name, value in metrics.items():
            is_loss = name.startswith("mtp/depth_") and name.endswith("/loss")
            if is_loss and value is not None and value > self.uniform_loss:
                self._raise(
                    "mtp_loss_above_uniform",
                    step,
                    f"{name}={value:.3f} is above ln(vocabulary)={self.uniform_loss:.3f}: the block's halves may be in "
                    "the wrong order for this family, or its weights were not loaded; "
                    "check the checkpoint's MTP tensors, or lower optim.mtp_lr",
                )
                return

    def acceptance(self, step: int, drafted: float | None, accepted: float | None) -> None:
        """Not one drafted token accepted over many. Counts of one step; None where the engine cannot say."""
        if not drafted or accepted is None:
            return
        self._drafted_in_vain = 0.0 if accepted else self._drafted_in_vain + drafted
        if self._drafted_in_vain >= MIN_DRAFTED_TOKENS:
            self._raise(
                "acceptance_never",
                step,
                f"acceptance length is exactly 1.00 over {self._drafted_in_vain:.0f} drafted tokens: the rollout "
                "engine drafts with other weights than the trained ones, or the head is untrained; compare drafter "
                "digests, train the head first (forerun sft), or set mtp.enable_rollout=false",
            )

    def drafter_digest(self, step: int, trainer: str, rollout: str | None) -> bool | None:
        """Whether the rollout engine's drafter has the trainer's weights; None where the engine cannot know."""
        if rollout is None:
            return None
        if trainer == rollout:
            return True
        self._raise(
            "drafter_digest_mismatch",
            step,
            f"the rollout engine's drafter ({rollout[:12]}) is not the trainer's ({trainer[:12]}) after the sync: its "
            "weight update does not cover the MTP tensors; update the rollout engine, or set mtp.enable_rollout=false",
        )
        return False

    def _raise(self, name: str, step: int, message: str) -> None:
        alarm = Alarm(name, step, f"alarm {name} at step {step}: {message}")
        first = all(earlier.name != name for earlier in self.raised)
        self.raised.append(alarm)
        if self.record is not None:
            self.record(alarm)
        if self.on_alarm == "stop":
            raise AlarmError(alarm.message)
        if first:
            logger.warning(alarm.message)
