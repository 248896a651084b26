"""Asynchronous RL over two ranks (FSDP2, gloo) is that of one: responses, figures, weights, checkpoints, and failures
that end both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forerun
from forerun.config import RLConfig
from forerun.engines.ranks import RankGroup
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.errors import ForerunError
from forerun.models.attach import attach
from forerun.models.carrier import named_weights
from forerun.models.weight_stream import Named, WeightStream
from forerun.mtp.config import MTPConfig
from forerun.rewards.protocol import RewardRequest, RewardResult
from forerun.rollout.local_worker import LocalWorker
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import NamedTensors
from forerun.rollout.sync import digest
from forerun.rollout.workers import WorkerLostError
from forerun.trainers.asynchronous.ranks import FirstRank
from forerun.trainers.asynchronous.trainer import AsyncRLTrainer
from forerun.trainers.rl import RLTrainer
from forerun.trainers.rl_run import RLRun
from forerun.trainers.setup import load_model
from tests.logged import repeatable, repeatable_metrics
from tests.mtp.ranks import Ranks
from tests.trainers.asynchronous.runs import REPEATABLE
from tests.trainers.test_rl_ranks import HEADS, JOINT, KL, PROMPTS, assert_close, mesh_of, settings
from tests.trainers.tiny import make_model
from tests.trainers.tiny_rl import ShareOfWord

KEEP = "trainer={save_freq: 1, save_total_limit: 0}"
OBJECTS: dict[str, Any] = {"prompts": PROMPTS, "eval_prompts": PROMPTS[:3]}
TURNS = [*REPEATABLE, "async_training.max_staleness=0"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, [2], tmp_path_factory.mktemp("ranks") / "store") as made:
        yield made


def trains(made: RLRun, steps: int = 3) -> dict[str, Any]:
    """All that a run shows: responses with what they earned, figures, weights."""
    reports, responses = [], []
    for _ in range(steps):
        reports.append(repeatable(made.turn(pause=False)))
        responses.append([(s.completion.token_ids, s.completion.weight_versions, s.reward.score) for s in made.samples])
    found = {"responses": responses, "reports": [*reports, made.evaluate()], "weights": whole_weights(made)}
    made.close()
    return found


def whole_weights(made: RLRun) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.engine.named_weights()}


def rank_trains_both(group: dist.ProcessGroup, configs: tuple[RLConfig, RLConfig]) -> list[dict[str, Any]]:
    mesh = mesh_of(group)
    made = AsyncRLTrainer(configs[0], reward=ShareOfWord(), mesh=mesh, **OBJECTS)
    assert hasattr(made, "rollouts") == (group.rank() == 0)
    return [trains(made), trains(RLTrainer(configs[1], reward=ShareOfWord(), mesh=mesh, **OBJECTS))]


@pytest.mark.parametrize("more", [JOINT, ["mtp.num_layers=2", *HEADS, *KL]], ids=["joint", "two depths, heads, KL"])
def test_two_ranks_train_as_one_does_and_as_synchronous_ones_do(ranks: Ranks, place: Path, more: list[str]) -> None:
    config = settings(place, *TURNS, *more)
    alone = trains(AsyncRLTrainer(config, reward=ShareOfWord(), **OBJECTS))
    assert len({tuple(tokens) for step in alone["responses"] for tokens, *_ in step}) > 20
    for found, synchronous in ranks.run(rank_trains_both, [(config, settings(place, *more))] * 2):
        for other in (found, synchronous):
            assert other["responses"] == alone["responses"]
            assert_close(other["weights"], alone["weights"])
        for report, expected in zip(found["reports"], alone["reports"], strict=True):
            assert report == pytest.approx(expected, rel=1e-3, abs=1e-5)
        for report, expected in zip(found["reports"], synchronous["reports"], strict=True):
            assert {name: report[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


def rank_runs(group: dist.ProcessGroup, config: RLConfig) -> None:
    AsyncRLTrainer(config, reward=ShareOfWord(), mesh=mesh_of(group), **OBJECTS).train()


def test_a_run_goes_on_over_two_ranks_to_the_bit_and_then_in_one_process(ranks: Ranks, place: Path) -> None:
    """With rollouts of two coming steps in the checkpoint."""

    def config(run: str, steps: int) -> RLConfig:
        window = [*REPEATABLE, "async_training.max_staleness=2", "trainer.test_freq=2", KEEP]
        return settings(place, *window, *HEADS, f"trainer.total_steps={steps}", f"trainer.output_dir={place / run}")

    for run, steps in (("straight", 4), ("stopped", 2), ("stopped", 4)):
        ranks.run(rank_runs, [config(run, steps)] * 2)
    runs = [place / run for run in ("straight", "stopped")]
    state = json.loads((runs[1] / "checkpoint-2" / "trainer_state.json").read_text())
    waiting = state["extra"]["rollouts"]["groups"]
    assert len(waiting) == 10 and all(group["rewards"] for group in waiting)
    assert (
        repeatable_metrics(runs[0]) == repeatable_metrics(runs[1])
        and repeatable_metrics(runs[0])[-1]["staleness_max"] == 2
    )
    exported = [dict(named_weights(forerun.load(run / "model"))) for run in runs]
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])
    ranks.run(rank_runs, [config("straight", 5)] * 2)
    AsyncRLTrainer(config("stopped", 5), reward=ShareOfWord(), **OBJECTS).train()
    assert repeatable_metrics(runs[1])[-1] == pytest.approx(repeatable_metrics(runs[0])[-1], rel=1e-3, abs=1e-5)
    samples = [[json.loads(line) for line in (run / "samples.jsonl").open()] for run in runs]
    assert [line["response"] for line in samples[0]] == [line["response"] for line in samples[1]]


class Dying(NativeEngine):
    """Fails at its first request."""

    def generate(self, *_: Any) -> Any:
        raise ForerunError("the power is gone")


class Strange(NativeEngine):
    """Drafts with weights of its own."""

    def drafter_digest(self) -> str:
        return "5" * 64


class GivingUp(NativeEngine):
    """Takes the first weights, and of the next ones two tensors only."""

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        if version > 0:
            for _, _ in zip(range(2), through(named_tensors), strict=False):
                pass
            raise ForerunError("the line is down")
        super().update_weights(named_tensors, version)


def through(named_tensors: NamedTensors) -> Iterator[Named]:
    """A generator, as between a trainer and its servers: when it is dropped it closes what it reads from."""
    yield from named_tensors


def worker(config: RLConfig, kind: type[NativeEngine], name: str) -> LocalWorker:
    model = load_model(config.model, config.mtp, torch.device("cpu"), config.trainer.seed)
    return LocalWorker(kind(model, num_speculative_tokens=2, products="linear"), 16, name)


def rank_loses_workers(group: dist.ProcessGroup, config: RLConfig) -> dict[str, Any]:
    own: dict[str, Any] = {}
    replaced: list[str] = []

    def replace_worker(name: str) -> LocalWorker:
        replaced.append(name)
        return worker(config, *{"dying": (GivingUp, "giving up"), "giving up": (NativeEngine, "sound")}[name])

    if group.rank() == 0:
        own = {"workers": [worker(config, Dying, "dying")], "replace_worker": replace_worker}
    found = trains(AsyncRLTrainer(config, reward=ShareOfWord(), mesh=mesh_of(group), **OBJECTS, **own))
    return {**found, "replaced": replaced}


def test_workers_that_are_lost_cost_neither_responses_nor_the_other_rank(ranks: Ranks, place: Path) -> None:
    """The only worker dies while rank 0 waits for a step's groups; the next one in the midst of an update; a third one
    takes its place at once."""
    config = settings(place, *TURNS, *JOINT)
    expected = trains(AsyncRLTrainer(config, reward=ShareOfWord(), **OBJECTS))
    found = ranks.run(rank_loses_workers, [config] * 2)
    assert found[0]["replaced"] == ["dying", "giving up"] and found[1]["replaced"] == []
    for one in found:
        assert one["responses"] == expected["responses"]
        assert_close(one["weights"], expected["weights"])
        assert one["reports"][2]["rollout_workers"] == 1 and one["reports"][2]["requests_reissued"] == 20
        assert all(report["drafter_in_sync"] == 1 for report in one["reports"][:3])


class Broken:
    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        raise RuntimeError("the judge\nis out")


class Failing:
    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        return [RewardResult(0.0, "exception", "ZeroDivisionError")] * len(requests)


def rank_fails(group: dist.ProcessGroup, argument: tuple[RLConfig, str]) -> str:
    config, how = argument
    own: dict[str, Any] = {}
    reward = Broken() if "broken" in how else Failing() if how == "failing reward" else ShareOfWord()
    if group.rank() == 0 and how.startswith("no workers"):
        own["workers"] = [worker(config, Dying, "dying")]
        if how.endswith("replaced"):
            own["replace_worker"] = lambda name: worker(config, Dying, name)
    if group.rank() == 0 and how == "strange drafter":
        own["workers"] = [worker(config, Strange, "strange")]
    kind: Any = RLTrainer if "synchronous" in how else AsyncRLTrainer
    made = kind(config, reward=reward, mesh=mesh_of(group), prompts=PROMPTS, eval_prompts=PROMPTS[:3], **own)
    with pytest.raises(Exception) as failed:
        made.evaluate() if "evaluat" in how else made.turn(pause=False)
    made.close()
    return f"{failed.type.__name__}: {failed.value}"


STRANGE = "alarm drafter_digest_mismatch at step 0: the rollout engine's drafter (555555555555) is not the trainer's"
LOST = "every rollout worker is lost: rollout worker dying: the power is gone; the same command goes on"


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("broken reward", "RuntimeError: the judge\nis out", "ForerunError: rank 0: the judge is out"),
        ("broken evaluation", "RuntimeError: the judge\nis out", "ForerunError: rank 0: the judge is out"),
        ("broken reward, synchronous", "RuntimeError: the judge\nis out", "ForerunError: rank 0: the judge is out"),
        ("failing reward", "ForerunError: step 1: the reward failed on all 20", "ForerunError: step 1: the reward fai"),
        ("strange drafter", f"AlarmError: {STRANGE}", f"AlarmError: {STRANGE}"),
        ("no workers", f"ForerunError: {LOST}", f"ForerunError: rank 0: {LOST}"),
        ("no workers to evaluate", f"ForerunError: {LOST}", f"ForerunError: rank 0: {LOST}"),
        ("no workers, replaced", f"ForerunError: {LOST}", f"ForerunError: rank 0: {LOST}"),
    ],
)
def test_what_fails_on_rank_0_ends_both(ranks: Ranks, place: Path, how: str, first: str, second: str) -> None:
    mode = [] if "synchronous" in how else REPEATABLE
    found = ranks.run(rank_fails, [(settings(place, *mode, *JOINT), how)] * 2)
    for said, expected in zip(found, (first, second), strict=True):
        assert said.startswith(expected)  # and is of no limit of a collective


def rank_gathers(group: dist.ProcessGroup, _: None) -> list[Any]:
    """Rank 0 reads weights in every way; both return what it made of them."""
    mtp = MTPConfig(enable=True, enable_train=True)
    engine = TorchEngine(attach(make_model(), mtp, init="plain", seed=0), TorchEngineConfig(), mesh=mesh_of(group))
    first = FirstRank(RankGroup(mesh_of(group)), engine)
    called: list[str] = []

    def nothing() -> str:
        called.append("nothing")
        return "no weights"

    def twice() -> list[str]:
        called.append("twice")
        return [digest(first.named_weights()), digest(first.named_weights()), digest(first.drafter_weights())]

    def in_part() -> str:
        called.append("in part")
        reader = through(first.named_weights())
        name, _ = next(reader)
        reader.close()
        first.drafter_weights()  # and not read at all
        return name

    def breaks_off() -> None:
        called.append("breaks off")
        for _ in through(first.named_weights()):
            raise WorkerLostError("gone")

    said: list[Any] = [first.does(work) for work in (nothing, twice, in_part)]
    with pytest.raises(ForerunError) as failed:
        first.does(breaks_off)
    said += [str(failed.value).removeprefix("rank 0: "), first.does(twice)]
    assert called == (["nothing", "twice", "in part", "breaks off", "twice"] if group.rank() == 0 else [])
    return said


def test_weights_are_gathered_as_often_and_as_far_as_rank_0_asks(ranks: Ranks) -> None:
    model = attach(make_model(), MTPConfig(enable=True, enable_train=True), init="plain", seed=0)
    engine = TorchEngine(model, TorchEngineConfig())
    whole, head = digest(engine.named_weights()), digest(engine.drafter_weights())
    name, _ = next(engine.named_weights())
    for said in ranks.run(rank_gathers, [None] * 2):
        assert said == ["no weights", [whole, whole, head], name, "gone", [whole, whole, head]]


def test_gathering_that_fails_is_not_taken_for_a_workers_failure() -> None:
    """The other ranks are in the midst of it: rank 0 has nothing to tell them, whoever swallows the failure."""

    class Torn(TorchEngine):
        def named_weights(self) -> WeightStream:
            return WeightStream([(name, torch.zeros(1)) for name in "abc"], self.made())

        def made(self) -> Iterator[Named]:
            yield from [("a", torch.zeros(1)), ("b", torch.zeros(1))]
            raise torch.OutOfMemoryError("no room for c")

    class Told(RankGroup):
        def agree(self, value: Any) -> Any:
            said.append(value)
            return value

    said: list[Any] = []
    first = FirstRank(Told(), Torn(make_model(), TorchEngineConfig()))

    def swallows() -> str:
        with pytest.raises(torch.OutOfMemoryError):
            list(first.named_weights())
        return "fine"

    with pytest.raises(torch.OutOfMemoryError, match="no room for c"):
        first.does(swallows)
    assert said == [("named_weights", None)]
