"""The report as a browser shows it: loads nothing, fits a phone, answers to the keyboard, takes no text for markup."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forerun.report.page import write_report
from tests.report.browser import Page, find_browser, page
from tests.report.runs import rl_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    runs = [rl_run(folder / "one"), rl_run(folder / "two", lift=0.5, seed=1)]
    return write_report(runs, folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium here: apt-get install chromium, or name one in FORERUN_BROWSER")
    with page(browser, tmp_path_factory.mktemp("profile")) as made:
        yield made


def test_it_is_one_file_and_runs_no_text(tab: Page, address: str) -> None:
    tab.requests.clear()
    tab.open(address)
    asked = {each for each in tab.requests if not each.startswith(("data:", "about:"))}
    assert asked == {address} and not tab.errors
    assert tab.evaluate("document.title") == "one, two - forerun report"
    assert tab.evaluate("document.scripts.length") == 1 and tab.evaluate("document.images.length") == 0
    # The policy holds even for markup that gets in some other way.
    tab.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/x\" onerror=\"taken=1\">')"
    )
    tab.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert tab.evaluate("typeof taken") == "undefined"
    assert any("Content Security Policy" in error for error in tab.errors)
    tab.errors.clear()


def test_curves_and_marks_are_drawn(tab: Page, address: str) -> None:
    tab.open(address)
    figure = "[...document.querySelectorAll('figure.chart')].find((f) => f.innerText.startsWith('Acceptance length'))"
    # Unknown at two steps: two stretches for each of two runs.
    assert tab.evaluate(f"{figure}.querySelectorAll('path.line').length - {figure}.querySelectorAll('li').length") == 4
    assert tab.evaluate(f"[...{figure}.querySelectorAll('path.line')].every((p) => p.getTotalLength() > 20)")
    colors = f"new Set([...{figure}.querySelectorAll('g path.line')].map((p) => getComputedStyle(p).stroke)).size"
    assert tab.evaluate(colors) == 2
    marks = "[...document.querySelectorAll('details[open] mark')].map((m) => m.innerText)"
    assert " answer" in [text.rstrip("\n") for text in tab.evaluate(marks)]
    box = tab.evaluate(
        "(() => { const m = document.querySelector('details[open] mark').getBoundingClientRect(); return m.width })()"
    )
    assert box > 10


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 1280])
def test_it_fits_and_can_be_read(tab: Page, address: str, width: int, dark: bool) -> None:
    tab.open(address, width=width, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("document.querySelector('figure.chart svg').getBoundingClientRect().width") > 200
    contrast = """(() => {
        const light = (color) => {
            const parts = color.match(/\\d+/g).slice(0, 3).map((part) => {
                const share = part / 255;
                return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
        };
        const behind = (element) => {
            const color = getComputedStyle(element).backgroundColor;
            return color.startsWith("rgba(0, 0, 0, 0") ? behind(element.parentElement) : color;
        };
        const worst = [...document.querySelectorAll("h1, h2, h3, p, td, th, li, a, mark, summary")].map((element) => {
            const pair = [light(getComputedStyle(element).color), light(behind(element))].sort((a, b) => b - a);
            return (pair[0] + 0.05) / (pair[1] + 0.05);
        });
        return Math.min(...worst);
    })()"""
    assert tab.evaluate(contrast) >= 4.5  # WCAG 2.2, 1.4.3


def test_a_chart_answers_to_the_arrow_keys(tab: Page, address: str) -> None:
    tab.open(address)
    read = "document.activeElement.querySelector('.readout').innerText"
    for _ in range(60):
        tab.press("Tab")
        if tab.evaluate("document.activeElement.matches('figure.chart')"):
            break
    assert "last values" in tab.evaluate(read) and "one 0.75" in tab.evaluate(read)
    tab.press("Home")
    assert "step 1" in tab.evaluate(read) and "one 0.125" in tab.evaluate(read) and "two 0.625" in tab.evaluate(read)
    tab.press("ArrowRight")
    assert "step 2" in tab.evaluate(read) and "one 0.25" in tab.evaluate(read)
    tab.press("Tab")
    assert "last values" in tab.evaluate("document.querySelector('figure.chart .readout').innerText")


def test_the_pointer_reads_an_unknown_value_as_unknown(tab: Page, address: str) -> None:
    tab.open(address)
    find = "[...document.querySelectorAll('figure.chart')].find((f) => f.innerText.startsWith('Acceptance length'))"
    tab.evaluate(f"{find}.scrollIntoView({{block: 'center'}})")
    box = tab.evaluate(f"(() => {{ const b = {find}.querySelector('svg').getBoundingClientRect(); "
                       "return [b.x, b.y, b.width, b.height] })()")  # fmt: skip
    share = (58 + (430 - 58) * 2 / 5) / 440  # step 3 of 1 to 6
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + share * box[2], y=box[1] + box[3] / 2)
    text = tab.evaluate(f"{find}.querySelector('.readout').innerText")
    assert "step 3" in text and "unknown" in text
