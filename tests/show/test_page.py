"""One page for every kind of run: whole, in need of nothing else, all tables on it, every name shown and not obeyed."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import test_calibrate
import trace_records
from click.testing import CliRunner
from conftest import ROOT
from lab_rows import moved, write
from page_reader import SeenPage, page_at

from distbench.cli.main import main
from distbench.records.dataframe import frame_of
from distbench.records.results_folder import collect
from distbench.records.run_file import Run
from distbench.report import render
from distbench.report.page import page_blocks, write_page
from distbench.report.sections import Contents
from distbench.show.blocks import Heading, Lines, Table, capped
from distbench.show.html import page_of
from distbench.show.plots import Spot, hover, new_figure, placed_spots, styled

GOLDEN = ROOT / "tests" / "golden"
RUNS = [GOLDEN / f"{name}.jsonl" for name in ("collectives", "steps", "redistributions", "laboratory")]
COLLECTIVES, STEPS, MOVES, LABORATORY = RUNS
NOWHERE = Path("nowhere")
EVIL = "a</script><script>alert(1)</script>&\"'$\\frac{</style>\x1b[31m\x07\u202e日本"


def page_of_runs(folder: Path, *runs: Path) -> SeenPage:
    render(runs, NOWHERE, "table", None, (), folder / "page.html")
    return page_at(folder / "page.html")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SeenPage:
    """The page of every golden run, and of one with a trace."""
    folder = tmp_path_factory.mktemp("page")
    traced = trace_records.run_file(folder / "traced.jsonl", trace_records.record())
    return page_of_runs(folder, *RUNS, traced)


@pytest.mark.long
def test_every_section_is_in_the_contents_and_what_is_not_well_is_marked(whole: SeenPage) -> None:
    contents = whole.text[whole.text.index("<nav") : whole.text.index("</nav>")]
    names = re.findall(r'<li><a href="#[\w-]+">([^<]*)', contents)
    assert [name.strip() for name in names] == [
        "Summary",
        "The line of code",
        "Redistribution planner study: box-real, torch 2.13.0+cpu",
        "redistribute_lab",
        "toy (traced)",
        "toy: communication by path",
        "collectives",
        "toy (steps)",
        "moves",
        "Runs",
    ]
    assert re.findall(r'class="mark">([^<]*)', contents) == [
        "6 wrong, 2 raised, 1 interrupted",
        "5 wrong, 1 raised",
        "1 wrong",
        "1 raised",
        "1 interrupted",
    ]


@pytest.mark.long
def test_every_table_of_the_report_is_on_the_page(whole: SeenPage) -> None:
    text = render(tuple(RUNS), NOWHERE, "markdown", None, ()).text
    titles = [re.sub(r"\\(.)", r"\1", title) for title in re.findall(r"^\*\*(.*)\*\*$", text, re.MULTILINE)]
    counted = ("NOT OK", "runs")
    assert len(titles) == 14 and {one for one in titles if not one.startswith(counted)} <= set(whole.titles)
    assert len(whole.titles) == len(whole.tables)
    runs = whole.tables[whole.titles.index("runs")]
    assert {row[0] for row in runs[1:]} == {"collectives", "toy", "moves", "redistribute_lab"}
    # A name that two runs have leads to neither.
    linked = re.findall(r'<td class="left"><a href="#([\w-]+)">(\w+)</a>', whole.text)
    assert {name for _, name in linked} == {"collectives", "moves", "redistribute_lab"}


@pytest.mark.long
def test_a_page_has_the_rows_that_text_leaves_out(tmp_path: Path) -> None:
    rows = []
    for number in range(30):
        pair = f"S({number})->R"
        rows += [moved(pair, "greedy", 10.0, f"{pair} by greedy"), moved(pair, "min_cost", 5.0, f"{pair} otherwise")]
    path = write(tmp_path / "moves.jsonl", rows)
    assert "... 10 more: see" in render((path,), NOWHERE, "table", None, (), full=True).text
    page = page_of_runs(tmp_path, path)
    (table,) = (table for title, table in zip(page.titles, page.tables, strict=True) if "largest differences" in title)
    assert len(table) == 1 + 2 * 30 and "more pairs" not in page.shown
    table_of_five = Table("t", ("n",), [(str(number),) for number in range(5)], ["of all"])
    page = SeenPage(page_of("t", [capped(table_of_five, 2)]))
    assert page.tables == [[["n"], *[[str(number)] for number in range(5)]]]
    assert "of all" in page.shown and "more rows" not in page.shown


def test_a_plot_says_the_values_of_its_points(whole: SeenPage) -> None:
    # 4 MiB in 5 ms over 4 ranks, its quartiles 3 and 7 ms.
    (one,) = [spot for spot in whole.spots if "all_reduce over dp_shard, 4 MiB" in spot]
    assert one.split("\n")[1:] == ["busbw 1.26 GB/s [0.899, 2.1]", "median 5.00 ms [3.00, 7.00]"]
    assert "a=2\nforward: 15.0 ms" in whole.spots
    (step,) = [spot for spot in whole.spots if spot.startswith("a=2\nwhole step")]
    assert step.split("\n")[1:] == ["whole step: 50.0 ms", "2x faster than its baseline: too few passes"]


def test_each_dot_of_a_redistribution_says_its_paths(whole: SeenPage) -> None:
    dots = [spot for spot in whole.spots if "\nmin_cost: " in spot]
    assert len(dots) == 5
    (dot,) = [spot for spot in dots if spot.startswith("S(0)R -> RR")]
    records = [json.loads(line) for line in MOVES.read_text().splitlines() if line.endswith("}")]
    paths = {
        record["case"]["params"]["planner"]: record["counters"]["path"]
        for record in records
        if record["type"] == "case" and "S(0)R->RR" in record["case"]["id"]
    }
    lines = dot.split("\n")
    assert lines[1].startswith("greedy: ") and lines[2].strip() == paths["greedy"]
    assert lines[3].startswith("min_cost: ") and lines[4].strip() == paths["min_cost"]


def test_the_timeline_says_whose_each_collective_is_and_how_long_it_waited(whole: SeenPage) -> None:
    named = [spot for spot in whole.spots if spot.startswith("all_gather over tp, 1.95 KiB\nforward, tp: layers.0.att")]
    # Rank 2 begins at 42 ms and takes 8; the others wait 12 for it, but for its partner's group.
    assert len(named) == 4
    assert "redistributes S(1)->R\n8.00 ms, from 42.00 to 50.00" in "\n".join(named)
    assert sum("waiting for the group's slowest rank: 12.0 ms" in spot for spot in named) == 1


@pytest.mark.long
def test_names_hold_anything(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in STEPS.read_text().splitlines()]
    for line in lines[1:5]:
        line["case"]["params"]["variant"] += EVIL
    lines[1]["status"], lines[1]["error"] = "wrong", EVIL
    lines[0]["job"]["scenario"] = lines[0]["environment"]["machine"] = EVIL
    path = tmp_path / "evil.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of_runs(tmp_path, path)
    assert len(page.scripts) == 2 and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", page.text)
    shown = "a</script><script>alert(1)</script>&\"'$\\frac{</style> [31m  日本"
    assert page.shown.count(shown) > 10 and any(shown in spot for spot in page.spots)


@pytest.mark.long
def test_a_calibration_is_a_profile_and_its_points(tmp_path: Path) -> None:
    run = test_calibrate.known_run()
    assert calibration_page(tmp_path, run).num_pictures == 2
    page = page_at(tmp_path / "page.html")
    ((headings, *rows),) = (table for table in page.tables if table[0][0] == "op")
    assert headings[:3] == ["op", "mesh dim", "base"] and [row[1] for row in rows] == ["dp_shard", "tp"]
    # 20 us and half a nanosecond a byte.
    assert any(spot.split("\n") == ["4 MiB: 2.12 ms", "fitted line: 2.12 ms"] for spot in page.spots)
    few = calibration_page(tmp_path, replace(run, cases=run.cases[:1]))
    assert "no profile: x.jsonl cannot be fitted" in few.shown and not few.num_pictures


def calibration_page(folder: Path, run: Run) -> SeenPage:
    write_page(folder / "page.html", page_blocks(Contents.of([run], frame_of([run]))))
    return page_at(folder / "page.html")


@pytest.mark.long
def test_one_step_against_another_is_a_page_too(tmp_path: Path) -> None:
    cases = [trace_records.record(case_id=f"{trace_records.ID}/x={at}") for at in (1, 2)]
    path = trace_records.run_file(tmp_path / "a.jsonl", *cases)
    arguments = ("--diff", f"{path}::x=1", f"{path}::x=2", "--page", str(tmp_path / "page.html"))
    done = CliRunner().invoke(main, ["report", *arguments])
    assert done.exit_code == 0, done.output
    page = page_at(tmp_path / "page.html")
    assert page.num_pictures == 2 and "by path, per rank and step" in page.titles
    verdict = page.text[page.text.index('class="verdict"') :]
    assert verdict.index("x=1 compared with x=2") < verdict.index("</div>")


def test_a_page_is_small(whole: SeenPage) -> None:
    """Nine sections, ten figures and their script; half of a quick start."""
    assert whole.num_pictures >= 8 and len(whole.text) < 400_000


def test_a_spot_lies_where_its_data_are_drawn() -> None:
    with styled():
        figure, (axes,) = new_figure(1, 10, 5)
        figure.set_layout_engine("none")
        axes.set_position((0, 0, 1, 1))
        axes.set(xlim=(0, 100), ylim=(0, 10))
        hover(axes, [Spot(50, 2.5, "point"), Spot(10, 5, "bar", 20, 1), Spot(float("nan"), 1, "nowhere")])
        point, bar = placed_spots(figure)
    # 720 by 360 points, counted from the upper left corner.
    assert (point.x, point.y, point.width, point.height) == pytest.approx((360, 270, 0, 0))
    assert (bar.x, bar.y, bar.width, bar.height) == pytest.approx((72, 144, 144, 36))


def test_headings_of_level_three_stand_within_a_section() -> None:
    page = page_of("t", [Lines(("before",)), Heading("one"), Heading("two", 3), Lines(("after",))])
    assert SeenPage(page).links == ["summary", "one"] and "<h3>two</h3>" in page and "<h1>t</h1>" in page


def test_a_run_without_a_case_has_a_page(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(STEPS.read_text().splitlines()[0] + "\n")
    assert collect((path,), NOWHERE)[0] and "none finished" in page_of_runs(tmp_path, path).shown
