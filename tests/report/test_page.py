"""The report page from a run's files: what is on it, what is unknown, what is broken."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from forerun.cli import main
from forerun.errors import UsageError
from forerun.report.charts import MOST_POINTS, Series, chart
from forerun.report.metric_names import describe, markdown_table
from forerun.report.numbers import shown, tick_labels, ticks
from forerun.report.page import render, write_report
from forerun.report.run_files import read_runs
from tests.report.runs import HOSTILE, rl_run, write_run

DOCS = Path(__file__).parents[2] / "docs"
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Reader(HTMLParser):
    """Elements with their attributes, text by section heading, and whether every element was closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.marks: list[str] = []
        self.heading = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "h2":
            self.heading = ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["h2"]:
            self.heading += data
        if self.open[-1:] == ["mark"]:
            self.marks.append(data)
        if self.open[-1:] not in (["script"], ["style"]):
            self.text[self.heading] = self.text.get(self.heading, "") + data + " "

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def read(*runs: Path) -> Reader:
    return Reader(render(read_runs(runs)))


def test_one_run_is_shown_whole(tmp_path: Path) -> None:
    page = read(rl_run(tmp_path / "one"))
    assert {"Overview", "Alarms", "Reward", "Acceptance", "Losses", "Policy", "Speed"} <= page.text.keys()
    assert "6 of 10" in page.text["Overview"] and "12s" in page.text["Overview"]
    assert "reward_mean" in page.text["Overview"] and "0.75" in page.text["Overview"]
    # Known for the last time at step 6, best at 6; the loss of depth 1 was nan at 2.
    assert "1.875" in page.text["Overview"]
    assert "acceptance_never" in page.text["Alarms"] and "2 times, steps 2 to 5" in page.text["Alarms"]
    assert "said at 5" in page.text["Alarms"]
    assert "acceptance/depth_2" in page.text["Acceptance"] and "custom/<i>" in page.text["Other metrics"]
    assert "3 of 5 tokens accepted drafts" in page.text["Sample completions"]
    assert "n: 8" in page.text["Configuration"] and "What differs" not in page.text["Configuration"]
    assert page.marks[0] == "Marked" and page.marks[1] == " answer" and len(page.marks) == 1 + 2 * 2


def test_no_text_becomes_markup(tmp_path: Path) -> None:
    name = "<b>run"
    page = read(rl_run(tmp_path / name))
    assert page.count("script") == 1 and page.count("img") == 0
    assert page.count("i") == 0
    visible = HOSTILE.replace("\x00", "\ufffd").replace("\ud800", "\ufffd")
    assert page.text["Sample completions"].count(visible.strip()) >= 2
    html = render(read_runs([tmp_path / name]))
    html.encode()  # no lone surrogates
    assert "taken'</script>" not in html and "<title>&lt;b&gt;run - forerun report</title>" in html
    assert not re.search(r"(src|href)=\"(?!data:|#)", html)


def test_unknown_is_a_gap_and_never_zero() -> None:
    figure = chart("t", [Series("s", [(1, 1.0), (2, 2.0), (3, None), (4, 3.0), (5, 4.0), (6, None), (7, 5.0)])])
    group = next(element for element in figure.iter("g"))
    paths = [path.get("d") or "" for path in group.iter("path")]
    assert [path.count("L") for path in paths] == [1, 1] and len(list(group.iter("circle"))) == 1
    data = json.loads(figure.get("data-chart") or "")
    assert data["series"][0][2] == [3, None] and data["series"][0][1] == [2, "2"]


def test_what_is_not_finite_is_marked_and_named(tmp_path: Path) -> None:
    figure = chart("t", [Series("s", [(1, 1.0), (2, float("nan")), (3, float("inf")), (4, 2.0)])])
    titles = [title.text for title in figure.iter("title")]
    assert titles == ["s: nan at step 2", "s: inf at step 3"]
    run = write_run(tmp_path / "r", [{"step": 1, "loss": "nan"}, {"step": 2, "loss": "-inf"}], config="a: 1\n")
    page = read(run)
    assert "-inf" in page.text["Overview"] and "No finite value" in page.text["Losses"]
    assert page.count("figure") == 1


def test_long_curves_are_thinned_and_keep_their_spikes() -> None:
    points: list[tuple[int, float | None]] = [(step, 1.0 + step % 7 / 100) for step in range(100_000)]
    points[54_321] = (54_321, 9.0)
    figure = chart("t", [Series("s", points)])
    kept = json.loads(figure.get("data-chart") or "")["series"][0]
    assert len(kept) <= MOST_POINTS + 3 and [54_321, "9"] in kept
    assert any("running mean" in (text.text or "") for text in figure.iter("p"))


