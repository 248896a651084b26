"""AdamW through megatron-core's optimizers, with trunk and MTP block clipped apart and their own learning rates.

Megatron-core clips one norm over all parameters, which would scale the trunk's update by the head's gradient; here each
part's norm is taken and clipped between its two halves of a step, `prepare_grads` and `step_with_ready_grads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn
from transformers import get_scheduler

from forerun.engines.optimizer import OptimizerConfig
from forerun.errors import UsageError

PARTS = ("trunk", "mtp")
# What a group of parameters belongs to, beside megatron-core's own entries.
_PART = "forerun_part"
# How megatron-core's models name the MTP block.
_BLOCK = "mtp.layers."


class MegatronOptimizer:
    """The optimizer of this rank's chunks, and its schedule.

    Every rank calls the same methods in the same order.

    Args:
        chunks: wrapped in megatron-core's DistributedDataParallel; what is frozen has no requires_grad.
        config: as the torch engine's.
        distributed: megatron-core's distributed optimizer, which cuts the state over data-parallel ranks.
        parts: which of `PARTS` are trained, on any rank.

    Raises:
        UsageError: a schedule that cannot be used.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], config: OptimizerConfig, distributed: bool, parts: Sequence[str]
    ) -> None:
        self.config = config
        self.parts = tuple(parts)
        self.rates = {"trunk": config.lr, "mtp": config.lr if config.mtp_lr is None else config.mtp_lr}
        block = ParamWithNamePredicate("forerun_block", lambda parameter, name: _BLOCK in name)
        vector = ParamWithNamePredicate("forerun_vector", lambda parameter, name: parameter.ndim < 2)
        self.inner: Any = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=0.0,
                bf16=next(chunks[0].parameters()).dtype == torch.bfloat16,
                use_distributed_optimizer=distributed,
            ),
            list(chunks),
            config_overrides={
                ParamKey(with_name_predicate=block): {_PART: "mtp"},
                ParamKey(with_name_predicate=vector): {"wd_mult": 0.0},
            },
            use_gloo_process_groups=False,
        )
        self._clock = torch.optim.SGD([torch.zeros(1)], lr=1.0)  # nothing but the schedule's factor comes of it
        try:
            self.schedule = get_scheduler(
                config.lr_scheduler_type,
                self._clock,
                num_warmup_steps=config.warmup_steps,
                num_training_steps=config.total_steps,
            )
        except ValueError as error:
            raise UsageError(f"lr_scheduler_type={config.lr_scheduler_type!r} cannot be used: {error}") from None

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def learning_rates(self) -> dict[str, float]:
        """Current rates: lr (trunk) and mtp_lr (head), of those that are trained."""
        factor = float(self.schedule.get_last_lr()[0])
        return {{"trunk": "lr", "mtp": "mtp_lr"}[part]: self.rates[part] * factor for part in self.parts}

    @torch.no_grad()
    def prepare(self) -> dict[str, float]:
        """Ready the gradients and clip them. Returns each part's norm before that, the same on every rank."""
        self.inner.prepare_grads()
        norms = {part: self._norm(part) for part in self.parts}
        limit = self.config.max_grad_norm
        for part, norm in norms.items():
            if 0 < limit < float("inf") and torch.isfinite(torch.tensor(norm)):
                factor = min(1.0, limit / (norm + 1e-6))
                for gradient in self._gradients(part, counted=False):
                    gradient.mul_(factor)
        return norms

    def step(self, skip: bool = False) -> None:
        """Update the weights, unless told to skip, and advance the schedule."""
        if not skip:
            factor = float(self.schedule.get_last_lr()[0])
            for group in self.inner.param_groups:
                group["lr"] = self.rates[group.get(_PART, "trunk")] * factor
                group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
            self.inner.step_with_ready_grads()
        self._clock._opt_called = True  # type: ignore[attr-defined]  # LRScheduler warns when it runs before a step
        self.schedule.step()

    @property
    def optimizers(self) -> list[Any]:
        """Megatron-core's: one of dense parameters and, in some layouts, one of experts."""
        return list(getattr(self.inner, "chained_optimizers", [self.inner]))

    def _norm(self, part: str) -> float:
        total = 0.0
        for optimizer in self.optimizers:
            squares = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
            for gradient in self._gradients(part, counted=True, only=optimizer):
                squares += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
            dist.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())
            total += float(squares)
        return total**0.5

    def _gradients(self, part: str, counted: bool, only: Any = None) -> list[Tensor]:
        """Main gradients of a part on this rank; `counted`: each weight's on one rank only."""
        found = []
        for optimizer in self.optimizers if only is None else [only]:
            for group in optimizer.param_groups:
                if group.get(_PART, "trunk") != part:
                    continue
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    once = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
                    if once or not counted:
                        found.append(parameter.grad)
        return found
