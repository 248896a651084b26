"""The rollout workers of an asynchronous run as Ray actors, each with the engine that the configuration names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from forerun.config import RLConfig
from forerun.rollout.protocol import RolloutEngine
from forerun.rollout.ray_worker import RayWorkerSettings, start_workers
from forerun.rollout.workers import RolloutWorker
from forerun.trainers.rollout_engines import make_rollout_engine
from forerun.trainers.setup import load_tokenizer


def ray_workers(ray: Any, config: RLConfig) -> tuple[Sequence[RolloutWorker], Callable[[str], RolloutWorker]]:
    """`async_training.num_workers` workers, and what makes one in the place of a lost one.

    Args:
        ray: the module, connected.
        config: the run's.

    Raises:
        UsageError: the engine cannot run the model.
        ForerunError: a worker does not start, or finds no place in time (see `starting_s`).
    """
    settings = config.async_training
    make = partial(start_workers, ray, partial(_engine, config, os.getcwd()))
    first = RayWorkerSettings(
        capacity=config.rollout.max_num_seqs,
        num_cpus=settings.worker_num_cpus,
        num_gpus=_num_gpus(ray, config),
        bucket_bytes=config.rollout.update_weights_bucket_megabytes << 20,
        start_timeout_s=starting_s(config),
        timeout_s=settings.worker_timeout_s,
    )
    later = replace(first, start_timeout_s=replacing_s(config))
    workers = make(first, [f"ray-{number}" for number in range(settings.num_workers)])
    return workers, lambda name: make(later, [name])[0]


def starting_s(config: RLConfig) -> float:
    """Seconds until the run's first workers must be there.

    Several ranks wait for rank 0 meanwhile, `distributed.timeout_s` at most, which then loads its part of the run.
    """
    return config.distributed.timeout_s / (1 if config.distributed.num_ranks == 1 else 2)


def replacing_s(config: RLConfig) -> float:
    """Seconds until a worker that takes a lost one's place must be there.

    Several ranks wait for rank 0 meanwhile, `distributed.timeout_s` at most, and may have waited `worker_timeout_s`
    already until the other one was lost. Half of the rest, as those before it may have taken their time, too.
    """
    timeout_s = config.distributed.timeout_s
    if config.distributed.num_ranks == 1:
        return timeout_s
    return (timeout_s - config.async_training.worker_timeout_s) / 2


def _num_gpus(ray: Any, config: RLConfig) -> float:
    """Without a word on it: those that its engine shares the model over, where there are any."""
    if config.async_training.worker_num_gpus is not None:
        return config.async_training.worker_num_gpus
    on_cpu = config.engine.device == "cpu" or not ray.cluster_resources().get("GPU", 0)
    return 0 if on_cpu else config.rollout.num_devices


def _engine(config: RLConfig, directory: str) -> RolloutEngine:
    """In the actor. Paths are from the directory of the trainer, where that exists."""
    with suppress(OSError):
        os.chdir(directory)
    return make_rollout_engine(config, None, load_tokenizer(config.model))