def test_several_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    runs = [rl_run(tmp_path / "a" / "run"), rl_run(tmp_path / "b" / "run", lift=0.25, seed=1)]
    page = read(*runs)
    overview = page.text["Overview"]
    assert "a/run: last" in overview and "b/run: best" in overview
    assert "a/run" in page.text["Reward"] and "b/run" in page.text["Reward"]
    differing = page.text["Configuration"].partition("config.yaml of")[0]
    assert "trainer.seed" in differing and "rollout.n" not in differing
    styles = {attrs.get("class") for tag, attrs in page.tags if tag == "g"}
    assert {"series c0 d0", "series c1 d0", "series c1 d1"} <= styles


def test_torn_and_foreign_lines_are_left_out_with_a_note(tmp_path: Path) -> None:
    run = rl_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'[1]\n{"step": "x"}\n{"step": 6, "entropy": 0.5}\n{"step": 7, "rew\xff')
    (run / "config.yaml").write_text("a: [")
    (found,) = read_runs([run])
    assert found.metrics["entropy"][-1] == (6, 0.5) and found.last_step == 6
    assert "metrics.jsonl: 3 lines left out, torn or not of a run's form" in found.notes
    assert any(note.startswith("config.yaml is not valid YAML") for note in found.notes)
    assert all("\n" not in note for note in found.notes)
    render([found])


@pytest.mark.parametrize("missing", ["metrics.jsonl", "samples.jsonl", "config.yaml"])
def test_a_missing_file_is_a_note(tmp_path: Path, missing: str) -> None:
    run = rl_run(tmp_path / "run")
    (run / missing).unlink()
    assert f"{missing} is missing" in read(run).text["Overview"]


def test_an_sft_run_misses_nothing_for_having_no_samples(tmp_path: Path) -> None:
    metrics = [{"step": s, "loss": 2.0 / (s + 1), "val/loss": 2.5, "mtp/depth_1/loss": 3.0} for s in range(4)]
    page = read(write_run(tmp_path / "sft", metrics, config="optim:\n  lr: 0.1\n"))
    assert "SFT" in page.text["Overview"] and "missing" not in page.text["Overview"]
    assert "Held-out loss" in page.text["Losses"] and "Sample completions" not in page.text


def test_old_samples_without_tokens_are_shown_plain(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", [{"step": 1, "reward_mean": 1.0}], [{"step": 1, "prompt": "p", "response": "r"}])
    page = read(run)
    assert "accepted drafts not known" in page.text["Sample completions"] and page.marks == []


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = rl_run(tmp_path / "parent" / "run")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "page.html"
    for arguments, message in [
        ([tmp_path / "nowhere"], "does not exist"),
        ([run / "metrics.jsonl"], "is a file"),
        ([tmp_path / "empty"], "holds no run"),
        ([tmp_path / "parent"], f"did you mean {run}?"),
        ([run, run / ".." / "run"], "given twice"),
    ]:
        assert main(["report", *map(str, arguments), "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
    assert not out.exists()
    with pytest.raises(UsageError, match="is a directory"):
        write_report([run], tmp_path)
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n" and out.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (12345.678, "12,346"), (1234.0, "1,234"), (0.123456, "0.1235"), (2e-6, "2e-06"),
     (float("nan"), "nan"), (float("-inf"), "-inf"), (3e9, "3e+09"), (-0.5, "-0.5")],
)  # fmt: skip
def test_numbers_are_shown_as_people_read_them(value: float | None, text: str) -> None:
    assert shown(value) == text


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0]) and tick_labels(ticks(0, 1))[1] == "0.2"
    assert ticks(3, 3) == [3]
    for low, high in [(-7.3, 11.2), (0.001, 0.0012), (1e-9, 4e-9), (0, 98765)]:
        values = ticks(low, high)
        assert 2 <= len(values) <= 6 and low <= values[0] + 1e-12 and values[-1] <= high * (1 + 1e-9)
        assert len(set(tick_labels(values))) == len(values)


def test_the_metrics_are_documented() -> None:
    assert markdown_table() in (DOCS / "metrics.md").read_text(encoding="utf-8")
    held_out = describe("gsm8k/mtp/depth_2/loss")
    assert held_out is not None and held_out.better == "low" and "held out, on gsm8k" in held_out.meaning
    assert describe("nonsense") is None
