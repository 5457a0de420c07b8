"""The answer of a report: its headline as text, its tiles and its plot of all variants on a page."""

import json
import math
from pathlib import Path

import pytest
from page_reader import page_at
from step_runs import GOLDEN, steps

from distbench.records.dataframe import frame_of
from distbench.records.results_folder import collect
from distbench.report import render, summary_of
from distbench.report.headline import forest_figures
from distbench.report.section_protocol import Compared
from distbench.report.sections import Contents
from distbench.show.plots import placed_spots, styled
from distbench.show.terminal import show_notes


def contents_of(path: Path) -> Contents:
    runs, _ = collect((path,), None)
    return Contents.of(runs, frame_of(runs))


@pytest.mark.long
def test_a_headline_counts_cases_and_variants_and_is_the_end_of_every_report(tmp_path: Path) -> None:
    path = steps(tmp_path, {"slow": 1.7, "fast": 0.5, "same": 1.0})
    first, second = contents_of(path).outcome.lines()
    assert first == "PASS: 4 cases in 1 scenario: all correct"
    assert second == "3 variants compared with the baseline: 1 slower, 1 faster, 1 undecided"
    screen = summary_of([path], "distbench report")
    assert screen.endswith(f"{first}\n{second}")
    for full in (False, True):
        assert render((path,), tmp_path, "table", None, (), full=full).text.endswith(f"{first}\n{second}")
    flat = " ".join(screen.split())
    assert "slow: 1.7x slower than plain (95 % CI 1.7-1.7x)" in flat and "fast: 2x faster than plain" in flat
    assert "No difference from plain (100 ms per step) in 1 of 3 variants" in flat
    assert "Detectable: slowdowns of" in flat


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("steps", "FAIL: 5 cases in 1 scenario: 4 ok, 1 raised"),
        ("redistributions", "INCONCLUSIVE: 10 cases in 1 scenario: all correct; 1 run not complete"),
    ],
)
def test_what_is_wrong_or_not_complete_is_no_pass(name: str, start: str) -> None:
    assert contents_of(GOLDEN / f"{name}.jsonl").outcome.lines()[0] == start


def test_warnings_are_one_line_unless_they_are_asked_for(tmp_path: Path) -> None:
    path = steps(tmp_path, {})
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    header["environment"] |= {"num_cpus": 2, "load_at_start": [5.2, 0.1, 0.1]}
    footer = json.loads(lines[-1]) | {"num_relaunches": 1}
    path.write_text("\n".join([json.dumps(header), *lines[1:-1], json.dumps(footer), ""]))
    assert "\n\n3 warnings: -v shows them\n\n" in summary_of([path], "distbench report")
    try:
        show_notes(True)
        text = " ".join(summary_of([path], "distbench report").split())
    finally:
        show_notes(False)
    assert "warning: 4 ranks on 2 CPUs wait for a CPU. Compare variants; do not quote times" in text
    assert "warning: the machine was busy when toy started (load 2.6 per CPU)" in text
    assert "warning: the ranks of toy were started again 1 time, because a rank hung or ended in a case" in text
    full = " ".join(render((path,), tmp_path, "table", None, (), full=True).text.split())
    assert "warning: the machine was busy" in full


@pytest.mark.long
def test_a_page_begins_with_the_answer_tiles_and_the_plot_of_all_variants(tmp_path: Path) -> None:
    path = steps(tmp_path, {"slow": 1.7, "same": 1.0})
    render((path,), tmp_path, "table", None, (), tmp_path / "page.html")
    page = page_at(tmp_path / "page.html")
    tiles = page.text[page.text.index('<ul class="tiles"') :]
    tiles = tiles[: tiles.index("</ul>")]
    for look, number, word in (
        ("good", 3, "cases correct"),
        ("bad", 1, "slower"),
        ("", 0, "faster"),
        ("", 1, "undecided"),
    ):
        assert f"<li{f' class={chr(34)}{look}{chr(34)}' * bool(look)}><strong>{number}</strong> {word}</li>" in tiles
    assert "</strong> machine warning" in tiles
    assert page.text.index('class="verdict pass"') < page.text.index('class="tiles"') < page.text.index("<svg")
    assert 'aria-label="Variants compared with their baseline: 2 variants"' in page.text
    assert "slow\n1.7x slower than plain (95 % CI 1.7-1.7x)\nslower" in page.spots


def test_an_outlier_does_not_squeeze_the_others() -> None:
    near = [Compared(f"n{number}", "plain", 1 + 0.05 * number, 1.0, 1.5, "slower") for number in range(1, 9)]
    far = Compared("far", "plain", 500.0, 400.0, 600.0, "slower")
    alone = Compared("alone", "plain", 1.2, math.nan, math.nan, "too few passes")
    with styled():
        ((_, figure),) = forest_figures([("toy", variant) for variant in (*near, far, alone)])
        spots = {spot.text.partition("\n")[0]: spot.x for spot in placed_spots(figure)}
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.texts]
    assert "1.2x" in labels and "1.4x slower" in labels and labels.count("1.2x slower") == 1
    width = axes.get_window_extent().width * 72 / figure.dpi
    # 1.4 times as long is a fifth of the plot from the baseline at least, and what is beyond the axis at its edge.
    assert spots["n8"] - spots["n1"] > 0.1 * width and spots["far"] == max(spots.values())
    assert axes.get_yticklabels()[0].get_text() == "far" and len(spots) == 10
    assert not list(forest_figures([]))
