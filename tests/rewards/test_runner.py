"""A reward function may raise, hang or end its process: each costs one response and nothing else."""

import pytest

from forerun.errors import UsageError
from forerun.rewards.overlong import overlong_penalty
from forerun.rewards.protocol import RewardRequest
from forerun.rewards.runner import RewardRunner

FUNCTIONS = """
import os, signal, sys, time

def mine(prompt, response, ground_truth, extra):
    print("noise on stdout")
    if response == "raise":
        raise KeyError("line one\\nline two")
    if response == "hang":
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
        return "well done"
    return len(response) + len(prompt[0]["content"]) + extra["bonus"] + float(ground_truth)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth) + (data_source == "here"), "acc": True}

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
    responses = ["ok", "raise", "hang", "ok", "sleep through signals", "exit", "nan", "text", "longer"]
    with RewardRunner(f"{source}:mine", time_limit_s=2.0) as runner:
        results = runner.score([request(r) for r in responses])
    assert [r.event for r in results] == [
        None, "exception", "timeout", None, "timeout", "died", "not_a_number", "exception", None,
    ]  # fmt: skip
    assert [r.score for r in results] == [15.5, 0, 0, 15.5, 0, 0, 0, 0, 19.5]
    assert results[1].detail == "KeyError: 'line one\\nline two'"
    assert results[2].detail == "no result within 2 s"
    assert results[5].detail == "going down"
    assert runner.events == {"exception": 2, "timeout": 2, "died": 1, "not_a_number": 1}


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


def test_module_path_and_built_ins_by_source():
    with RewardRunner("forerun.rewards.answers:exact_match") as runner:
        assert runner.score([request("0.5")])[0].score == 1.0
    entry = {"question": "1+1", "answer": "2", "metadata": {}}
    with RewardRunner("auto") as runner:
        results = runner.score(
            [
                RewardRequest([], "#### 0.50", "1/2", "openai/gsm8k"),
                RewardRequest([], "it is 2", None, "reasoning_gym/chain_sum", {"task": "chain_sum", "entry": entry}),
                RewardRequest([], "hm", None, "openai/gsm8k"),
            ]
        )
    assert [(r.score, r.event) for r in results] == [(1.0, None), (1.0, None), (0.0, "exception")]
    assert "needs a ground truth" in results[2].detail


def test_closing_ends_the_workers(source):
    runner = RewardRunner(f"{source}:mine", num_workers=2)
    processes = [worker._process for worker in runner._all]
    assert all(process is not None and process.poll() is None for process in processes)
    runner.close()
    assert all(process is not None and process.poll() is not None for process in processes)
    runner.close()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("maths", "is not one of math, exact_match"),
        ("nowhere.py:f", "no such file"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("{source}:nothing", "has no function 'nothing'"),
        ("{source}:not_a_function", "has no function 'not_a_function'"),
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
