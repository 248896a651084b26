"""Train a carrier with the Hugging Face Trainer or TRL: the loss scale, a gradient clip of its own, the metrics.

An attached model trains under either trainer without this. The callback adds what only the trainer's loop knows: how
many micro-batches share an optimizer step, how many ranks a gradient is averaged over, and when gradients are clipped.
Without it, the trainer's clip by the *total* norm lets the block's gradient shrink the trunk's update although the loss
is isolated, and over several ranks the block trains on a fraction of its gradient.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier


class MTPCallback(TrainerCallback):
    """Pass to any transformers-style trainer: `Trainer(model, ..., callbacks=[MTPCallback()])`.

    Each block parameter's gradient is set aside as it is accumulated, so the trainer's clip sees the trunk's alone, and
    is put back, averaged over the ranks of DistributedDataParallel and clipped by its own norm, just before the
    optimizer step.

    Args:
        max_grad_norm: for the block; None takes the trainer's `max_grad_norm`; 0 does not clip.

    Raises:
        UsageError: at the start of training, for a model without a block; under fp16 loss scaling (use bf16), whose
            scale the gradients set aside would keep; where ranks hold parts of the model (FSDP, DeepSpeed), or one
            process computes on several GPUs.
    """

    def __init__(self, max_grad_norm: float | None = None) -> None:
        self.max_grad_norm = max_grad_norm
        self.grad_norm: float | None = None
        self._parameters: list[nn.Parameter] = []  # the block's that are trained, in one order on every rank
        self._set_aside: dict[nn.Parameter, Tensor] = {}
        self._hooks: list[Any] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        if not isinstance(model, MTPCarrier):
            raise UsageError("MTPCallback needs a model with an MTP block: pass it through forerun.attach first")
        if args.fp16:
            raise UsageError("MTPCallback does not train under fp16 loss scaling: use bf16=True")
        for kind in ("fsdp", "deepspeed"):
            # By its own argument, or as `accelerate launch` says it.
            if getattr(args, kind, None) or os.environ.get(f"ACCELERATE_USE_{kind.upper()}", "").lower() == "true":
                raise UsageError(
                    f"MTPCallback trains under DistributedDataParallel, not under {kind}: forerun sft trains with FSDP2"
                )
        if args.n_gpu > 1:
            raise UsageError(
                f"MTPCallback does not train on {args.n_gpu} GPUs in one process: start it with torchrun, or set "
                "CUDA_VISIBLE_DEVICES to one of them"
            )
        model.mtp_accumulation_steps = args.gradient_accumulation_steps
        # Where the trainer normalises by the whole batch, it multiplies its loss by the ranks that will be averaged.
        model.mtp_loss_scale = float(args.world_size if args.average_tokens_across_devices else 1)
        self._remove_hooks()
        self._parameters = [parameter for parameter in model.mtp.parameters() if parameter.requires_grad]
        for parameter in self._parameters:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take))

    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        before = self._set_aside.get(parameter)
        self._set_aside[parameter] = parameter.grad if before is None else before.add_(parameter.grad)
        parameter.grad = None

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if args.world_size > 1 and self._parameters:
            self._average(args.world_size)
        for parameter, grad in self._set_aside.items():
            parameter.grad = grad
        limit = args.max_grad_norm if self.max_grad_norm is None else self.max_grad_norm
        norm = nn.utils.clip_grad_norm_(list(self._set_aside), limit if limit > 0 else torch.inf)
        self.grad_norm = float(norm)
        self._set_aside.clear()

    def _average(self, num_ranks: int) -> None:
        """What DistributedDataParallel does with every other gradient; it never saw these."""
        # A rank whose tokens never reached an expert has no gradient for it.
        there = torch.tensor([parameter in self._set_aside for parameter in self._parameters], dtype=torch.int32)
        there = there.to(self._parameters[0].device)
        dist.all_reduce(there, dist.ReduceOp.MAX)
        for parameter, wanted in zip(self._parameters, there.tolist(), strict=True):
            if wanted:
                grad = self._set_aside.setdefault(parameter, torch.zeros_like(parameter))
                dist.all_reduce(grad)
                grad /= num_ranks

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        stats = model.pop_mtp_stats() if isinstance(model, MTPCarrier) else None
        if stats is None or logs is None:
            return
        figures = stats.known()
        if self.grad_norm is not None:
            figures["mtp/grad_norm"] = self.grad_norm
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._set_aside.clear()
