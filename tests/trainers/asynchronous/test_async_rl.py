"""Asynchronous RL: equal to synchronous where it must be, stale as much as it may be, and whole after any loss."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.engines.ranks import RankGroup
from forerun.engines.torch_engine import TorchEngine
from forerun.errors import ForerunError
from forerun.report.metric_names import describe
from forerun.rewards.protocol import RewardRequest, RewardResult
from forerun.rollout.local_worker import LocalWorker
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import SamplingParams
from forerun.rollout.scoring import score_texts
from forerun.trainers.asynchronous.ledger import Group
from forerun.trainers.asynchronous.stored import restored_completion
from forerun.trainers.asynchronous.trainer import AsyncRLTrainer
from forerun.trainers.ranked import RankedScorer
from forerun.trainers.rl_run import SharedClock
from forerun.trainers.rollout_engines import make_rollout_engine
from tests.logged import repeatable_metrics
from tests.trainers.asynchronous.runs import (
    ASYNC,
    DRAFT,
    REPEATABLE,
    asynchronous,
    closing,
    gated,
    synchronous,
    training_engine,
)
from tests.trainers.tiny_rl import MTP, PROMPTS, assert_same, settings, weights


@pytest.mark.parametrize("more", [[], DRAFT], ids=["plain", "drafts"])
def test_without_staleness_it_is_synchronous_training_to_the_bit(tmp_path: Path, more: list[str]) -> None:
    common = ["rollout.deterministic=true", "train_batch_size=2", "ppo_mini_batch_size=2", *more]
    plain = synchronous(tmp_path, *common)
    with closing(asynchronous(tmp_path, *common, *REPEATABLE, "async_training.max_staleness=0")) as made:
        for _ in range(3):
            one, other = plain.turn(pause=False), made.turn(pause=False)
            assert [s.completion for s in made.samples] == [s.completion for s in plain.samples]
            same = ("reward_mean", "loss", "grad_norm", "entropy", "acceptance_length", "log_prob_gap_max")
            assert {name: other[name] for name in same} == {name: one[name] for name in same}
            assert other["staleness_max"] == other["partial_rollout_fraction"] == 0
        assert_same(weights(plain), weights(made))


@pytest.mark.parametrize(("staleness", "interval"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_tokens_are_as_stale_as_the_window_allows(tmp_path: Path, staleness: int, interval: int) -> None:
    window = [f"async_training.max_staleness={staleness}", f"async_training.trigger_parameter_sync_step={interval}"]
    with closing(asynchronous(tmp_path, *REPEATABLE, *window, "optim.lr=3e-2")) as made:
        for step in range(7):
            metrics = made.turn(pause=False)
            # The oldest weights that may sample for a step, among those that the workers get.
            oldest = max(0, -(-(step - staleness) // interval) * interval)
            assert metrics["staleness_mean"] == metrics["staleness_max"] == step - oldest <= staleness
            # The ratio is to the policy that sampled.
            assert (abs(float(metrics["ratio_mean"] or 0) - 1) > 1e-4) == (step > oldest)
            assert all(describe(name) is not None for name in metrics), metrics


def test_an_update_cuts_responses_short_and_the_new_weights_write_them_on(tmp_path: Path) -> None:
    with closing(gated(tmp_path, "optim.lr=3e-2")) as made:
        assert isinstance(made.engine, TorchEngine)
        versions = [copy.deepcopy(made.engine.model)]
        for step in range(4):
            metrics = made.turn(pause=False)
            versions.append(copy.deepcopy(made.engine.model))
            completions = [sample.completion for sample in made.samples]
            assert len(completions) == 12
            # The first step's responses were written at one go; the update before met all later ones on their way.
            expected = {step} if step == 0 else {step - 1, step}
            assert all(set(c.weight_versions) == expected for c in completions)
            assert all(c.weight_versions == sorted(c.weight_versions) for c in completions)
            assert metrics["partial_rollout_fraction"] == (step > 0) and metrics["staleness_max"] == (step > 0)
            # Each token's log-probability is that of the weights that its version names, given all that is before it.
            for version in expected:
                scores = score_texts(versions[version], completions, SamplingParams())
                for c, score in zip(completions, scores, strict=True):
                    own = torch.tensor([v == version for v in c.weight_versions])
                    assert (torch.tensor(c.log_probs, dtype=torch.float64) - score.log_prob)[own].abs().max() < 1e-4
            for c in completions:
                assert len(c.prompt_token_ids) == 2 and c.finish_reason == "length"
                assert c.accepted_draft is not None
                assert len(c.accepted_draft) == len(c.log_probs) == len(c.token_ids) == 24
                assert sum(c.accepted_draft) == c.spec_num_accepted_tokens == sum(c.accepted_per_depth or [])
                assert c.spec_num_draft_tokens == sum(c.drafted_per_depth or [])


def test_a_run_resumes_to_the_bit_with_rollouts_pending(tmp_path: Path) -> None:
    def run(directory: str, steps: int) -> AsyncRLTrainer:
        output = f"trainer.output_dir={tmp_path / directory}"
        limits = ["trainer.save_freq=2", f"trainer.total_steps={steps}", "train_batch_size=2", "ppo_mini_batch_size=2"]
        made = asynchronous(tmp_path, *REPEATABLE, *DRAFT, *limits, "async_training.max_staleness=2", output)
        made.train()
        return made

    straight = run("straight", 5)
    stopped = run("stopped", 3)
    assert stopped.ledger.num_ready == 4  # two steps' groups wait in the checkpoint
    torch.manual_seed(77)
    resumed = run("stopped", 5)
    assert_same(weights(straight), weights(resumed))
    assert [s.completion for s in straight.samples] == [s.completion for s in resumed.samples]
    logged = repeatable_metrics(tmp_path / "straight")
    assert logged == repeatable_metrics(tmp_path / "stopped") and logged[-1]["staleness_max"] == 2


def test_unfinished_responses_are_in_the_checkpoint_with_what_is_written(tmp_path: Path) -> None:
    with closing(gated(tmp_path)) as made:
        made.turn(pause=True)
        saved = json.loads(json.dumps(made.state_dict()))
        with pytest.raises(ForerunError, match="paused"):
            made.turn(pause=False)
            made.state_dict()
    begun = {(number, place): restored_completion(state) for number, place, state in saved["rollouts"]["written"]}
    assert sorted(begun) == [(4 + prompt, place) for prompt in range(4) for place in range(3)]
    with closing(gated(tmp_path)) as resumed:
        resumed.load_state_dict(saved)
        assert json.loads(json.dumps(resumed.state_dict())) == saved
        metrics = resumed.turn(pause=True)
        assert metrics["partial_rollout_fraction"] == 1 and metrics["staleness_max"] == 1
        for index, sample in enumerate(resumed.samples):
            first = begun[4 + index // 3, index % 3]
            count = len(first.token_ids)
            assert 2 < count < 24 and sample.completion.token_ids[:count] == first.token_ids
            assert sample.completion.log_probs[:count] == first.log_probs
            assert sample.completion.weight_versions == [0] * count + [1] * (24 - count)


ROOT = Path(__file__).parents[3]


class DyingEngine(NativeEngine):
    """Fails once it has finished `lives` requests."""

    lives = 5

    def generate(self, requests: Any, on_finish: Any = None, _: Any = None) -> Any:
        def count(completion: Any) -> None:
            self.lives -= 1
            if self.lives < 0:
                raise ForerunError("the power is gone")
            on_finish(completion)

        return super().generate(requests, count)


def dying_worker(made_for: list[str], name: str, tmp_path: Path) -> LocalWorker:
    engine = training_engine(settings(tmp_path, *made_for))
    return LocalWorker(DyingEngine(engine.model, num_speculative_tokens=2, products="linear"), 4, name)


def sound_worker(made_for: list[str], name: str, tmp_path: Path) -> LocalWorker:
    config = settings(tmp_path, *made_for)
    return LocalWorker(make_rollout_engine(config, training_engine(config)), 4, name)


def test_what_a_lost_worker_held_is_written_by_the_others_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = [*REPEATABLE, *DRAFT]
    with closing(asynchronous(tmp_path, *more)) as whole:
        expected = [(whole.turn(pause=False), [s.completion for s in whole.samples])[1] for _ in range(3)]
    workers = [dying_worker(more, "mortal", tmp_path), sound_worker(more, "sound", tmp_path)]
    with closing(asynchronous(tmp_path, *more, workers=workers)) as made, caplog.at_level(logging.WARNING):
        for step in range(3):
            metrics = made.turn(pause=False)
            assert [s.completion.token_ids for s in made.samples] == [c.token_ids for c in expected[step]]
            assert [s.completion.weight_versions for s in made.samples] == [c.weight_versions for c in expected[step]]
        assert metrics["rollout_workers"] == 1 and metrics["requests_reissued"] > 10  # type: ignore[operator]
    assert "rollout worker mortal: the power is gone" in caplog.text


def test_a_worker_takes_the_place_of_the_last_one(tmp_path: Path) -> None:
    more = [*ASYNC, *DRAFT]
    made = asynchronous(tmp_path, *more, workers=[dying_worker(more, "mortal", tmp_path)])
    with closing(made), pytest.raises(ForerunError, match=r"every rollout worker is lost: .*power is gone"):
        made.turn(pause=False)
    replaced: list[str] = []

    def replace_worker(name: str) -> LocalWorker:
        replaced.append(name)
        return sound_worker(more, f"{name}'s heir", tmp_path)

    mortal = dying_worker(more, "mortal", tmp_path)
    with closing(asynchronous(tmp_path, *more, workers=[mortal], replace_worker=replace_worker)) as made:
        for step in range(3):
            metrics = made.turn(pause=False)
            assert metrics["staleness_max"] <= 1 and metrics["drafter_in_sync"] == 1.0  # type: ignore[operator]
            names = [sample.completion.request_id for sample in made.samples]
            assert names == [f"{step}-{place}-{j}" for place in range(4) for j in range(8)]
    assert replaced == ["mortal"]


def test_held_out_prompts_are_answered_by_the_worker_that_takes_the_last_ones_place(tmp_path: Path) -> None:
    more = [*ASYNC, *DRAFT]
    with closing(asynchronous(tmp_path, *more, eval_prompts=PROMPTS)) as whole:
        expected = whole.evaluate()
    mortal = dying_worker(more, "mortal", tmp_path)
    mortal.engine.lives = 2  # type: ignore[attr-defined]
    objects = {"eval_prompts": PROMPTS, "workers": [mortal]}
    with closing(asynchronous(tmp_path, *more, **objects)) as made, pytest.raises(ForerunError, match="power is gone"):
        made.evaluate()
    objects["workers"] = [dying_worker(more, "mortal", tmp_path)]
    objects["workers"][0].engine.lives = 2
    made = asynchronous(tmp_path, *more, **objects, replace_worker=lambda name: sound_worker(more, name, tmp_path))
    with closing(made):
        assert made.evaluate()["val/reward_mean"] == expected["val/reward_mean"]


def test_judge_and_evaluation_do_not_score_at_once() -> None:
    both = threading.Barrier(2)
    met: list[bool] = []

    class Meets:
        def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
            try:
                both.wait(0.2)
                met.append(True)
            except threading.BrokenBarrierError:
                met.append(False)
            return []

    scorer = RankedScorer(RankGroup(), Meets())
    judge = threading.Thread(target=scorer.score_alone, args=([],))
    judge.start()
    scorer.score([])
    judge.join()
    assert met == [False, False]


def test_a_shared_clock_runs_while_anybody_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = SharedClock()

    def after(seconds: float) -> float:
        now[0] += seconds
        return clock.seconds

    with clock:
        assert after(1) == 1
        with clock:
            assert after(2) == 3  # not twice, and not only at the end
        assert after(4) == 7
    assert after(8) == 7


MEETS = """
import pathlib, time, uuid
def meets(*_):
    here = pathlib.Path({place!r})
    (here / uuid.uuid4().hex).touch()
    until = time.monotonic() + 40
    while len(list(here.iterdir())) < 6:  # two groups of three
        assert time.monotonic() < until, "judged alone"
        time.sleep(0.01)
    return 1.0
