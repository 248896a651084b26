"""What asynchronous training cannot do is refused by name, before a model loads; what stale samples need is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.config_async import with_sound_correction
from forerun.errors import UsageError
from forerun.trainers.asynchronous.trainer import AsyncRLTrainer
from forerun.trainers.rl import RLTrainer
from tests.trainers.asynchronous.runs import ASYNC
from tests.trainers.tiny_rl import settings

CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["async_training.trigger_parameter_sync_step=3"], "needs samples that are 2 steps old: raise the first"),
        (["rollout.deterministic=true"], "a matter of time: set partial_rollout=false"),
        (["algorithm.filter_groups.enable=true", "data.gen_batch_size=4"], "data.gen_batch_size is of synchronous"),
        ([f"{CORRECTION}.bypass_mode=false"], "leaves samples of older weights uncorrected: set rollout_is=token"),
        (
            ["rollout={engine: vllm, base_url: 'http://127.0.0.1:8000'}", "async_training.num_workers=2"],
            "num_workers=2 with rollout.base_url, which is one server",
        ),
        (["async_training.worker_num_gpus=2"], "worker_num_gpus=2 is of launch=ray, where workers are processes"),
        (["async_training.max_staleness=-1"], "async_training.max_staleness=-1 must be at least 0"),
    ],
)
def test_what_it_cannot_do_is_one_line(tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings(tmp_path, *ASYNC, *more)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_worker_is_given_up_before_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    limits = [*ASYNC, "launch=ray", "distributed.timeout_s=600"]
    with pytest.raises(UsageError, match=r"^async_training\.worker_timeout_s=600 with distributed\.timeout_s=600: "):
        settings(tmp_path, *limits, "distributed.nproc_per_node=2")
    for more in (["distributed.nproc_per_node=1"], ["async_training.worker_timeout_s=599"], ["launch=torchrun"]):
        settings(tmp_path, *limits, "distributed.nproc_per_node=2", *more)


@pytest.mark.parametrize("setting", ["max_staleness=2", "partial_rollout=false", "worker_num_gpus=0.5"])
def test_its_settings_are_refused_where_it_is_off(tmp_path: Path, setting: str) -> None:
    with pytest.raises(UsageError, match=rf"^async_training\.{setting} is of async_training\.enable=true: set both"):
        settings(tmp_path, f"async_training.{setting}", "launch=ray")
    settings(tmp_path, *ASYNC, f"async_training.{setting}", "launch=ray")


@pytest.mark.parametrize(
    ("more", "bypass"),
    [
        ([*ASYNC], True),
        ([*ASYNC, "async_training.max_staleness=0"], False),
        ([*ASYNC, f"{CORRECTION}.rollout_is=token"], False),
        ([*ASYNC, f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold='2.0'"], False),
        ([*ASYNC, f"{CORRECTION}.bypass_mode=false", f"{CORRECTION}.rollout_is=token"], False),
        ([*ASYNC, f"{CORRECTION}.bypass_mode=false", "async_training.max_staleness=0"], False),
        ([f"{CORRECTION}.bypass_mode=true"], True),
        ([], False),
    ],
)
def test_stale_samples_get_their_own_policy_as_the_old_one(tmp_path: Path, more: list[str], bypass: bool) -> None:
    config = settings(tmp_path, *more)
    assert with_sound_correction(config.async_training, config.algorithm).rollout_correction.bypass_mode is bypass


def test_each_trainer_is_for_its_own_mode(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="or use AsyncRLTrainer"):
        RLTrainer(settings(tmp_path, *ASYNC))
    with pytest.raises(UsageError, match="or use RLTrainer"):
        AsyncRLTrainer(settings(tmp_path))
