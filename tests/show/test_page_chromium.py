"""The page in a real browser: its console stays empty, it fits its window, and every control does what it offers."""

import csv
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trace_records
from conftest import ROOT
from processes import Children
from step_runs import steps

from benchmarks.chromium import Browser, chromium_path
from distbench.report import render

pytestmark = pytest.mark.skipif(chromium_path() is None, reason="no Chromium on this machine")
RUNS = [ROOT / "tests" / "golden" / f"{name}.jsonl" for name in ("collectives", "steps", "redistributions")]
WIDTHS = (1280, 390)
SIZES = {512: 9e-6, 1 << 10: 64e-6, 1 << 16: 1.2e-3, 3 << 19: 0.9, 4 << 20: 2.0}
TABLE = "[...document.querySelectorAll('figure')].find(one => one.textContent.includes('groups of 4 ranks'))"
CELLS = f"[...{TABLE}.querySelectorAll('tbody tr')].filter(row => !row.hidden).map(row => row.cells[{{}}].textContent)"
# Elements that reach out of the window, but for those within a box that scrolls.
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(one => {
  const {width, left, right} = one.getBoundingClientRect();
  return width && (right > innerWidth + 1 || left < -1) && !one.parentElement.closest('.box, pre');
}).map(one => one.outerHTML.slice(0, 99))"""
DIFFERENCES = "[...document.querySelectorAll('figure')].find(one => one.textContent.includes('largest differences'))"
MOVES = f"{DIFFERENCES}.querySelector('table')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    traced = trace_records.run_file(folder / "traced.jsonl", trace_records.record())
    (folder / "judged").mkdir()
    judged = steps(folder / "judged", {"slow": 1.7, "slower": 3.4})
    runs = (sized(folder / "sized.jsonl"), *RUNS, traced, judged)
    render(runs, Path("nowhere"), "table", None, (), folder / "page.html")
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
    started.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    yield started
    started.close()


@pytest.mark.long
def test_the_page_in_a_browser(browser: Browser, page: Path, tmp_path: Path) -> None:
    """All of it in one test: a browser takes a second to start, and a page to open."""
    for width in WIDTHS:
        for dark in (False, True):
            browser.open(page, width, dark=dark)
            assert browser.run("document.documentElement.scrollWidth") <= width
            assert browser.run(TOO_WIDE) == []
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
    _zooms(browser)
    _compares_two(browser)
    _copies_and_saves(browser, tmp_path)
    _links_to_rows(browser, page)
    _turns_dark_and_folds(browser)
    assert browser.told == []
    fetched = {address.partition("#")[0] for address in browser.asked if not address.startswith(("data:", "blob:"))}
    assert fetched == {page.as_uri()}


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
    spot = "document.querySelector('[aria-label*=bandwidth] .spot')"
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


def _press(browser: Browser, key: str) -> None:
    browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
    browser.call("Input.dispatchKeyEvent", type="keyUp", key=key)


def _zooms(browser: Browser) -> None:
    """With buttons, keys and the wheel: bars grow, ticks are round values, and `All` restores the step."""
    svg = "document.querySelector('[data-zoom]')"
    browser.run(f"{svg}.scrollIntoView({{block: 'center'}})")
    width = f"{svg}.querySelector('.spots').getBoundingClientRect().width"
    texts = f"[...{svg}.querySelectorAll('[id*=xtick_] text')]"
    ticks = f"{texts}.filter(one => one.checkVisibility()).map(one => one.textContent)"
    whole, all_ticks = browser.run(width), browser.run(ticks)
    buttons = f"{svg}.closest('figure').previousElementSibling.querySelectorAll('button')"
    browser.run(f"{buttons}[0].click()")
    assert browser.run(width) == pytest.approx(2 * whole, rel=0.01)
    shown = [float(text) for text in browser.run(ticks)]
    assert browser.run(ticks) != all_ticks and len(shown) > 1 and shown == sorted(shown)
    browser.run(f"{svg}.closest('figure').focus()")
    _press(browser, "+")
    assert browser.run(width) == pytest.approx(4 * whole, rel=0.01)
    before = browser.run(ticks)
    _press(browser, "d")
    assert browser.run(ticks) != before
    browser.run(f"{buttons}[4].click()")
    assert browser.run(width) == pytest.approx(whole, rel=0.01) and browser.run(ticks) == all_ticks
    wheel = "new WheelEvent('wheel', {deltaY: -100, ctrlKey: true, clientX: 700, bubbles: true, cancelable: true})"
    assert browser.run(f"{svg}.dispatchEvent({wheel})") is False
    assert browser.run(width) > 1.2 * whole
    # A wheel without Ctrl scrolls the page.
    assert browser.run(f"{svg}.dispatchEvent({wheel.replace('ctrlKey: true, ', '')})") is True
    browser.run(f"{buttons}[4].click()")


def _compares_two(browser: Browser) -> None:
    """Variants of one run with the verdict that was computed for the pair, runs by their medians without one."""
    box = "[...document.querySelectorAll('[data-picker]')].find(one => one.textContent.includes('slower'))"
    choose = f"""(a, b) => {{
      const [first, second] = {box}.querySelectorAll('select');
      [first.selectedIndex, second.selectedIndex] = [a, b];
      second.dispatchEvent(new Event('change'));
      return {box}.querySelector('output').value;
    }}"""
    assert "B is 1.7x slower than A (95 % CI 1.7-1.7x). Verdict: slower." in browser.run(f"({choose})(0, 1)")
    assert "B is 1.7x faster than A (95 % CI 1.7-1.7x). Verdict: faster." in browser.run(
        f"({choose})(0, 1)".replace("0, 1", "1, 0")
    )
    # Of a pair without the baseline, too.
    assert "B is 2x slower than A (95 % CI 2-2x). Verdict: slower." in browser.run(f"({choose})(1, 2)")
    assert browser.run(f"({choose})(2, 2)") == "Choose two different ones."
    runs = "[...document.querySelectorAll('[data-picker]')].find(one => one.textContent.includes('two runs of toy'))"
    assert "without a verdict" in browser.run(f"{runs}.querySelector('output').value")


def _saved(folder: Path, name: str) -> bytes:
    ends_at = time.monotonic() + 10
    while time.monotonic() < ends_at and not (folder / name).exists():
        time.sleep(0.02)
    return (folder / name).read_bytes()


def _copies_and_saves(browser: Browser, folder: Path) -> None:
    """Markdown, CSV and the trace; rows as they are shown."""
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    box = f"{TABLE}.querySelector('input')"
    browser.run(f"{box}.value = '4 all_red'; {box}.dispatchEvent(new Event('input'))")
    rows_shown = f"[...{TABLE}.querySelectorAll('tr')].filter(row => !row.hidden)"
    cells = f"{rows_shown}.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    shown = [[" ".join(cell.replace("\xa0↕", "").split()) for cell in row] for row in browser.run(cells)]
    assert len(shown) > 2
    browser.run(f"{TABLE}.querySelectorAll('.tools button')[0].click()")
    for _ in range(50):
        text = browser.run("navigator.clipboard.readText()")
        if text.startswith("**mesh dim"):
            break
    title, _, headings, rules, *rows = text.rstrip("\n").split("\n")
    assert "groups of 4 ranks" in title and rules.startswith("| :--- |")
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in (headings, *rows)] == shown
    browser.run(f"{TABLE}.querySelectorAll('.tools button')[1].click()")
    name = browser.run(f"slug({TABLE}.querySelector('figcaption').firstChild.textContent)")
    assert list(csv.reader(_saved(folder, f"{name}.csv").decode().splitlines())) == shown
    browser.run(f"{box}.value = ''; {box}.dispatchEvent(new Event('input'))")

    browser.run("document.querySelector('.download a').click()")
    events = json.loads(gzip.decompress(_saved(folder, browser.run("document.querySelector('.download a').download"))))
    assert {event["pid"] for event in events} == {0, 1, 2, 3} and any(event["name"] == "all_gather" for event in events)


def _links_to_rows(browser: Browser, page: Path) -> None:
    """A row's link opens the page at that row, by keyboard too; the Tab key stops once in a table."""
    links = f"{TABLE}.querySelectorAll('.row-link')"
    assert browser.run(f"[...{links}].filter(link => link.tabIndex === 0).length") == 1
    browser.run(f"{links}[0].focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowDown", code="ArrowDown", windowsVirtualKeyCode=40)
    assert browser.run(f"document.activeElement === {links}[1]")
    browser.run("document.activeElement.click()")
    fragment = browser.run("location.hash")
    row = browser.run(f"{TABLE}.querySelectorAll('tbody tr')[1].textContent")
    browser.open(page, 1280, fragment="#summary")
    browser.open(page, 1280, fragment=fragment)
    linked = "document.querySelector('tr.linked')"
    assert browser.run(f"{linked}.textContent") == row and fragment.startswith("#sized.mesh-dim")
    top, height = browser.run(f"[{linked}.getBoundingClientRect().top, innerHeight]")
    assert 0 < top < height


def _turns_dark_and_folds(browser: Browser) -> None:
    browser.run("document.querySelector('#theme').click()")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    # Kept for the next visit, a moment after the click; on paper it is light, and all of it is there.
    for _ in range(10):
        browser.reload()
        if kept := browser.run("document.documentElement.dataset.theme"):
            break
    assert kept == "dark"
    browser.run("document.querySelector('#fold').click()")
    assert browser.run("document.querySelectorAll('details.section[open]').length") == 0
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("document.querySelectorAll('details.section:not([open])').length") == 0
    assert browser.run("[...document.querySelectorAll('nav, .controls, .tools')].every(one => !one.offsetHeight)")
    browser.run("dispatchEvent(new Event('afterprint'))")
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.run("localStorage.clear()")