"""


def test_groups_are_judged_by_all_workers_of_the_reward(tmp_path: Path) -> None:
    source, place = tmp_path / "reward.py", tmp_path / "met"
    source.write_text(MEETS.format(place=str(place)))
    place.mkdir()
    workers = f"reward={{function: '{source}:meets', num_workers: 6, time_limit_s: 60}}"
    with closing(asynchronous(tmp_path, *ASYNC, "rollout.n=3", workers, reward=None)) as made:
        metrics = made.turn(pause=True)
    assert metrics["reward_events"] == 0 and metrics["reward_mean"] == 1 and metrics["time/reward"] > 0


def test_the_end_does_not_wait_for_a_reward_that_hangs(tmp_path: Path) -> None:
    told, source = tmp_path / "told", tmp_path / "reward.py"
    source.write_text(f"import time\ndef hang(*_):\n    open({str(told)!r}, 'w').close()\n    time.sleep(3600)\n")
    made = asynchronous(tmp_path, *ASYNC, f"reward={{function: '{source}:hang', time_limit_s: 3600}}", reward=None)
    made.ensure_sync()
    made.rollouts.resume()
    while not told.exists():
        time.sleep(0.01)
    ending = threading.Thread(target=made.close, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()


class Poisoned(NativeEngine):
    """Dies of one request, when it has answered all others."""

    poison = "0-2-0"
    answered: list[str]

    def generate(self, requests: Any, on_finish: Any = None, _: Any = None) -> Any:
        sound = [request for request in requests if request.request_id != self.poison]
        self.answered += [request.request_id for request in sound]
        done = super().generate(sound, on_finish) if sound else []
        if len(sound) < len(requests):
            raise ForerunError("the power is gone")
        return done


def test_a_held_out_prompt_that_kills_every_worker_ends_the_run(tmp_path: Path) -> None:
    """That workers answer the others makes none of their replacements one that was not in vain."""
    more = [*ASYNC, *DRAFT]
    answered: list[str] = []
    replaced: list[str] = []

    def mortal(name: str) -> LocalWorker:
        engine = Poisoned(training_engine(settings(tmp_path, *more)).model, num_speculative_tokens=2, products="linear")
        engine.answered = answered
        return LocalWorker(engine, 4, name)

    def replace_worker(name: str) -> LocalWorker:
        assert len(replaced) < 20, "this would go on for ever"
        replaced.append(name)
        return mortal(name)

    objects = {"eval_prompts": PROMPTS, "workers": [mortal("mortal")], "replace_worker": replace_worker}
    made = asynchronous(tmp_path, *more, **objects)
    lost = r"^every rollout worker is lost: rollout worker mortal: the power is gone"
    with closing(made), pytest.raises(ForerunError, match=lost):
        made.evaluate()
    assert replaced == ["mortal"] * 3
    assert sorted(answered) == [f"0-{place}-0" for place in range(len(PROMPTS)) if place != 2]  # once each


def test_workers_end_where_the_next_one_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[NativeEngine] = []

    def one_only(*arguments: Any) -> Any:
        if made:
            raise ForerunError("no room for a second engine")
        made.append(make_rollout_engine(*arguments))
        return made[0]

    monkeypatch.setattr("forerun.trainers.asynchronous.trainer.make_rollout_engine", one_only)
    with pytest.raises(ForerunError, match="no room for a second engine"):
        asynchronous(tmp_path, *ASYNC, "async_training.num_workers=2")
    assert made and not [thread for thread in threading.enumerate() if thread.name.startswith("rollout local")]


FILTER = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=10"]


@pytest.mark.parametrize("mode", [ASYNC, REPEATABLE], ids=["by time", "repeatable"])
def test_dynamic_sampling_trains_on_whole_batches_of_informative_groups(tmp_path: Path, mode: list[str]) -> None:
    window = ["rollout.n=2", "async_training.max_staleness=2"]
    with closing(asynchronous(tmp_path, *mode, *FILTER, *window)) as made:
        drawn = 0
        for _ in range(4):
            metrics = made.turn(pause=False)
            for start in range(0, 8, 2):
                assert len({sample.reward.score for sample in made.samples[start : start + 2]}) == 2
            assert metrics["staleness_max"] <= 2 and len(made.samples) == 8  # type: ignore[operator]
            assert metrics["kept_groups"] == 1 / metrics["num_gen_batches"] <= 1  # type: ignore[operator]
            drawn += round(4 * float(metrics["num_gen_batches"] or 0))
        assert drawn > 16  # some groups were dropped


def test_rewards_that_teach_nothing_end_the_run(tmp_path: Path) -> None:
    class Same:
        def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
            return [RewardResult(1.0)] * len(requests)

    hopeless = asynchronous(tmp_path, *ASYNC, *FILTER, reward=Same())
    with closing(hopeless), pytest.raises(ForerunError, match=r"step 1: \d+ groups in a row had nothing to learn"):
        hopeless.turn(pause=False)

    class Fails:
        def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
            return [RewardResult(0.0, "exception", "ZeroDivisionError")] * len(requests)

    for change in ([*ASYNC, *FILTER], ASYNC):
        broken = asynchronous(tmp_path, *change, reward=Fails())
        with closing(broken), pytest.raises(ForerunError, match="reward failed on all"):
            broken.turn(pause=False)


SET_UPS = {
    "keep only": ["mtp.enable=true"],
    "joint": ["mtp.enable=true", "mtp.enable_train=true"],
    "heads": MTP,
    "rollout": DRAFT,
}


@pytest.mark.parametrize("name", SET_UPS)
def test_the_four_set_ups_train_asynchronously(tmp_path: Path, name: str) -> None:
    with closing(asynchronous(tmp_path, *ASYNC, *SET_UPS[name])) as made:
        before = weights(made)  # type: ignore[arg-type]
        head = {key for key, _ in made.engine.drafter_weights()}
        metrics = [made.turn(pause=False) for _ in range(3)][-1]
        moved = {key for key, tensor in weights(made).items() if not torch.equal(tensor, before[key])}  # type: ignore[arg-type]
        assert moved - head and bool(moved & head) == (name != "keep only")
        assert ("mtp/depth_1/loss" in metrics) == (name != "keep only")
        assert (metrics["acceptance_length"] is not None) == (name == "rollout")
        assert metrics["drafter_in_sync"] == 1.0 and not made.alarms.raised
        assert made.config.algorithm.rollout_correction.bypass_mode is True


def test_the_policy_improves_on_stale_samples(tmp_path: Path) -> None:
    with closing(asynchronous(tmp_path, *REPEATABLE, "optim.lr=3e-2", "async_training.max_staleness=2")) as made:
        rewards = [float(made.turn(pause=False)["reward_mean"] or 0.0) for _ in range(30)]
    assert sum(rewards[:5]) / 5 < 0.15
    assert sum(rewards[-5:]) / 5 > 0.4, rewards


def test_a_failure_of_a_thread_ends_the_run(tmp_path: Path) -> None:
    class Broken:
        def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
            raise RuntimeError("the judge is out")

    made = asynchronous(tmp_path, *ASYNC, reward=Broken())
    with closing(made), pytest.raises(RuntimeError, match="the judge is out"):
        made.turn(pause=False)


def test_groups_may_come_and_go_while_the_trainer_counts_them(tmp_path: Path) -> None:
    class Churning(dict[int, Group]):
        """Lets another thread open groups between any two that are looked at."""

        def values(self) -> Any:
            for group in super().values():
                yield group
                time.sleep(0.002)

    with closing(asynchronous(tmp_path, *ASYNC, "async_training.max_staleness=30")) as made:
        made.ledger.groups = Churning()
        metrics = [made.turn(pause=False) for _ in range(2)]
        assert all(0 <= float(line["queue_depth"] or 0) <= 120 for line in metrics)


def test_held_out_prompts_are_answered_by_the_weights_of_the_step(tmp_path: Path) -> None:
    with closing(asynchronous(tmp_path, *ASYNC, eval_prompts=PROMPTS[:2])) as made:
        first = made.evaluate()
        assert made.evaluate() == first and first.keys() >= {"val/reward_mean"}
        made.turn(pause=True)
        plain = synchronous(tmp_path, engine=made.engine, eval_prompts=PROMPTS[:2])
        assert made.evaluate()["val/reward_mean"] == plain.evaluate()["val/reward_mean"]
        made.turn(pause=False)


def test_the_command_trains_asynchronously_without_ray(tmp_path: Path, checkpoint: Path) -> None:
    rows = [
        {"prompt": p.messages, "reward_model": {"ground_truth": p.ground_truth}, "data_source": ""} for p in PROMPTS
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        "async_training.enable=true",
        f"model.path={checkpoint}",
        f"data.train_files=[{tmp_path / 'prompts.jsonl'}]",
        f"trainer.output_dir={tmp_path / 'run'}",
        "trainer.total_steps=3",
        "trainer.save_freq=2",
        "rollout.max_prompt_length=16",
        "rollout.max_response_length=8",
        "reward.function=exact_match",
    ]
    code = f"""
import sys
from forerun.cli import main
code = main(["rl", {str(ROOT / "recipes" / "rl_speculative.yaml")!r}, *{overrides!r}])
assert "ray" not in sys.modules
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rl: 3 steps to do" in done.stderr and "3 steps  reward" in done.stderr, done.stderr
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [1, 2, 3]
    assert all(0 <= line["staleness_mean"] <= line["staleness_max"] <= 1 for line in logged)
    assert (tmp_path / "run" / "checkpoint-2").is_dir() and (tmp_path / "run" / "model" / "config.json").is_file()
    resolved = (tmp_path / "run" / "config.yaml").read_text()
    assert "bypass_mode: true" in resolved and "max_staleness: 1" in resolved


def test_a_repeatable_run_fills_its_window_before_an_update_however_soon_that_comes(tmp_path: Path) -> None:
    with closing(asynchronous(tmp_path, *REPEATABLE, *FILTER, "rollout.n=2")) as made:
        made.ensure_sync()
        made.rollouts.resume()
        made.rollouts.pause()
        assert made.ledger.room == 0 and made.ledger.num_ready == len(made.ledger.groups) == 8
        assert all(group.answers()[0].weight_versions[0] == 0 for group in made.ledger.groups.values())
