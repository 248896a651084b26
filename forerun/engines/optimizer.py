"""AdamW over trunk and MTP head as separate groups: own learning rate, own clipping, one schedule.

The head's gradient is clipped apart from the trunk's. A shared norm would scale the trunk's update by the head's
gradient, and head-only isolation would no longer leave the trunk bit-identical to training without MTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from forerun.errors import UsageError


@dataclass
class OptimizerConfig:
    """AdamW and its schedule.

    Attributes:
        lr: peak learning rate of the trunk, and of the head unless `mtp_lr` is given.
        weight_decay: applied to matrices; vectors (norms, biases) are not decayed.
        max_grad_norm: clipping threshold of each of trunk and head; 0 switches clipping off.
        lr_scheduler_type: a name that transformers.get_scheduler knows.
        warmup_steps: optimizer steps of linear warm-up.
        total_steps: length of a decaying schedule; not needed by constant ones.
    """

    lr: float = 1e-5
    mtp_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None


@dataclass
class ParameterGroups:
    """The trainable parameters by part, with the names that their optimizer state is saved under."""

    trunk: dict[str, nn.Parameter]
    mtp: dict[str, nn.Parameter]

    @classmethod
    def of(cls, model: nn.Module, train_trunk: bool, train_mtp: bool) -> ParameterGroups:
        """Split by module (`model.mtp` is the head) and set requires_grad; a tied parameter counts once, as trunk."""
        head = getattr(model, "mtp", None)
        head_ids = {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
        groups = cls({}, {})
        for name, parameter in model.named_parameters():
            is_head = id(parameter) in head_ids
            wanted = train_mtp if is_head else train_trunk
            parameter.requires_grad_(wanted)
            if wanted:
                (groups.mtp if is_head else groups.trunk)[name] = parameter
        if not groups.trunk and not groups.mtp:
            raise UsageError("nothing to train: the trunk is frozen and no MTP block has mtp.enable_train=true")
        return groups

    def named(self) -> dict[str, nn.Parameter]:
        return {**self.trunk, **self.mtp}


def build_optimizer(groups: ParameterGroups, config: OptimizerConfig) -> tuple[torch.optim.AdamW, LambdaLR]:
    """The optimizer, with up to four groups named trunk, trunk_no_decay, mtp, mtp_no_decay, and its schedule.

    Raises:
        UsageError: an unknown schedule name, or a decaying one without total_steps.
    """
    param_groups: list[dict[str, Any]] = []
    for part, parameters, lr in (
        ("trunk", groups.trunk, config.lr),
        ("mtp", groups.mtp, config.lr if config.mtp_lr is None else config.mtp_lr),
    ):
        matrices = [p for p in parameters.values() if p.ndim >= 2]
        vectors = [p for p in parameters.values() if p.ndim < 2]
        if matrices:
            param_groups.append({"params": matrices, "lr": lr, "weight_decay": config.weight_decay, "name": part})
        if vectors:
            param_groups.append({"params": vectors, "lr": lr, "weight_decay": 0.0, "name": f"{part}_no_decay"})
    fused = _fused(groups.named().values())
    optimizer = torch.optim.AdamW(param_groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    try:
        scheduler = get_scheduler(
            config.lr_scheduler_type,
            optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=config.total_steps,
        )
    except ValueError as error:
        raise UsageError(f"lr_scheduler_type={config.lr_scheduler_type!r} cannot be used: {error}") from None
    return optimizer, scheduler


def resume_schedule(scheduler: LambdaLR, saved: Mapping[str, Any]) -> None:
    """Go on at the step of a saved schedule, at the rates of this one: settings may have changed since.

    Args:
        saved: its `state_dict`, less the functions.
    """
    kept = {key: value for key, value in saved.items() if key not in ("base_lrs", "_last_lr")}
    scheduler.load_state_dict({**kept, "lr_lambdas": [None] * len(scheduler.lr_lambdas)})
    rates = [base * of(scheduler.last_epoch) for base, of in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates  # which it computes itself at each step, and not when it is loaded


def _fused(parameters: Iterable[Tensor]) -> bool | None:
    """Whether torch's fused kernel makes the update; None leaves it to torch.

    That updates weights in shards one by one, with a dozen kernels each, and others all at once, with a further copy of
    them.
    """
    return True if all(p.device.type == "cuda" for p in parameters) else None


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients in place to a total 2-norm of at most max_norm (0: leave them). Returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm > 0 and torch.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Current rates: lr (trunk) and mtp_lr (head), as far as those groups exist."""
    rates: dict[str, float] = {}
    for group in optimizer.param_groups:
        rates["mtp_lr" if group["name"].startswith("mtp") else "lr"] = float(group["lr"])
    return rates
