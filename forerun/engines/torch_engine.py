"""The training engine of plain PyTorch: one process or FSDP2, CPU or CUDA, any Hugging Face causal LM, with MTP or not.

A step reads top to bottom in `forward_backward`: counts of the whole step from the masks, then per micro-batch trunk ->
MTP loss -> main loss -> backward. Neither loss ever holds the whole batch's logits.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from forerun.checkpoint.shards import SHARD_BYTES
from forerun.data.batch import Batch
from forerun.engines.accumulation import LossFn, MainLoss, main_loss, merge_metrics, step_depth_counts
from forerun.engines.data_parallel import DataParallel, ShardingConfig, whole
from forerun.engines.division import put_back
from forerun.engines.forward import Forward, MTPLossFn, default_mtp_loss
from forerun.engines.hidden_cache import HiddenCache
from forerun.engines.optimizer import (
    OptimizerConfig,
    ParameterGroups,
    build_optimizer,
    clip_gradients,
    learning_rates,
    resume_schedule,
)
from forerun.engines.protocol import NonFiniteError
from forerun.engines.random_state import random_state
from forerun.engines.ranks import RankGroup
from forerun.engines.saving import Saver, Tensors
from forerun.engines.state import (
    SavedState,
    optimizer_targets,
    optimizer_tensors,
    restore_optimizer,
    state_document,
    write_state,
)
from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier, mtp_weight_names, named_weights
from forerun.models.saving import save_streamed, saved_tensors
from forerun.models.trunk import base_model
from forerun.models.weight_stream import WeightStream
from forerun.mtp.config import MTPConfig
from forerun.mtp.stats import MTPStats
from forerun.report.atomic import failures

logger = logging.getLogger(__name__)


@dataclass
class TorchEngineConfig:
    """How the engine trains.

    Attributes:
        optimizer: AdamW, its schedule, clipping.
        train_trunk: False freezes everything but the MTP block; trunk hiddens are then computed without a graph and
            the main loss is not computed at all.
        chunk_size: positions whose logits exist at once in the main loss; None: `mtp.losses.default_chunk_size`.
        autocast: dtype of torch.autocast for the forward pass; None computes in the weights' own dtype.
        activation_recompute: keep only layer inputs and run each layer again in backward.
        on_nonfinite: "stop" raises NonFiniteError; "skip" drops the step, which leaves the weights alone.
        sharding: how weights lie over ranks, where the engine is given a mesh.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train_trunk: bool = True
    chunk_size: int | None = None
    autocast: Literal["bfloat16", "float16"] | None = None
    activation_recompute: bool = False
    on_nonfinite: Literal["stop", "skip"] = "stop"
    sharding: ShardingConfig = field(default_factory=ShardingConfig)


