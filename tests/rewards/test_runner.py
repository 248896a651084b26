"""A reward function may raise, hang or end its process: each costs one response and nothing else."""

import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest

from forerun.errors import UsageError
from forerun.rewards.overlong import overlong_penalty
from forerun.rewards.protocol import RewardRequest
from forerun.rewards.runner import RewardRunner

FUNCTIONS = """
import asyncio, os, signal, sys, time
import numpy

def mine(prompt, response, ground_truth, extra):
    print("noise on stdout")
    if response == "raise":
        raise KeyError("line one\\nline two")
    if response.startswith("tell "):
        open(response[5:], "w").close()
    if response.startswith(("tell ", "hang")):
        while True:
            pass
    if response == "sleep through signals":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(3600)
    if response == "exit":
        print("going down", file=sys.stderr, flush=True)
        os._exit(3)
    if response == "nan":
        return float("nan")
    if response == "text":
        return "0.5"
    if response == "none":
        return None
    if response == "list":
        return [1.0, 2.0]
    if response == "infinite":
        return float("inf")
    if response == "leave":
        sys.exit("enough")
    if response == "steal":
        return len(sys.stdin.read()) + os.system("exec cat | grep -q .")
    if response == "flood":
        for _ in range(64):
            print("x" * (1 << 20))
        print("the end", file=sys.stderr)
        os.abort()
    return len(response) + len(prompt[0]["content"]) + extra["bonus"] + float(ground_truth)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth) + (data_source == "here"), "acc": True}

def rich(data_source, solution_str, ground_truth, extra_info):
    many = {f"field {i}": i for i in range(200)} if solution_str == "many" else {}
    return {
        "score": len(solution_str), "acc": solution_str == "yes", "pred": "x" * 10**6, "seconds": numpy.float32(0.5),
        "bad": float("nan"), 3: 1.0, "n" * 101: 1.0, "parts": [1, 2], **many,
    }

def any_names(**given):
    return given["extra_info"]["bonus"] + len(given["ground_truth"])

async def waits(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.01)
    return {"score": 0.25}

def lacking(solution_str, ground_truth):
    return 1.0

def no_score(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}

def weighted(prompt, response, ground_truth, extra, weight=1.0):
    return weight * len(response)

not_a_function = 3
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def request(response):
    return RewardRequest([{"role": "user", "content": "abc"}], response, "0.5", "here", {"bonus": 10})


def test_events_cost_one_response_each(source):
    responses = ["ok", "raise", "hang", "ok", "sleep through signals", "exit", "leave", "nan", "text", "none", "list"]
    responses += ["infinite", "longer"]
    with RewardRunner(f"{source}:mine", time_limit_s=2.0) as runner:
        results = runner.score([request(r) for r in responses])
    assert [r.event for r in results] == [
        None, "exception", "timeout", None, "timeout", "died", "died", *["not_a_number"] * 5, None,
    ]  # fmt: skip
    assert [r.score for r in results] == [15.5, 0, 0, 15.5, *[0] * 8, 19.5]
    assert results[1].detail == "KeyError: 'line one\\nline two'"
    assert results[2].detail == "no result within 2 s"
    assert [r.detail for r in results[5:7]] == ["going down", "enough"]
    assert [r.detail for r in results[7:12]] == [
        f"the reward returned {what}"
        for what in (
            "nan",
            "a str, which is no number",
            "a NoneType, which is no number",
            "a list, which is no number",
            "inf",
        )
    ]
    assert runner.events == {"exception": 1, "timeout": 2, "died": 2, "not_a_number": 5}


def test_a_flood_of_output_is_read_away_and_its_end_kept(source):
    with RewardRunner(f"{source}:mine", time_limit_s=30.0) as runner:
        result = runner.score([request("flood")])[0]
        assert (result.event, result.detail) == ("died", "the end")
        assert 0 < len(runner._all[0]._log._kept) <= 4096
        assert runner.score([request("ok")])[0].score == 15.5


def test_a_function_that_reads_its_input_gets_nothing_and_takes_no_request(source):
    with RewardRunner(f"{source}:mine", time_limit_s=10.0) as runner:
        results = runner.score([request("steal"), request("ok")])
    assert [(r.score, r.event) for r in results] == [(256.0, None), (15.5, None)]  # grep found nothing


def test_a_worker_that_cannot_be_started_again_costs_its_response_only(source, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(source.read_text())
    with RewardRunner(f"{own}:mine") as runner:
        own.rename(tmp_path / "gone.py")
        results = runner.score([request("exit"), request("ok")])
        assert [r.event for r in results] == ["died", "died"]
        assert "no such file" in results[1].detail
        (tmp_path / "gone.py").rename(own)
        assert runner.score([request("ok")])[0].score == 15.5


def test_workers_share_the_work_and_keep_the_order(source):
    with RewardRunner(f"{source}:mine", time_limit_s=30, num_workers=3) as runner:
        results = runner.score([request("x" * i) for i in range(1, 30)])
        assert [r.score for r in results] == [13.5 + i for i in range(1, 30)]


def test_kwargs_reach_a_function_of_the_users_own_and_no_built_in(source):
    with RewardRunner(f"{source}:weighted", kwargs={"weight": 2.5}) as runner:
        assert runner.score([request("four")])[0].score == 10.0
    with pytest.raises(UsageError, match="takes no kwargs, but got weight"):
        RewardRunner("exact_match", kwargs={"weight": 2.5})


def test_verls_signature(source):
    with RewardRunner(f"{source}:compute_score") as runner:
        assert [r.score for r in runner.score([request("0.5"), request("x")])] == [2.0, 1.0]


def test_a_dict_s_numbers_are_kept(source):
    with RewardRunner(f"{source}:rich") as runner:
        yes, many = runner.score([request("yes"), request("many")])
    assert (yes.score, yes.event) == (3.0, None)
    assert yes.fields == {"acc": 1.0, "seconds": 0.5}
    assert len(many.fields) == 64 and many.fields["acc"] == 0.0


def test_every_shape_of_verls_function(source):
    with RewardRunner(f"{source}:any_names") as runner:
        assert runner.score([request("x")])[0].score == 13.0
    with RewardRunner(f"{source}:waits") as runner:
        assert runner.score([request("x")])[0].score == 0.25
    with RewardRunner(f"{source}:no_score") as runner:
        result = runner.score([request("x")])[0]
    assert (result.event, result.detail) == ("not_a_number", "the reward returned a dict without 'score'")


def test_module_path_and_built_ins_by_source():
    with RewardRunner("forerun.rewards.answers:exact_match") as runner:
        assert runner.score([request("0.5")])[0].score == 1.0
    entry = {"question": "1+1", "answer": "2", "metadata": {}}
    with RewardRunner("auto") as runner:
        results = runner.score(
            [
                RewardRequest([], "#### 0.50", "1/2", "openai/gsm8k"),
                RewardRequest([], "it is 2", None, "reasoning_gym/chain_sum", {"task": "chain_sum", "entry": entry}),
                RewardRequest([], "it is 3", "3", "reasoning_gym/chain_sum"),
                RewardRequest([], "hm", None, "openai/gsm8k"),
            ]
        )
    assert [(r.score, r.event) for r in results] == [(1.0, None)] * 3 + [(0.0, "exception")]
    assert "needs a ground truth" in results[3].detail


def test_closing_ends_the_workers(source):
    runner = RewardRunner(f"{source}:mine", num_workers=2)
    processes = [worker._process for worker in runner._all]
    assert all(process is not None and process.poll() is None for process in processes)
    runner.close()
    assert all(process is not None and process.poll() is not None for process in processes)
    runner.close()


def test_closing_ends_what_is_being_judged_however_long_its_limit(source, tmp_path):
    """As Ctrl-C does: one thread waits for a function that hangs while another one closes."""
    runner = RewardRunner(f"{source}:mine", time_limit_s=3600)
    told = tmp_path / "told"

    def score() -> None:
        with suppress(CancelledError):  # the second one is not begun
            runner.score([request(f"tell {told}"), request("hang")])

    judge = threading.Thread(target=score, daemon=True)
    judge.start()
    while not told.exists():
        time.sleep(0.01)
    runner.close()
    judge.join(60)
    assert not judge.is_alive() and runner._all[0]._process is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("maths", "is not one of math, exact_match"),
        ("nowhere.py:f", "no such file"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("{source}:nothing", "has no function 'nothing'"),
        ("{source}:not_a_function", "has no function 'not_a_function'"),
        ("{source}:lacking", "cannot be called with (data_source, solution_str, ground_truth, extra_info)"),
        ("builtins:len", "cannot be called with (prompt, response, ground_truth, extra)"),
    ],
)
def test_a_function_that_is_not_there_is_said_at_once(source, spec, reason):
    with pytest.raises(UsageError, match=r"^reward function: ") as error:
        RewardRunner(spec.format(source=source))
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_overlong_penalty_is_the_ramp_of_dapo():
    """Equation 13 of the DAPO paper, and its three parts in numbers."""
    for length in range(0, 131):
        if length <= 80:
            expected = 0.0
        elif length <= 100:
            expected = (80 - length) / 20
        else:
            expected = -1.0
        assert overlong_penalty(length, 100, 20) == pytest.approx(expected)
    assert overlong_penalty(90, 100, 20, penalty_factor=0.4) == pytest.approx(-0.2)
    with pytest.raises(ValueError, match="overlong_buffer_len=0"):
        overlong_penalty(10, 100, 0)
