"""The section `async_training` of an RL run: rollout and training at the same time (docs/async.md)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from forerun.config_algorithm import AlgorithmConfig
from forerun.config_check import bounded
from forerun.config_rollout import RolloutConfig
from forerun.errors import UsageError


@dataclass
class AsyncTrainingConfig:
    """Rollout workers generate while the trainer trains, on weights that are a bounded number of steps old.

    Weights have the version of the RL step after which they were taken.
    """

    enable: bool = False
    # RL steps by which the weights that sample a token may be older than those that are trained on it; 0 takes turns as
    # synchronous training does. (verl's staleness_threshold is a share of stale samples instead.)
    max_staleness: int = bounded(1, ge=0)
    # RL steps from one weight update to the next. One comes also before a checkpoint and before an evaluation.
    trigger_parameter_sync_step: int = bounded(1, ge=1)
    # At an update: cut short what runs, and write it on with the new weights; false finishes it first with the old.
    partial_rollout: bool = True
    # Rollout engines, each with its copy of the weights.
    num_workers: int = bounded(1, ge=1)
    # launch=ray, where each is a process of its own: the CPUs and GPUs set aside for it (null: where there are GPUs,
    # rollout.tensor_model_parallel_size of them), and the seconds without an answer after which it counts as lost.
    worker_num_cpus: float = bounded(1.0, ge=0)
    worker_num_gpus: float | None = bounded(None, ge=0)
    worker_timeout_s: float = bounded(600.0, gt=0)


def check_async(
    settings: AsyncTrainingConfig,
    algorithm: AlgorithmConfig,
    rollout: RolloutConfig,
    gen_batch_size: int | None,
    launch: str,
) -> None:
    """Check asynchronous training against the rest of the configuration.

    Raises:
        UsageError: names the setting.
    """
    if not settings.enable:
        for item in fields(settings):
            if (value := getattr(settings, item.name)) != item.default:
                raise UsageError(
                    f"async_training.{item.name}={str(value).lower()} is of async_training.enable=true: set both or "
                    "neither"
                )
        return
    if launch != "ray":
        for name in ("worker_num_cpus", "worker_num_gpus", "worker_timeout_s"):
            if (value := getattr(settings, name)) != getattr(AsyncTrainingConfig(), name):
                raise UsageError(
                    f"async_training.{name}={value:g} is of launch=ray, where workers are processes: unset it, or set "
                    "launch=ray"
                )
    if settings.max_staleness < settings.trigger_parameter_sync_step - 1:
        raise UsageError(
            f"async_training.max_staleness={settings.max_staleness} with "
            f"async_training.trigger_parameter_sync_step={settings.trigger_parameter_sync_step}: the last step before "
            f"an update needs samples that are {settings.trigger_parameter_sync_step - 1} steps old: raise the first "
            "or lower the second"
        )
    if rollout.deterministic and settings.partial_rollout:
        raise UsageError(
            "rollout.deterministic=true with async_training.partial_rollout=true: where an update cuts a response is a "
            "matter of time: set partial_rollout=false"
        )
    if rollout.base_url is not None and settings.num_workers > 1:
        raise UsageError(
            f"async_training.num_workers={settings.num_workers} with rollout.base_url, which is one server: give "
            "rollout.python to start several, or set num_workers=1"
        )
    if gen_batch_size is not None:
        raise UsageError(
            "data.gen_batch_size is of synchronous training: with async_training.enable=true further prompts are drawn "
            "one by one; unset it"
        )
    correction = algorithm.rollout_correction
    uncorrected = correction.rollout_is is None and correction.rollout_rs is None
    if settings.max_staleness > 0 and correction.bypass_mode is False and uncorrected:
        raise UsageError(
            "algorithm.rollout_correction.bypass_mode=false leaves samples of older weights uncorrected: set "
            "rollout_is=token, or bypass_mode=null for the rollout's own log-probs as the old policy's"
        )


def check_patience(settings: AsyncTrainingConfig, timeout_s: float) -> None:
    """Check that rank 0 gives up a worker before the other ranks, which wait for it meanwhile, give up rank 0.

    Args:
        settings: see there.
        timeout_s: `distributed.timeout_s`.

    Raises:
        UsageError: it does not.
    """
    if settings.worker_timeout_s >= timeout_s:
        raise UsageError(
            f"async_training.worker_timeout_s={settings.worker_timeout_s:g} with distributed.timeout_s={timeout_s:g}: "
            "ranks that wait for rank 0 would fail before it gives up a worker: lower the first or raise the second"
        )


def with_sound_correction(settings: AsyncTrainingConfig, algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """The section `algorithm` with `bypass_mode` decided.

    Samples of older weights need their own policy's log-probs in the ratio: without any other correction those of the
    rollout are the old policy's, and the clip bounds how far a stale sample can pull.
    """
    correction = algorithm.rollout_correction
    if correction.bypass_mode is not None:
        return algorithm
    uncorrected = correction.rollout_is is None and correction.rollout_rs is None
    bypass = settings.enable and settings.max_staleness > 0 and uncorrected
    return replace(algorithm, rollout_correction=replace(correction, bypass_mode=bypass))