class TorchEngine:
    """A `TrainingEngine` (see the protocol for the methods' contracts).

    Args:
        model: a causal LM; one that `forerun.attach` or `forerun.load` gave an MTP block trains it when its
            `mtp_config.enable_train` is set.
        config: see `TorchEngineConfig`.
        mtp_loss: replaces the MTP objective; the default is the one that the model's MTPConfig describes.
        hidden_cache: keeps the trunk's hiddens of rows seen before; only with a frozen trunk, in one process.
        mesh: ranks that share the step, see `DataParallel`; None is this process alone. Every rank makes its engine
            from the same weights, or those but rank 0 from a model without any (`forerun.load(path, meta=True)`), and
            calls the same methods with the same arguments.

    Raises:
        UsageError: nothing to train, an unusable schedule, or a cache with a trunk that changes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TorchEngineConfig | None = None,
        mtp_loss: MTPLossFn = default_mtp_loss,
        hidden_cache: HiddenCache | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.model = model
        self.config = config or TorchEngineConfig()
        self.mtp_config: MTPConfig | None = model.mtp_config if isinstance(model, MTPCarrier) else None
        self.train_mtp = self.mtp_config is not None and self.mtp_config.enable_train
        if hidden_cache is not None and self.config.train_trunk:
            raise UsageError("trunk hiddens can only be cached while the trunk is frozen: set train_trunk=false")
        if hidden_cache is not None and mesh is not None:
            raise UsageError("trunk hiddens cannot be cached on several ranks, which would not all run the trunk then")
        if mtp_loss is not default_mtp_loss and self.config.sharding.context_parallel_size > 1:
            raise UsageError("an MTP loss of your own sees whole rows: set context_parallel_size=1")
        self.ranks = DataParallel(model, mesh, self.config.sharding)
        self.forward = Forward(
            model,
            self.ranks,
            mtp_loss,
            hidden_cache,
            frozen_trunk=not self.config.train_trunk,
            chunk_size=self.config.chunk_size,
            autocast=self.config.autocast,
        )
        self.groups = ParameterGroups.of(model, self.config.train_trunk, self.train_mtp)
        self.optimizer, self.scheduler = build_optimizer(self.groups, self.config.optimizer)
        if self.config.activation_recompute:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        self.global_step = 0
        self._saver = Saver(self.ranks)
        self._drop_step = False

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.ranks.device or next(self.model.parameters()).device

    @property
    def vocab_size(self) -> int:
        return len(cast(nn.Embedding, self.model.get_input_embeddings()).weight)

    @property
    def max_position_embeddings(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def frozen_copy(self) -> TorchEngine:
        # Its optimizer never makes a step, so it has no state: the memory is that of the weights.
        return TorchEngine(copy.deepcopy(self.model), self.config)

    # ---- one step

    def forward_backward(
        self,
        batches: Sequence[Batch],
        loss_fn: LossFn,
        temperature: float = 1.0,
        entropy_loss_fn: LossFn | None = None,
    ) -> dict[str, float]:
        if not batches or not any(batch.num_targets for batch in batches):
            raise UsageError("the batch has no supervised target token: check the prompt/response mask of the data")
        self.model.train()
        if not self.config.train_trunk:
            base_model(self.model).eval()  # no dropout in hiddens that only serve as data
        counts = self._depth_counts(batches)
        metrics: dict[str, float] = {}
        stats: MTPStats | None = None
        for batch, own in self.ranks.data.deal(self.forward.divided(batches)):
            batch = batch.to(self.device)
            main = main_loss(loss_fn, entropy_loss_fn) if own else main_loss(_no_loss)
            total, figures, mtp = self.ranks.run(partial(self._losses, batch, main, counts, temperature))
            if own:
                merge_metrics(metrics, figures)
            if mtp is not None:
                mtp = mtp if own else MTPStats(torch.zeros_like(mtp.sums))
                stats = mtp if stats is None else stats.merge(mtp)
            if self.ranks.any(~torch.isfinite(total)):
                self._non_finite("loss", metrics)
                break
            if total.requires_grad:
                (total if own else total * 0.0).backward()
        metrics = self.ranks.merge(metrics)
        if stats is not None:
            metrics.update(self.ranks.reduce(stats).known())
        return metrics

    def _losses(
        self, batch: Batch, main: MainLoss, counts: Sequence[int] | None, temperature: float
    ) -> tuple[Tensor, dict[str, float], MTPStats | None]:
        """A micro-batch's part of the step's loss, its metrics, its MTP statistics."""
        losses: list[Tensor] = []
        metrics: dict[str, float] = {}
        stats = None
        rows = self.ranks.rows(batch)
        with self.forward.autocast():
            hidden_states = self.forward.hidden_states(batch, rows)
            if self.train_mtp:
                mtp = self.forward.mtp(hidden_states, rows, counts, temperature=temperature)
                losses.append(mtp.loss)
                merge_metrics(metrics, {"mtp_loss": mtp.loss.detach()})
                stats = mtp.stats
            if self.config.train_trunk:
                log_probs, entropy = self.forward.log_probs(hidden_states, batch, rows, temperature)
                loss, loss_metrics = main(log_probs, entropy, batch)
                losses.append(loss)
                if self.ranks.speaks:
                    merge_metrics(metrics, loss_metrics)
        # Grafting is for trainers that see only their own loss. This one holds both, and their sum has the same
        # gradient.
        return torch.stack([loss.float() for loss in losses]).sum(), metrics, stats

    def step(self) -> dict[str, float]:
        max_norm = self.config.optimizer.max_grad_norm
        report = {"skipped": 0.0, **learning_rates(self.optimizer)}
        for name, parameters in (("grad_norm", self.groups.trunk), ("mtp_grad_norm", self.groups.mtp)):
            if parameters:
                norm = whole(clip_gradients(list(parameters.values()), max_norm))
                report[name] = float(norm)
                if not torch.isfinite(norm) and not self._drop_step:
                    self._non_finite(name, report)
        if self._drop_step:
            report["skipped"] = 1.0
            self._drop_step = False
            # The schedule goes on as if the step had been made; LRScheduler warns when it runs before the optimizer.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.global_step += 1
        return report

    def _depth_counts(self, batches: Sequence[Batch]) -> list[int] | None:
        if not self.train_mtp:
            return None
        assert isinstance(self.model, MTPCarrier) and self.mtp_config is not None
        return step_depth_counts(batches, self.model.mtp.num_depths, self.mtp_config.mask_rule)

    def _non_finite(self, what: str, figures: Mapping[str, float]) -> None:
        """Give the step up: raise, or mark it to be dropped."""
        bad = {k: v for k, v in figures.items() if k in ("loss", "mtp_loss", what)}
        if self.config.on_nonfinite == "stop":
            self.optimizer.zero_grad(set_to_none=True)
            shown = ", ".join(f"{k}={v:g}" for k, v in bad.items())
            raise NonFiniteError(
                f"step {self.global_step + 1}: {what} is not finite ({shown}); the weights are those of the last good "
                "step: lower lr, or set on_nonfinite=skip to drop such steps"
            )
        self._drop_step = True

    # ---- what the model makes of rows

    def trunk_hidden_states(self, batch: Batch) -> Tensor:
        """The trunk's hiddens [B, S, d] as its LM head takes them, without a graph; from the cache, if there is one."""
        return self.forward.whole_hidden_states(batch.to(self.device))

    @torch.no_grad()
    def log_probs(self, batches: Sequence[Batch], temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        self.model.eval()

        def one(batch: Batch) -> tuple[Tensor, Tensor]:
            rows = self.ranks.rows(batch)
            with self.forward.autocast():
                hidden_states = self.forward.hidden_states(batch, rows)
                return self.forward.log_probs(hidden_states, batch, rows, temperature)

        parts = [self.forward.parts(batch) for batch in batches]
        run = [part.batch for together in parts for part in together]
        own = [self.ranks.run(partial(one, batch.to(self.device))) for batch, _ in self.ranks.data.deal(run)]
        if self.ranks.sharded:  # on their way to the other ranks, whose devices are not ours
            own = [(values.cpu(), entropies.cpu()) for values, entropies in own]
        found = iter(self.ranks.data.collect(len(run), own))
        told = [list(zip(*(next(found) for _ in together), strict=True)) for together in parts]
        return [
            (put_back(together, log_probs, batch), put_back(together, entropies, batch))
            for batch, together, (log_probs, entropies) in zip(batches, parts, told, strict=True)
        ]

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        self.model.eval()

        def one(batch: Batch) -> tuple[Tensor, MTPStats | None]:
            rows = self.ranks.rows(batch)
            with self.forward.autocast():
                hidden_states = self.forward.hidden_states(batch, rows)
                log_probs, _ = self.forward.log_probs(hidden_states, batch, rows, 1.0)
                if not isinstance(self.model, MTPCarrier):
                    return log_probs, None
                return log_probs, self.forward.mtp(hidden_states, rows, None, compare_with_trunk=True).stats

        sums = {"nll": 0.0, "targets": 0.0}
        stats = MTPStats.zeros(self.model.mtp.num_depths) if isinstance(self.model, MTPCarrier) else None
        for batch, own in self.ranks.data.deal(self.forward.divided(batches)):
            log_probs, found = self.ranks.run(partial(one, batch.to(self.device)))
            if own:
                if self.ranks.speaks:
                    merge_metrics(sums, {"nll": -log_probs.sum(), "targets": float(batch.num_targets)})
                if stats is not None and found is not None:
                    stats = stats.merge(found)
        sums = self.ranks.merge(sums)
        figures = {"loss": sums["nll"] / sums["targets"]} if sums["targets"] else {}
        if stats is not None:
            figures.update(self.ranks.reduce(MTPStats(stats.sums.to(self.device))).known())
        return figures

    # ---- weights and state

    def named_weights(self) -> WeightStream:
        drafter = self._drafter_names()
        return _gathered(sorted(named_weights(self.model), key=lambda pair: pair[0] in drafter))

    def drafter_weights(self) -> WeightStream:
        """The MTP block's weights alone, under Hugging Face names."""
        drafter = self._drafter_names()
        return _gathered([(name, tensor) for name, tensor in named_weights(self.model) if name in drafter])

    def _drafter_names(self) -> set[str]:
        return set(mtp_weight_names(self.model).values()) if isinstance(self.model, MTPCarrier) else set()

    def export(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        tensors = saved_tensors(self.model)

        def write(wholes: Iterator[tuple[str, Tensor]]) -> None:
            with failures(directory):
                save_streamed(self.model, directory, wholes, shard_bytes)

        self.ranks.first_takes(((name, whole(tensor)) for name, tensor in tensors), write)

    def save(self, directory: Path, extra: Mapping[str, Any] | None = None, wait: bool = True) -> None:
        named = self.groups.named()
        document = state_document(self.optimizer, self.scheduler, named, self.global_step, extra or {})
        randoms = random_state()
        # Without shards the model lies there as a Hugging Face directory.
        whole_model = {} if self.ranks.sharded else self.model.state_dict()
        shards = dict(named_weights(self.model)) if self.ranks.sharded else {}
        groups = {"model": whole_model, "shards": shards, "moments": optimizer_tensors(self.optimizer, named)}

        def write(unfinished: Path, tensors: Tensors, ranks: RankGroup) -> None:
            if tensors["model"]:
                # As the modules hold them, so that every name finds its weight again; `export` writes the family's
                # files.
                self.model.save_pretrained(unfinished, state_dict=dict(tensors["model"]), save_original_format=False)
            write_state(unfinished, tensors["shards"], tensors["moments"], randoms, document, ranks)

        self._saver.save(directory, groups, write, wait)

    def finish_saves(self) -> None:
        self._saver.finish()

    @torch.no_grad()
    def load(self, directory: Path) -> dict[str, Any]:
        self.finish_saves()
        saved, own, named = SavedState(directory, self.ranks), dict(named_weights(self.model)), self.groups.named()
        saved.check_weights(own)
        moments = optimizer_targets(named, saved.moments)
        saved.check_trained(named)
        saved.read(own, moments)
        document = saved.document
        restore_optimizer(self.optimizer, named, moments)
        resume_schedule(self.scheduler, document["scheduler"])
        if (rates := self.scheduler.get_last_lr()) != document["learning_rates"]:
            told = "resuming at learning rates of %s by the settings as they are now; the checkpoint's were %s"
            logger.warning(told, rates, document["learning_rates"])
        saved.restore_random_state()
        self.global_step = int(document["global_step"])
        return document["extra"]


def _gathered(shards: Sequence[tuple[str, Tensor]]) -> WeightStream:
    return WeightStream(shards, ((name, whole(tensor)) for name, tensor in shards))


def _no_loss(log_probs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    return log_probs.sum(), {}
