"""`forerun sft` and `forerun rl`: in this process, as ranks started from it, or as one rank that torchrun started."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from forerun.cluster import import_ray
from forerun.config import RLConfig, SFTConfig
from forerun.config_file import load_config, settings_of_one
from forerun.errors import UsageError
from forerun.launch.closing import closing_words, interrupted_words
from forerun.launch.rank import check_device_count, is_rank, joined, run_as_rank
from forerun.launch.ray_ranks import start_ranks as start_ray_ranks
from forerun.launch.torchrun import start_ranks
from forerun.signals import sigterm_interrupts
from forerun.trainers.checks import check_config, check_layout, check_ranks
from forerun.trainers.setup import named_device, resolve_device

Verb = Literal["sft", "rl"]


def run(verb: Verb, path: Path | None, overrides: Sequence[str]) -> None:
    """One training run. `launch=torchrun` and `launch=ray` start ranks; in a process that is one `launch` is not read.

    Raises:
        UsageError: a configuration that cannot be used, found before a process or a model is started.
        ForerunError: see the trainers, and `start_ranks`.
        KeyboardInterrupt: of Ctrl-C or SIGTERM; says where the run would go on.
    """
    if is_rank():
        run_as_rank(partial(_run_rank, verb, path, overrides))
        return
    config = _load(verb, path, overrides)
    try:
        _start(config, verb, path, overrides)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(interrupted_words(Path(config.trainer.output_dir))) from None


def _start(config: SFTConfig | RLConfig, verb: Verb, path: Path | None, overrides: Sequence[str]) -> None:
    if config.launch == "local":
        with sigterm_interrupts():
            _train(config, None)
        return
    settings = config.distributed
    if config.launch == "ray" and settings.ray_address is not None:  # on machines that need not be like this one
        check_layout(config, settings.num_ranks, named_device(config.engine) or torch.device("cuda"))
    else:
        check_ranks(config, settings.num_ranks)
        check_config(config, has_data=False, has_model=False)
        if resolve_device(config.engine).type == "cuda":
            check_device_count(settings.nproc_per_node)
    if config.launch == "ray":
        wants_cuda = None if config.engine.device == "auto" else config.engine.device == "cuda"
        cpus = 0.0
        if isinstance(config, RLConfig) and config.async_training.enable:
            cpus = config.async_training.num_workers * config.async_training.worker_num_cpus
        work = partial(_run_rank, verb, path and path.resolve(), overrides, on_ray=True)
        start_ray_ranks(work, settings, wants_cuda, cpus)
    else:
        start_ranks([verb, *([] if path is None else [str(path)]), *overrides], settings)


def _run_rank(verb: Verb, path: Path | None, overrides: Sequence[str], on_ray: bool = False) -> None:
    config = _load(verb, path, overrides)
    try:
        with joined(config.engine, config.distributed) as mesh:
            _train(config, mesh, on_ray)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(interrupted_words(Path(config.trainer.output_dir))) from None


def _load(verb: Verb, path: Path | None, overrides: Sequence[str]) -> SFTConfig | RLConfig:
    own: type[SFTConfig | RLConfig] = SFTConfig if verb == "sft" else RLConfig
    other: type[SFTConfig | RLConfig] = RLConfig if verb == "sft" else SFTConfig
    if settings_of_one(other, own, path, overrides) and not settings_of_one(own, other, path, overrides):
        name = "rl" if verb == "sft" else "sft"
        raise UsageError(f"{path or 'this'} is a configuration of `forerun {name}`: run that")
    return load_config(own, path, overrides)


def _train(config: SFTConfig | RLConfig, mesh: DeviceMesh | None, on_ray: bool = False) -> None:
    if isinstance(config, SFTConfig):
        from forerun.trainers.sft import SFTTrainer

        SFTTrainer(config, mesh=mesh).train()
    elif config.async_training.enable:
        from forerun.trainers.asynchronous.trainer import AsyncRLTrainer

        if on_ray and mesh is not None and mesh.get_rank() == 0:
            from forerun.trainers.ray_workers import ray_workers

            workers, replace_worker = ray_workers(import_ray(), config)
            AsyncRLTrainer(config, mesh=mesh, workers=workers, replace_worker=replace_worker).train()
        else:
            AsyncRLTrainer(config, mesh=mesh).train()
    else:
        from forerun.trainers.rl import RLTrainer

        RLTrainer(config, mesh=mesh).train()
    if mesh is None or mesh.get_rank() == 0:
        print(closing_words(Path(config.trainer.output_dir)), flush=True)
