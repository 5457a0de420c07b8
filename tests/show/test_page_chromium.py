"""The page in a real browser: nothing is said on its console, it sorts, filters, tells values, and fits its window."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trace_records
from conftest import ROOT
from processes import Children

from benchmarks.chromium import Browser, chromium_path
from distbench.report import render

pytestmark = pytest.mark.skipif(chromium_path() is None, reason="no Chromium on this machine")
RUNS = [ROOT / "tests" / "golden" / f"{name}.jsonl" for name in ("collectives", "steps", "redistributions")]
WIDTHS = (1280, 390)
SIZES = {512: 9e-6, 1 << 10: 64e-6, 1 << 16: 1.2e-3, 3 << 19: 0.9, 4 << 20: 2.0}
TABLE = "[...document.querySelectorAll('figure')].find(one => one.textContent.includes('groups of 4 ranks'))"
CELLS = f"[...{TABLE}.querySelectorAll('tbody tr')].filter(row => !row.hidden).map(row => row.cells[{{}}].textContent)"
MOVES = (
    "[...document.querySelectorAll('figure')].find(one => one.textContent.includes('striking')).querySelector('table')"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    traced = trace_records.run_file(folder / "traced.jsonl", trace_records.record())
    render((sized(folder / "sized.jsonl"), *RUNS, traced), Path("nowhere"), "table", None, (), folder / "page.html")
    return folder / "page.html"


def sized(path: Path) -> Path:
    """Collectives of several sizes, whose order by number is no other's."""
    header, *cases = (json.loads(line) for line in RUNS[0].read_text().splitlines())
    lines = [header | {"job": header["job"] | {"scenario": "sized", "started_at": 1.0}}]
    for case in cases:
        if "4194304" not in json.dumps(case) or "dp_shard" not in json.dumps(case):
            continue
        for size, seconds in SIZES.items():
            named = case["case"] | {"id": f"{case['case']['id']}/{size}"}
            lines.append(case | {"case": named, "payload_bytes": size, "samples_s": [seconds] * 9})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def browser(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


def test_the_page_in_a_browser(browser: Browser, page: Path) -> None:
    """All of it in one test: a browser takes a second to start, and a page to open."""
    for width in WIDTHS:
        for dark in (False, True):
            browser.open(page, width, dark=dark)
            assert browser.run("document.documentElement.scrollWidth") <= width
            # No column is so narrow that a name stands one letter a line.
            letters = "[...document.querySelectorAll('td')].every(cell => cell.offsetWidth > 20)"
            assert browser.run(letters)
            paper = browser.run("getComputedStyle(document.body).backgroundColor")
            assert (paper == "rgb(255, 255, 255)") is not dark
    contents = "document.querySelector('#entries').offsetHeight > 0"
    assert not browser.run(contents)
    browser.run("document.querySelector('#contents').click()")
    assert browser.run(contents)

    browser.open(page, 1280)
    assert browser.run(contents)
    _sorts(browser)
    _filters(browser)
    _tells_values(browser)
    _turns_dark_and_folds(browser)
    assert browser.told == []
    assert set(browser.asked) == {page.as_uri()}


def _sorts(browser: Browser) -> None:
    """By number and unit, by name too; and what belongs together stays together."""
    for column, ascending in ((2, "512 B,1 KiB,64 KiB,1.50 MiB,4 MiB"), (3, "9.00 us,64.0 us,1.20 ms,900 ms,2.00  s")):
        as_written = browser.run(CELLS.format(column))
        ascended = [cell for cell in ascending.split(",") for _ in range(len(as_written) // len(SIZES))]
        heading = f"{TABLE}.querySelectorAll('th button')[{column}]"
        browser.run(f"{heading}.click()")
        assert browser.run(CELLS.format(column)) == ascended[::-1] != as_written
        assert browser.run(f"{heading}.parentElement.ariaSort") == "descending"
        browser.run(f"{heading}.click()")
        assert browser.run(CELLS.format(column)) == ascended
        browser.run(f"{heading}.click()")
        assert browser.run(CELLS.format(column)) == as_written
    browser.run(f"{TABLE}.querySelectorAll('th button')[0].click()")
    names = browser.run(CELLS.format(0))
    assert names == sorted(names) and len(set(names)) > 2

    rows = f"[...{MOVES}.tBodies[0].rows].map(row => row.textContent)"
    before = browser.run(rows)
    browser.run(f"{MOVES}.querySelectorAll('th button')[1].click()")
    after = browser.run(rows)
    # Pair by pair, greedy first: another order of the same.
    assert before != after and [row[:6] for row in after] == ["greedy", "min_co"] * 5
    assert set(zip(before[::2], before[1::2], strict=True)) == set(zip(after[::2], after[1::2], strict=True))


def _filters(browser: Browser) -> None:
    box = f"{TABLE}.querySelector('input')"
    everything = browser.run(CELLS.format(0))
    browser.run(f"{box}.value = 'ALL_RED 4'; {box}.dispatchEvent(new Event('input'))")
    shown = browser.run(CELLS.format(0))
    assert 0 < len(shown) < len(everything) and set(shown) == {"all_reduce"}
    assert browser.run(f"{TABLE}.querySelector('output').value") == f"{len(shown)} of {len(everything)} rows"
    browser.run(f"{box}.value = ''; {box}.dispatchEvent(new Event('input'))")
    assert len(browser.run(CELLS.format(0))) == len(everything)


def _tells_values(browser: Browser) -> None:
    """With a pointer, and with the arrow keys."""
    tip = "document.querySelector('#tip')"
    spot = "document.querySelector('.spot')"
    browser.run(f"{spot}.scrollIntoView({{block: 'center'}})")
    place = browser.run(
        f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({spot}.getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    assert "GB/s" in browser.run(f"{tip}.textContent")
    assert browser.run(f"getComputedStyle({tip}).visibility") == "visible"
    first = browser.run(f"{tip}.textContent")
    browser.run(f"{spot}.closest('figure').focus()")
    for key, code in (("ArrowRight", 39), ("ArrowRight", 39)):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code)
    assert "GB/s" in browser.run(f"{tip}.textContent") and browser.run(f"{tip}.textContent") != first


def _turns_dark_and_folds(browser: Browser) -> None:
    browser.run("document.querySelector('#theme').click()")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    # Kept for the next visit; on paper it is light, and all of it is there.
    browser.reload()
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    browser.run("document.querySelector('#fold').click()")
    assert browser.run("document.querySelectorAll('details.section[open]').length") == 0
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("document.querySelectorAll('details.section:not([open])').length") == 0
    assert browser.run("[...document.querySelectorAll('nav, .controls, .filter')].every(one => !one.offsetHeight)")
    browser.run("dispatchEvent(new Event('afterprint'))")
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.run("localStorage.clear()")
