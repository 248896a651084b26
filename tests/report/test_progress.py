"""Progress lines in a log: what they say and how often."""

from __future__ import annotations

import io

import pytest

from forerun.report.progress import ProgressBar, duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_about_every_ten_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    with ProgressBar("rollout", total=100, unit="prompts", file=out, clock=clock) as bar:
        for _ in range(50):
            clock.now += 0.5
            bar.advance(2, "acceptance 1.43")
    assert out.getvalue().splitlines() == [
        "rollout: 100 prompts to do",
        "rollout:  40%  40/100 prompts  4 prompts/s  ETA 15s  acceptance 1.43",
        "rollout:  80%  80/100 prompts  4 prompts/s  ETA 5.0s  acceptance 1.43",
        "rollout: done in 25s  100 prompts  acceptance 1.43",
    ]


def test_slow_steps_and_unknown_totals() -> None:
    out, clock = io.StringIO(), Clock()
    bar = ProgressBar("train", total=10, file=out, clock=clock)
    assert bar.rate is None and bar.eta is None and bar.state() == "  0%  0/10 steps"
    clock.now += 60
    bar.advance()
    assert bar.state() == " 10%  1/10 steps  60 s each  ETA 9:00"
    endless = ProgressBar("serve", total=None, unit="requests", file=out, clock=clock)
    clock.now += 2
    endless.advance(6)
    assert endless.eta is None and endless.state() == "6 requests  3 requests/s"


def test_one_of_anything_and_a_total_that_turns_out_smaller() -> None:
    out, clock = io.StringIO(), Clock()
    with ProgressBar("evaluate", total=1, unit="batches", file=out, clock=clock) as bar:
        bar.advance()
        assert bar.state() == "100%  1/1 batch"
    assert out.getvalue().splitlines() == ["evaluate: 1 batch to do", "evaluate: done in 0.0s  1 batch"]
    bar = ProgressBar("train", total=80, file=out, clock=clock)
    clock.now += 4
    bar.advance(4)
    assert bar.state() == "  5%  4/80 steps  1 steps/s  ETA 1:16"
    bar.expect(8)
    assert bar.state() == " 50%  4/8 steps  1 steps/s  ETA 4.0s"


def test_the_end_comes_nearer_while_a_slow_step_is_at_work() -> None:
    bar = ProgressBar("rl", total=3, file=io.StringIO(), clock=(clock := Clock()))
    clock.now += 60
    bar.advance()
    clock.now += 50
    assert bar.state() == " 33%  1/3 steps  60 s each  ETA 1:10"
    clock.now += 90
    assert bar.state() == " 33%  1/3 steps  60 s each  ETA 0.0s"


def test_what_an_earlier_run_did_is_not_taken_for_speed() -> None:
    out, clock = io.StringIO(), Clock()
    with ProgressBar("train", total=100, file=out, clock=clock, done=90) as bar:
        clock.now += 5
        bar.advance()
    assert bar.state() == " 91%  91/100 steps  5 s each  ETA 45s"
    assert out.getvalue().splitlines()[0] == "train: 10 of 100 steps to do"


def test_a_failure_is_not_called_done() -> None:
    out, clock = io.StringIO(), Clock()
    with pytest.raises(ValueError), ProgressBar("train", total=10, file=out, clock=clock) as bar:
        clock.now += 3
        bar.advance(4)
        raise ValueError
    assert out.getvalue().splitlines()[-1] == "train: stopped after 3.0s  4 steps"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out, clock = Terminal(), Clock()
    with ProgressBar("train", total=4, file=out, clock=clock) as bar:
        clock.now += 2
        bar.advance(2, "loss 1.0")
    text = out.getvalue()
    assert "\x1b[" in text and " 50%  2/4 steps" in text and "ETA 2.0s  loss 1.0" in text
    assert text.rstrip().endswith("train: done in 2.0s  2 steps  loss 1.0")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.04, "0.0s"), (9.94, "9.9s"), (59.4, "59s"), (187, "3:07"), (3765, "1:02:45")]
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
