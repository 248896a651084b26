"""Supervised fine-tuning: trunk and MTP block together, or the block alone on a frozen trunk.

`SFTTrainer(config).train()` is the whole run of `forerun sft`. Each part can also be given: an engine with its own MTP
objective, documents that are already tokenized, held-out sets by name.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase, set_seed

from forerun.config import SFTConfig
from forerun.data.batch import Batch
from forerun.data.examples import encode_examples, read_examples
from forerun.data.order import DataOrder
from forerun.data.packing import Document
from forerun.engines.hidden_cache import HiddenCache
from forerun.engines.protocol import TrainingEngine
from forerun.engines.ranks import RankGroup
from forerun.engines.torch_engine import MTPLossFn, TorchEngine, default_mtp_loss
from forerun.errors import UsageError
from forerun.models.attach import Init
from forerun.models.carrier import MTPCarrier
from forerun.report.progress import ProgressBar
from forerun.trainers.alarms import Alarms
from forerun.trainers.batching import Rows, micro_batches, stack_rows
from forerun.trainers.checks import check_config, check_ranks, warn_of_float32
from forerun.trainers.head_init import fit_new_head
from forerun.trainers.megatron_setup import make_megatron_engine
from forerun.trainers.setup import (
    RunDirectory,
    carries_mtp,
    engine_config,
    load_model,
    load_tokenizer,
    optimizer_config,
    resolve_device,
)

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Metrics = dict[str, float]


class NextTokenLoss:
    """Cross-entropy of the next token: mean over the supervised tokens of the whole step."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.num_targets = sum(batch.num_targets for batch in batches)

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        return -log_probs.sum() / self.num_targets, {}


