"""From a configuration to the objects of a run: tokenizer, model with its MTP block, training engine, run directory."""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from forerun.checkpoint.reader import CheckpointReader
from forerun.config import EngineConfig, ModelConfig, OptimConfig, TrainerConfig
from forerun.config_file import save_config
from forerun.engines.checkpoint_directory import latest_checkpoint, prune_checkpoints, put_back_replaced
from forerun.engines.data_parallel import ShardingConfig
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.protocol import TrainingEngine
from forerun.engines.ranks import RankGroup
from forerun.engines.torch_engine import TorchEngineConfig
from forerun.errors import ForerunError, UsageError, one_line
from forerun.families import declared_depth, family_of, present_depth
from forerun.models.attach import Init, attach
from forerun.models.loading import load
from forerun.mtp.config import MTPConfig
from forerun.report.atomic import failures
from forerun.report.writers import Writers, make_writers, rewind_lines
from forerun.trainers.alarms import Alarm

logger = logging.getLogger(__name__)

# The exported model, in trainer.output_dir.
EXPORTED = "model"
# Responses of a run's steps, and its alarms, as JSON lines beside metrics.jsonl.
SAMPLES_FILE = "samples.jsonl"
ALARMS_FILE = "alarms.jsonl"
# How long a run waits for the end of one in its directory, which may have been killed a moment ago.
LOCK_PATIENCE_S = 10.0


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights.

    Raises:
        UsageError: the directory is no checkpoint or has no tokenizer.
    """
    CheckpointReader(config.path)
    try:
        return AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise UsageError(
            f"{config.path} has no usable tokenizer ({one_line(error):.200}): copy the tokenizer files there"
        ) from error


def carries_mtp(config: ModelConfig) -> bool:
    """Whether the checkpoint declares an MTP block, or holds one without a word on it.

    Raises:
        UsageError: not a checkpoint.
    """
    reader = CheckpointReader(config.path)
    family = family_of(reader.config)
    declared = declared_depth(family, reader.config)
    return (present_depth(family, reader.config, reader.tensor_names) if declared is None else declared) > 0


def load_model(
    config: ModelConfig,
    mtp: MTPConfig,
    device: torch.device,
    seed: int = 0,
    init: Init = "carry",
    ranks: RankGroup | None = None,
) -> PreTrainedModel:
    """The model of a run; one without an MTP block gets a new one of `mtp.num_layers` depths if `mtp.enable` asks.

    Args:
        device: where its weights go.
        seed, init: of a new block, see `attach`.
        ranks: those that share the model, which all call this. Rank 0 alone reads weights; the others' model has none,
            and gets them where an engine cuts it into shards (`engines.handing_out`).

    Raises:
        UsageError: on every rank: not a checkpoint, or the trunk cannot take a block.
        ForerunError: on the other ranks, if rank 0's device has no room for it.
    """
    ranks = RankGroup() if ranks is None else ranks

    def read() -> PreTrainedModel:
        model = _load_model(config, mtp, seed, init, meta=ranks.rank > 0)
        return model if ranks.rank > 0 else model.to(device)  # type: ignore[arg-type]

    return ranks.on_each(read)


def model_without_weights(config: ModelConfig, mtp: MTPConfig) -> PreTrainedModel:
    """`load_model`'s on the meta device: names, shapes and dtypes. No weight is read.

    Raises:
        UsageError: as `load_model`.
    """
    return _load_model(config, mtp, 0, "carry", meta=True)


def _load_model(config: ModelConfig, mtp: MTPConfig, seed: int, init: Init, meta: bool) -> PreTrainedModel:
    attach_new = mtp.enable and not carries_mtp(config)
    wanted = replace(mtp, enable=False, enable_train=False, enable_rollout=False) if attach_new else mtp
    model = load(
        config.path,
        wanted,
        dtype=getattr(torch, config.dtype),
        trust_remote_code=config.trust_remote_code,
        override_config=config.override_config,
        attn_implementation=config.attn_implementation,
        meta=meta,
    )
    if attach_new:
        _say_attached(config.path, mtp.num_layers)
        model = attach(model, mtp, init=None if meta else init, seed=seed)
    return model


@functools.cache  # a run may load its model again, for the rollouts or the reference policy
def _say_attached(path: str, depth: int) -> None:
    logger.warning("%s carries no MTP block: attaching a new one of depth %d", path, depth)


def named_device(config: EngineConfig) -> torch.device | None:
    """The device that `engine.device` names; None leaves it to the machine.

    Raises:
        UsageError: no device has that name.
    """
    if config.device == "auto":
        return None
    try:
        return torch.device(config.device)
    except RuntimeError:
        raise UsageError(f"engine.device={config.device!r} is no device: use auto, cpu or cuda") from None


def resolve_device(config: EngineConfig) -> torch.device:
    """The device of this machine that `engine.device` names.

    Raises:
        UsageError: no such device on this machine.
    """
    device = named_device(config)
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"engine.device={config.device!r}, but torch sees no CUDA device here: use auto or cpu")
    return device


def engine_config(
    engine: EngineConfig, optim: OptimConfig, mtp: MTPConfig, total_steps: int, train_trunk: bool = True
) -> TorchEngineConfig:
    """The torch engine's settings for a run of `total_steps` optimizer steps."""
    return TorchEngineConfig(
        optimizer=optimizer_config(optim, total_steps),
        train_trunk=train_trunk,
        chunk_size=mtp.chunk_size,
        autocast=None if engine.autocast == "none" else engine.autocast,
        activation_recompute=engine.activation_recompute,
        on_nonfinite=engine.on_nonfinite,
        sharding=ShardingConfig(
            param_dtype=engine.param_dtype,
            reduce_dtype=engine.reduce_dtype,
            reshard_after_forward=engine.reshard_after_forward,
            cpu_offload=engine.cpu_offload,
            context_parallel_size=engine.context_parallel_size,
        ),
    )


