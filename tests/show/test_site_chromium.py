"""The site in a real browser, from files: plots, filters, the chosen case, and two launches side by side."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from processes import Children
from site_runs import SLOWER, write_runs

from benchmarks.chromium import Browser, chromium_path
from distbench.cli.main import main

pytestmark = pytest.mark.skipif(chromium_path() is None, reason="no Chromium on this machine")
CHOOSE = "(select => {{ select.value = {!r}; select.dispatchEvent(new Event('change')); }})({})"
FILTER = "document.querySelectorAll('.filters select')[1]"
SHOWN = "[...document.querySelectorAll('.trends figure')].filter(one => one.offsetHeight).length"
ROWS = "[...document.querySelectorAll('tbody tr')].filter(one => one.offsetHeight).length"
# Parts of a plot that are outside of its frame.
CLIPPED = """[...document.querySelectorAll('.trend')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text, circle.dot, line, rect')].filter(part => {
    const {left, right, top, bottom} = part.getBoundingClientRect();
    return left < frame.left - 1 || right > frame.right + 1 || top < frame.top - 1 || bottom > frame.bottom + 1;
  }).map(part => part.outerHTML.slice(0, 99));
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    write_runs(folder / "results")
    write_runs(folder / "results", "box-2", 20, {SLOWER: [(9, 99, 1.3)]})
    done = CliRunner().invoke(
        main, ["site", "--results", str(folder / "results"), "--output-dir", str(folder / "out"), "-q"]
    )
    assert done.exit_code == 0, done.output
    return folder / "out"


@pytest.fixture(scope="module")
def browser(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


def test_the_site_in_a_browser(browser: Browser, site: Path) -> None:
    """All of it in one test: a browser takes a second to start."""
    for page in ("index.html", "collectives-on-box-1-tp-4.html"):
        for width in (1280, 390):
            browser.open(site / page, width, dark=width == 390)
            assert browser.run("document.documentElement.scrollWidth") <= width
            assert browser.run("document.querySelectorAll('.trend').length") > 0 and browser.run(CLIPPED) == []
    _filters(browser, site)
    _chooses_a_case(browser)
    _compares_two_launches(browser)
    assert browser.told == []
    fetched = {address.partition("#")[0] for address in browser.asked if not address.startswith(("data:", "blob:"))}
    assert fetched == {(site / name).as_uri() for name in ("index.html", "collectives-on-box-1-tp-4.html")}


def _filters(browser: Browser, site: Path) -> None:
    """Plots and rows of one machine; every filter has a label."""
    browser.open(site / "index.html", 1280)
    assert browser.run(SHOWN) == 4 and browser.run(ROWS) == 6
    labels = "[...document.querySelectorAll('.filters select')].map(one => one.labels[0].textContent.split(' ')[0])"
    assert browser.run(labels) == ["scenario", "machine", "torch"]
    browser.run(CHOOSE.format("box-2", FILTER))
    assert browser.run(SHOWN) == 1 and browser.run(ROWS) == 2
    assert browser.run("document.querySelector('.filters output').value") == "1 of 4 plots"
    browser.run(CHOOSE.format("", FILTER))
    assert browser.run(SHOWN) == 4
    marked = "[...document.querySelectorAll('.trends figure')][0].querySelector('text.bad').textContent"
    assert browser.run(marked).startswith("+4") and browser.run(marked).endswith("12121212")


def _chooses_a_case(browser: Browser) -> None:
    """By the link of a plot, the list, and the name in a table."""
    browser.follow(
        "[...document.querySelectorAll('.trends figcaption a')].find(one => one.textContent.includes('[128]')).click()"
    )
    select = "document.querySelector('.chosen select')"
    name = "document.querySelector('.trend').getAttribute('aria-label')"
    assert browser.run(f"{select}.value") == "collective/f32[128]/all_gather/tp"
    assert browser.run(name) == "collective/f32[128]/all_gather/tp: 24 launches, 2 changes"
    browser.run("[...document.querySelectorAll('button.case')].find(one => one.textContent.includes('[512]')).click()")
    assert browser.run(name) == "collective/f32[512]/all_gather/tp: 24 launches"
    assert browser.run("document.activeElement.className") == "box"
    browser.call(
        "Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39
    )
    tip = browser.run("document.querySelector('#tip').textContent")
    assert tip.startswith("2027-01-15") and "torch 2.12.0" in tip and tip.endswith((" us", " ms"))


def _compares_two_launches(browser: Browser) -> None:
    """Ratios of any two launches; at first of the newest two."""
    table = "document.querySelector('.picker table')"
    ratio = f"[...{table}.rows].find(row => row.textContent.includes('[64]/')).cells[3].textContent"
    assert 0.9 < float(browser.run(ratio)) < 1.1
    browser.run(CHOOSE.format("0", "document.querySelector('.picker select')"))
    assert 1.3 < float(browser.run(ratio)) < 1.5
