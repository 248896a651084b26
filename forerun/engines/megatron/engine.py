"""The training engine of megatron-core: its GPTModel and MTP block, its schedules and optimizers, Forerun's objective.

A step reads top to bottom in `forward_backward`: counts of the whole step from the masks, the micro-batches of this
data-parallel replica, megatron-core's forward-backward schedule over them, and what the last pipeline stage found told
to every rank. A loss is summed over micro-batches and replicas, never averaged: it divides by counts of the whole step.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from forerun.checkpoint.reader import CheckpointReader
from forerun.checkpoint.shards import SHARD_BYTES, write_checkpoint
from forerun.data.batch import Batch
from forerun.engines.accumulation import LossFn, MainLoss, main_loss, merge_metrics, step_depth_counts
from forerun.engines.checkpoint_directory import STATE_FILE
from forerun.engines.megatron.microbatch import MicroBatch, deal
from forerun.engines.megatron.objective import MTPModel, Objective, Outcome
from forerun.engines.megatron.optimizer import MegatronOptimizer
from forerun.engines.megatron.saved_parts import (
    part_randoms,
    part_tensors,
    read_document,
    read_part,
    restore_part,
    write_part,
)
from forerun.engines.megatron.settings import MegatronEngineConfig, check_settings
from forerun.engines.megatron.weights import file_weights, named_weights
from forerun.engines.optimizer import resume_schedule
from forerun.engines.protocol import NonFiniteError
from forerun.engines.ranks import RankGroup
from forerun.engines.same_settings import agree_on_settings
from forerun.engines.saving import Saver, Tensors
from forerun.errors import UsageError
from forerun.families import declared_depth
from forerun.models.weight_stream import WeightStream
from forerun.mtp.config import MTPConfig
from forerun.mtp.stats import MTPStats
from forerun.report.atomic import failures, write_text

# (micro-batch, what the last stage found) -> (its part of the step's loss, what to tell the other ranks)
Report = Callable[[MicroBatch, Outcome], tuple[Tensor, Any]]


class MegatronEngine:
    """A `TrainingEngine` (see the protocol for the methods' contracts). Every rank calls the same methods alike.

    Args:
        chunks: this rank's, one for each virtual pipeline stage, as `model.build_model` makes them, weights loaded.
        mtp: how the MTP block is trained; None where there is none.
        config: see `MegatronEngineConfig`.
        source: the checkpoint that the weights came from; an export takes configuration and tokenizer from there.

    Raises:
        UsageError: what this engine cannot train, with the reason; ranks have read different configurations.
    """

    def __init__(
        self,
        chunks: Sequence[MTPModel],
        mtp: MTPConfig | None,
        config: MegatronEngineConfig | None = None,
        source: CheckpointReader | None = None,
    ) -> None:
        self.config = config or MegatronEngineConfig()
        self.source = source
        self._described: dict[bool, list[tuple[str, Tensor]]] = {}  # what the weights are does not change
        self.blueprint = chunks[0].blueprint
        self.layout = self.blueprint.layout
        self.mtp_config = mtp
        self.train_mtp = mtp is not None and mtp.enable_train
        check_settings(self.config, mtp, self.layout)
        world = dist.get_world_size()
        self.device = torch.device(torch.cuda.current_device())
        self.ranks = RankGroup(DeviceMesh(self.device.type, torch.arange(world)))
        agree_on_settings(self.blueprint.config, self.ranks)
        self.models = list(chunks)
        for chunk in self.models:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(self.train_mtp if "mtp.layers." in name else self.config.train_trunk)
        settings: Any = self.models[0].config
        settings.calculate_per_token_loss = True  # losses and gradients are summed as they are
        settings.finalize_model_grads_func = self._finalize
        if self.layout.chunks > 1:
            # Batched, the messages of two ranks that are each other's next and previous stage are mistaken for one
            # another.
            settings.overlap_p2p_comm, settings.batch_p2p_comm = True, False
        if self.config.recompute_granularity is not None:
            settings.recompute_granularity = self.config.recompute_granularity
            if self.config.recompute_granularity == "full":
                settings.recompute_method, settings.recompute_num_layers = "uniform", 1
        wrapping = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=self.config.use_distributed_optimizer
        )
        self.chunks = [
            DistributedDataParallel(settings, wrapping, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self.models)
        ]
        parts = [part for part, wanted in (("trunk", self.config.train_trunk), ("mtp", self.train_mtp)) if wanted]
        self.optimizer = MegatronOptimizer(
            self.chunks, self.config.optimizer, self.config.use_distributed_optimizer, parts
        )
        self.global_step = 0
        self._saver = Saver(self.ranks)
        self._drop_step = False

    @property
    def model(self) -> None:
        """Megatron-core's chunks are no Hugging Face model."""

    @property
    def vocab_size(self) -> int:
        return self.blueprint.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.blueprint.config["max_position_embeddings"]

    def frozen_copy(self) -> NoReturn:
        raise UsageError(f"{type(self).__name__} cannot copy itself: give the trainer a reference policy")

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
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        objective = Objective(
            self.mtp_config if self.train_mtp else None,
            self._depth_counts(batches),
            temperature,
            self.config.chunk_size,
            main=self.config.train_trunk,
        )
        losses = partial(self._losses, main_loss(loss_fn, entropy_loss_fn))
        reports = self._schedule(batches, objective, losses, forward_only=False)
        metrics: dict[str, float] = {}
        stats = None if not self.train_mtp else MTPStats.zeros(self._depths, self.device)
        for found, sums in reports:
            merge_metrics(metrics, found)
            if stats is not None and sums is not None:
                stats = stats.merge(MTPStats(sums))
        metrics = self.ranks.merge(metrics)
        if stats is not None:
            metrics.update(self.ranks.reduce(stats).known())
        for name in ("loss", "mtp_loss"):
            if name in metrics and not torch.isfinite(torch.tensor(metrics[name])):
                self._non_finite(name, metrics)
                break
        return metrics

    def step(self) -> dict[str, float]:
        report = {"skipped": 0.0, **self.optimizer.learning_rates()}
        for part, norm in self.optimizer.prepare().items():
            name = {"trunk": "grad_norm", "mtp": "mtp_grad_norm"}[part]
            report[name] = norm
            if not torch.isfinite(torch.tensor(norm)) and not self._drop_step:
                self._non_finite(name, report)
        report["skipped"] = float(self._drop_step)
        self.optimizer.step(skip=self._drop_step)
        self._drop_step = False
        self.global_step += 1
        return report

    def _losses(self, main: MainLoss, micro: MicroBatch, found: Outcome) -> tuple[Tensor, Any]:
        """A micro-batch's part of the step's loss on one rank of those that share it.

        Context-parallel ranks each have the whole main loss, and differentiate their own positions' part of it. Of the
        MTP loss they have their own positions' part.
        """
        losses: list[Tensor] = []
        metrics: dict[str, Any] = {}
        if found.mtp is not None:
            losses.append(found.mtp.loss)
            metrics["mtp_loss"] = found.mtp.loss.detach()
        if found.log_probs is not None and found.entropy is not None:
            log_probs = micro.cut(found.log_probs)
            if micro.own:
                loss, told = main(log_probs, micro.cut(found.entropy), micro.batch)
                if self._tells:
                    merge_metrics(metrics, told)
            else:
                loss = log_probs.sum()
            losses.append(loss)
        total = torch.stack([loss.float() for loss in losses]).sum()
        if not micro.own:
            return total * 0.0, ({}, None)
        if parallel_state.get_tensor_model_parallel_rank() > 0:
            return total, ({}, None)
        figures = {name: float(value) for name, value in metrics.items()}
        return total, (figures, None if found.mtp is None else found.mtp.stats.sums)

    def _schedule(
        self, batches: Sequence[Batch], objective: Objective, report: Report, forward_only: bool
    ) -> list[Any]:
        """Run this replica's micro-batches through megatron-core's schedule; the last stage's reports, else none."""
        layout = self.layout
        multiple = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
        if layout.context_parallel_size > 1:
            multiple *= 2 * layout.context_parallel_size
        dealt = deal(
            batches,
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_rank(),
            rounds_of=layout.pipeline_model_parallel_size if layout.chunks > 1 else 1,
            multiple=multiple,
            alike=layout.pipeline_model_parallel_size > 1,
            context=parallel_state.get_context_parallel_group(),
            device=self.device,
        )

        def forward(source: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Callable[[Outcome], Any]]:
            micro = next(source)
            found = chunk(
                input_ids=micro.rows.batch.input_ids,
                position_ids=micro.rows.batch.position_ids,
                attention_mask=micro.hidden_positions(),
                labels=(micro, objective),
            )

            def loss(outcome: Outcome) -> tuple[Tensor, Tensor, Any]:
                total, told = report(micro, outcome)
                return total, torch.zeros((), dtype=torch.int, device=self.device), told

            return found, loss

        rows, length = dealt[0].padded.input_ids.shape
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(dealt) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(dealt),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
        )

    def _finalize(self, chunks: list[Any], num_tokens: Tensor | None, **passed: Any) -> None:
        """Sum gradients over ranks, and leave it at that: megatron-core would divide by what it counted."""
        finalize_model_grads(chunks, None, **passed)

    @property
    def _depths(self) -> int:
        return int(self.models[0].config.mtp_num_layers)

    @property
    def _tells(self) -> bool:
        """Whether this rank speaks for those that share its micro-batches, if it is of the last pipeline stage."""
        return parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0

    def _depth_counts(self, batches: Sequence[Batch]) -> list[int] | None:
        if not self.train_mtp:
            return None
        assert self.mtp_config is not None
        return step_depth_counts(batches, self._depths, self.mtp_config.mask_rule)

    def _non_finite(self, what: str, figures: Mapping[str, float]) -> None:
        """Give the step up: raise, or mark it to be dropped."""
        if self.config.on_nonfinite == "stop":
            raise NonFiniteError(
                f"step {self.global_step + 1}: {what} is not finite ({what}={figures[what]:g}); the weights are those "
                "of the last good step: lower lr, or set on_nonfinite=skip to drop such steps"
            )
        self._drop_step = True

    # ---- forward

    @torch.no_grad()
    def log_probs(self, batches: Sequence[Batch], temperature: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        def report(micro: MicroBatch, found: Outcome) -> tuple[Tensor, Any]:
            assert found.log_probs is not None and found.entropy is not None
            told = (micro.cut(found.log_probs).cpu(), micro.cut(found.entropy).cpu()) if micro.own else None
            return found.log_probs.new_zeros(()), told

        for chunk in self.chunks:
            chunk.eval()
        objective = Objective(None, None, temperature, self.config.chunk_size)
        own = self._schedule(batches, objective, report, forward_only=True)
        said: list[Any] = [None] * dist.get_world_size()
        replica = parallel_state.get_data_parallel_rank()
        dist.all_gather_object(said, (replica, own) if own and self._tells else None)
        by_replica = {place: [pair for pair in pairs if pair is not None] for place, pairs in filter(None, said)}
        return [by_replica[i % len(by_replica)][i // len(by_replica)] for i in range(len(batches))]

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        def report(micro: MicroBatch, found: Outcome) -> tuple[Tensor, Any]:
            assert found.log_probs is not None
            nothing = found.log_probs.new_zeros(())
            if not micro.own or parallel_state.get_tensor_model_parallel_rank() > 0:
                return nothing, ({}, None)
            sums = {"nll": float(-found.log_probs.sum()), "targets": float(micro.batch.num_targets)}
            return nothing, (sums if self._tells else {}, None if found.mtp is None else found.mtp.stats.sums)

        for chunk in self.chunks:
            chunk.eval()
        objective = Objective(self.mtp_config, None, 1.0, self.config.chunk_size, compare_with_trunk=True)
        totals: dict[str, float] = {}
        stats = None if self.mtp_config is None else MTPStats.zeros(self._depths, self.device)
        for sums, found in self._schedule(list(batches), objective, report, forward_only=True):
            merge_metrics(totals, sums)
            if stats is not None and found is not None:
                stats = stats.merge(MTPStats(found))
        totals = self.ranks.merge(totals)
        figures = {"loss": totals["nll"] / totals["targets"]} if totals.get("targets") else {}
        if stats is not None:
            figures.update(self.ranks.reduce(stats).known())
        return figures

    # ---- weights

    def named_weights(self) -> WeightStream:
        return self._stream(drafter_only=False)

    def drafter_weights(self) -> WeightStream:
        """The MTP block's weights alone, under Hugging Face names."""
        return self._stream(drafter_only=True)

    def _stream(self, drafter_only: bool) -> WeightStream:
        known = self._described.get(drafter_only)
        stream = named_weights(self.models, drafter_only=drafter_only, described=known)
        self._described[drafter_only] = stream.described
        return stream

    def export(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        if self.source is None:
            raise UsageError(
                "the engine was not given the checkpoint that it started from, whose files an export needs"
            )
        source = self.source
        config = source.config | self._config_changes(source.config)

        def write(weights: Iterator[tuple[str, Tensor]]) -> None:
            with failures(directory):
                write_checkpoint(directory, weights, config, source.path, shard_bytes=shard_bytes)

        self.ranks.first_takes(file_weights(self.models, source.tensor_names), write)

    def _config_changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What is not as it was in the checkpoint that config.json came with: the dtype, and a block left out."""
        dtype = str(self.models[0].config.params_dtype).removeprefix("torch.")
        keys = [key for key in ("dtype", "torch_dtype") if key in config]
        changes: dict[str, Any] = dict.fromkeys(keys or ["dtype"], dtype)
        family = self.blueprint.family
        if not self.blueprint.depths and declared_depth(family, config):
            changes[family.depth_key] = 0
        return changes

    # ---- state

    def save(self, directory: Path, extra: Mapping[str, Any] | None = None, wait: bool = True) -> None:
        randoms = part_randoms()
        document = {
            **self._divided(),
            "global_step": self.global_step,
            "schedule": {k: v for k, v in self.optimizer.schedule.state_dict().items() if k != "lr_lambdas"},
            "extra": copy.deepcopy(dict(extra or {})),  # it is written later, perhaps, and may change until then
        }

        def write(unfinished: Path, tensors: Tensors, ranks: RankGroup) -> None:
            ranks.on_each(lambda: write_part(unfinished, ranks.rank, tensors["part"], randoms))
            ranks.on_first(lambda: write_text(unfinished / STATE_FILE, json.dumps(document, indent=1)))

        self._saver.save(directory, {"part": part_tensors(self.models, self.optimizer)}, write, wait)

    def finish_saves(self) -> None:
        self._saver.finish()

    def load(self, directory: Path) -> dict[str, Any]:
        self.finish_saves()
        document = self.ranks.on_first(lambda: read_document(directory, self._divided()))
        part = self.ranks.on_each(lambda: read_part(directory, self.ranks.rank, self.models, self.optimizer))
        restore_part(*part, self.models, self.optimizer)  # once every rank has its own
        resume_schedule(self.optimizer.schedule, document["schedule"])
        self.global_step = int(document["global_step"])
        return document["extra"]

    def _divided(self) -> dict[str, Any]:
        """How the ranks divide weights and optimizer state."""
        return {
            "layout": asdict(self.layout),
            "num_ranks": self.ranks.size,
            "use_distributed_optimizer": self.config.use_distributed_optimizer,
            "trained": list(self.optimizer.parts),
        }