def optimizer_config(optim: OptimConfig, total_steps: int) -> OptimizerConfig:
    """An engine's optimizer for a run of `total_steps` optimizer steps."""
    return OptimizerConfig(
        lr=optim.lr,
        mtp_lr=optim.mtp_lr,
        betas=(optim.betas[0], optim.betas[1]),
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        lr_scheduler_type=_scheduler_name(optim, total_steps),
        warmup_steps=optim.num_warmup_steps(total_steps),
        total_steps=total_steps,
    )


def _scheduler_name(optim: OptimConfig, total_steps: int) -> str:
    warm = optim.num_warmup_steps(total_steps) > 0
    return "constant_with_warmup" if optim.lr_scheduler_type == "constant" and warm else optim.lr_scheduler_type


def _lock(handle: int) -> None:
    """Lock an open file or directory for as long as it is open; BlockingIOError: another process has it."""
    until = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
        except OSError:  # a file system without locks
            return
        time.sleep(0.2)


class RunDirectory:
    """`trainer.output_dir`: resolved configuration, metrics, checkpoints, the exported model under `model/`.

    Rank 0 alone writes; every rank reads the checkpoint that it resumes from.

    Args:
        config: the run's configuration dataclass.
        trainer: its trainer section.
        ranks: those that share the run, each with such an object.

    Raises:
        UsageError: `trainer.resume` is off and the directory holds another run's checkpoints.
    """

    def __init__(self, config: Any, trainer: TrainerConfig, ranks: RankGroup) -> None:
        self.trainer = trainer
        self.ranks = ranks
        self.is_writer = ranks.rank == 0
        self.path = Path(trainer.output_dir)
        if self.is_writer:
            put_back_replaced(self.path)
        # The newest checkpoints by step are kept and resumed from: an earlier run's would push this one's out.
        if not trainer.resume and latest_checkpoint(self.path) is not None:
            raise UsageError(
                f"trainer.resume=false, and {self.path} holds an earlier run's checkpoints: "
                "give another trainer.output_dir, or delete them"
            )
        self.config = config
        loggers = trainer.logger if self.is_writer else []
        self.writers: Writers = make_writers(loggers, self.path, asdict(config))

    @property
    def model_path(self) -> Path:
        return self.path / EXPORTED

    def resume(self, engine: TrainingEngine) -> dict[str, Any] | None:
        """Restore the newest checkpoint into `engine`; its extra, or None when the run starts anew.

        Raises:
            ForerunError: the checkpoint is damaged, or was written with another model or other settings.
        """
        checkpoint = self.ranks.agree(latest_checkpoint(self.path) if self.trainer.resume else None)
        if checkpoint is None:
            return None
        try:
            extra = engine.load(checkpoint)
        except ForerunError as error:
            raise ForerunError(
                f"cannot resume from {checkpoint}: {error}. Use the model and settings of the run that wrote it, "
                "or give another trainer.output_dir"
            ) from error
        logger.warning("resuming from %s", checkpoint)
        return extra

    def rewind(self, step: int | None) -> None:
        """Drop what an earlier process logged past `step`, where this one goes on; None: it starts anew."""
        step = -1 if step is None else step
        self.writers.rewind(step)
        if self.is_writer:
            for name in (SAMPLES_FILE, ALARMS_FILE):
                rewind_lines(self.path / name, step)

    def log_alarm(self, alarm: Alarm) -> None:
        """Append an alarm; for `Alarms.record`."""
        if not self.is_writer:
            return
        path = self.path / ALARMS_FILE
        with failures(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(alarm)) + "\n")

    def write_config(self) -> None:
        """Write config.yaml; after `resume`, so that a resume that is refused leaves the earlier run's."""
        if self.is_writer:
            save_config(self.config, self.path)

    def save(self, engine: TrainingEngine, extra: Mapping[str, Any]) -> Path:
        """Write a checkpoint of the engine's current step and delete those past `save_total_limit`.

        With `trainer.async_save` it is still being written on return; `saving` waits for the last one.

        Raises:
            ForerunError: it, or the one before, could not be written.
        """
        self._finish_saves(engine)
        path = self.path / f"checkpoint-{engine.global_step}"
        engine.save(path, extra, wait=not self.trainer.async_save)
        self._prune()
        return path

    @contextmanager
    def saving(self, engine: TrainingEngine) -> Iterator[None]:
        """Around the training: waits at its end, or where it fails, for a checkpoint that is still being written.

        Raises:
            UsageError: another run is at work in the directory.
        """
        with self._alone():
            try:
                yield
            except BaseException:
                try:
                    self._finish_saves(engine)
                except Exception as error:  # a rank that has gone, among others; what stopped the training counts
                    logger.warning("%s", one_line(error))
                raise
            self._finish_saves(engine)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other runs out: each would clear away what the other is writing. A killed one leaves no lock."""
        if not self.is_writer:
            yield
            return
        with failures(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDONLY)
        try:
            _lock(handle)
        except BlockingIOError:
            os.close(handle)
            raise UsageError(
                f"trainer.output_dir={self.path}: another run is at work there: wait for its end, or give another"
            ) from None
        try:
            yield
        finally:
            os.close(handle)

    def _finish_saves(self, engine: TrainingEngine) -> None:
        engine.finish_saves()
        self._prune()

    def _prune(self) -> None:
        if self.is_writer:
            prune_checkpoints(self.path, self.trainer.save_total_limit)

    def export(self, engine: TrainingEngine, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """The trained model as a Hugging Face directory, tokenizer included."""
        if self.is_writer:
            for leftover in self.path.glob(f".{self.model_path.name}.*.partial"):  # of one that was killed
                shutil.rmtree(leftover, ignore_errors=True)
        engine.export(self.model_path)
        if tokenizer is not None and self.is_writer:
            tokenizer.save_pretrained(self.model_path)

    def is_due(self, frequency: int, step: int) -> bool:
        return frequency > 0 and step % frequency == 0