class SFTTrainer:
    """One SFT run.

    Args:
        config: checked before anything is loaded.
        documents: training documents in place of `data.train_files`.
        eval_documents: held-out documents by name, in place of `data.val_files`; figures get the name as a prefix.
        engine: in place of the model that `model.path` names. Its optimizer, schedule and MTP objective stay its own.
        tokenizer: in place of the one at `model.path`; None with both documents and engine given needs none.
        mtp_loss: the MTP objective of the engine that is built; default as `config.mtp` says.
        initialise: called once with (model, training rows) on a new run, before the first step. Default: what
            `mtp_init` says, for a block that this run attaches.
        mesh: ranks that share the run (see `TorchEngine`), of which every one makes such a trainer; for the engine that
            is built.

    Raises:
        UsageError: a configuration or data that cannot be used.
    """

    def __init__(
        self,
        config: SFTConfig,
        *,
        documents: Sequence[Document] | None = None,
        eval_documents: Mapping[str, Sequence[Document]] | None = None,
        engine: TrainingEngine | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        mtp_loss: MTPLossFn = default_mtp_loss,
        initialise: Callable[[MTPCarrier, Sequence[Batch]], None] | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        check_config(config, has_data=documents is not None, has_model=engine is not None)
        check_ranks(config, None if mesh is None else mesh.size())
        self.config = config
        set_seed(config.trainer.seed)
        device = resolve_device(config.engine)
        ranks = RankGroup(mesh)
        if engine is None and ranks.rank == 0:
            warn_of_float32(config, ranks.size, device)
        needs_tokenizer = tokenizer is None and (documents is None or engine is None)
        self.tokenizer = load_tokenizer(config.model) if needs_tokenizer else tokenizer
        # Data before the model: a bad row is found in a second, not after a minute's loading.
        if documents is None:
            documents = self._read("train", config.data.train_files, config.data.train_max_samples)
        if eval_documents is None:
            held_out = config.data.val_files
            eval_documents = {"val": self._read("val", held_out, config.data.val_max_samples)} if held_out else {}
        self.rows = self._rows(documents)
        self.eval_rows = {name: self._rows(given) for name, given in eval_documents.items()}
        self.order = DataOrder(len(self.rows), config.trainer.seed, config.data.shuffle)
        self.total_steps = config.trainer.total_steps
        if config.total_epochs is not None:
            self.total_steps = math.ceil(config.total_epochs * len(self.rows) / config.train_batch_size)

        if engine is None and config.engine.strategy == "megatron":
            engine = make_megatron_engine(config, optimizer_config(config.optim, self.total_steps))
        if engine is None:
            init: Init = "carry" if config.mtp_init == "fit" else config.mtp_init
            # Shards move to the device as they are cut, which need not hold the whole model.
            place = device if mesh is None else torch.device("cpu")
            engine = made = TorchEngine(
                load_model(config.model, config.mtp, place, config.trainer.seed, init, ranks),
                engine_config(config.engine, config.optim, config.mtp, self.total_steps, not config.freeze_trunk),
                mtp_loss,
                HiddenCache() if config.cache_hiddens else None,
                mesh,
            )

            def fit_head(_: MTPCarrier, rows: Sequence[Batch]) -> None:
                fit_new_head(made, rows)

            fits = config.mtp_init == "fit" and config.mtp.enable_train and not carries_mtp(config.model)
            if initialise is None and fits:
                initialise = fit_head
        every_document = [*documents, *itertools.chain(*eval_documents.values())]
        _check_fit(every_document, engine.vocab_size, engine.max_position_embeddings)
        self.engine = engine
        self.initialise = initialise
        self.alarms = Alarms(
            config.trainer.on_alarm,
            engine.vocab_size,
            config.mtp.loss,
            warmup_steps=max(20, config.optim.num_warmup_steps(self.total_steps)),
        )

    def train(self) -> Metrics:
        """Train to the end, with checkpoints and held-out figures on the way, and export the model.

        Returns:
            the last step's metrics and the last held-out figures.

        Raises:
            ForerunError: see the engine, the alarms and the writers; checkpoints written before stay.
        """
        config, engine = self.config.trainer, self.engine
        run = RunDirectory(self.config, config, self.engine.ranks)
        metrics: Metrics = {}
        self.alarms.record = run.log_alarm
        with run.writers, run.saving(engine):
            resumed = run.resume(engine)
            if resumed is not None:
                self.order.load_state_dict(resumed["order"])
            run.rewind(None if resumed is None else engine.global_step)
            run.write_config()
            if resumed is None:
                if self.initialise is not None and isinstance(engine.model, MTPCarrier):
                    self.initialise(engine.model, self.rows)
                if config.val_before_train and (metrics := self.evaluate()):
                    run.writers.log(0, metrics)
            done = min(engine.global_step, self.total_steps)
            with ProgressBar("sft", self.total_steps, "steps", done=done) as progress:
                while engine.global_step < self.total_steps:
                    metrics = self.step()
                    last = engine.global_step == self.total_steps
                    if last or run.is_due(config.test_freq, engine.global_step):
                        metrics.update(self.evaluate())
                    run.writers.log(engine.global_step, metrics)
                    if last or run.is_due(config.save_freq, engine.global_step):
                        run.save(engine, {"order": self.order.state_dict()})
                    progress.advance(1, _note(metrics))
            if not metrics:  # resumed when there was no step left to do
                metrics.update(self.evaluate())
            run.export(engine, self.tokenizer)
        return metrics

    def step(self) -> Metrics:
        """One optimizer step on the next `train_batch_size` rows."""
        started = time.perf_counter()
        rows = [self.rows[index] for index in self.order.take(self.config.train_batch_size)]
        batches = micro_batches(rows, self.config.micro_batch_size)
        metrics = self.engine.forward_backward(batches, NextTokenLoss(batches))
        metrics.update(self.engine.step())
        if "entropy_sum" in metrics:
            metrics["entropy"] = metrics.pop("entropy_sum") / metrics["target_count"]
        metrics["epoch"] = self.order.epoch + self.order.position / self.order.num_items
        seconds = time.perf_counter() - started
        metrics["time/step"] = seconds
        metrics["tokens_per_second"] = sum(int((row.document_ids >= 0).sum()) for row in rows) / seconds
        self.alarms.mtp_loss(self.engine.global_step, metrics)
        return metrics

    def evaluate(self) -> Metrics:
        """Held-out figures of every set: `<name>/loss`, `<name>/mtp/depth_{k}/...`, `<name>/mtp/acceptance_length`."""
        figures: Metrics = {}
        for name, rows in self.eval_rows.items():
            size = self.config.micro_batch_size
            starts = range(0, len(rows), size)
            with ProgressBar(f"evaluate {name}", len(starts), "batches") as progress:
                batches = (stack_rows(rows[start : start + size]) for start in starts)
                found = self.engine.evaluate(_counted(batches, progress))
            figures.update({f"{name}/{key}": value for key, value in found.items()})
        return figures

    def _read(self, name: str, files: Sequence[str], limit: int | None) -> list[Document]:
        data = self.config.data
        assert self.tokenizer is not None
        examples = [example for file in files for example in read_examples(file, data.on_bad_row, logger.warning)]
        examples = examples[:limit]
        with ProgressBar(f"tokenize {name}", len(examples), "examples") as progress:
            counted = _counted(examples, progress)
            return encode_examples(self.tokenizer, counted, data.max_length, data.on_too_long, logger.warning)

    def _rows(self, documents: Sequence[Document]) -> Rows:
        learnable = [document for document in documents if any(document.loss_mask[1:])]
        if not learnable:
            raise UsageError("the dataset is empty: no document has a target token to learn")
        return Rows(learnable, self.config.data.max_length, self.config.data.packing)


def _check_fit(documents: Sequence[Document], size: int, context: int | None) -> None:
    """Refuse documents that the model cannot read: longer than its context, or with tokens that it does not have."""
    longest = max(len(document) for document in documents)
    if context is not None and longest > context:
        raise UsageError(
            f"a document has {longest} tokens, more than the model's context of {context}: "
            f"set data.max_length={context}"
        )
    largest = max(max(document.token_ids) for document in documents)
    if largest >= size:
        raise UsageError(
            f"the data holds token {largest}, and the model has only {size}: take the tokenizer that belongs to it"
        )


def _counted(items: Iterable[Item], progress: ProgressBar) -> Iterator[Item]:
    for item in items:
        yield item
        progress.advance(1)


def _note(metrics: Mapping[str, float]) -> str:
    shown = [("loss", "loss"), ("mtp/depth_1/loss", "mtp"), ("mtp/depth_1/trunk_top1", "agree")]
    return "  ".join(f"{label} {metrics[name]:.3f}" for name, label in shown if name in metrics)
