"""What a person reads of the laboratory: the verdict, tables within 120 columns, one page, the line of code."""

import json
import re
from collections import Counter
from pathlib import Path
from statistics import geometric_mean, median

import pytest
import torch
from conftest import ROOT, Cli
from lab_rows import MIB, Row, moved, write
from page_reader import page_at
from test_lab_report import failing, four_pairs
from torch.distributed.tensor import DTensor, Replicate, Shard

from distbench.report import render
from distbench.report.planner_study_text import code_for
from distbench.spec.errors import UserError
from distbench.torch_private import fake_ranks

NOWHERE = Path("nowhere")
GOLDEN = ROOT / "tests" / "golden"


def many_pairs(calibrated: float, direct: float) -> list[Row]:
    """24 pairs of 1 MiB on which greedy takes 10 ms and the others these multiples of it, min_cost always 20 ms."""
    rows = []
    for number in range(24):
        pair, more = "S(0)R->RS(0)", {"suite": f"s{number}", "sent": MIB, "bound": MIB // 4}
        times = {"greedy": 10.0, "min_cost": 20.0, "calibrated": 10 * calibrated, "direct": 10 * direct}
        for planner, ms in times.items():
            rows.append(moved(pair, planner, ms, f"{planner}'s", predicted_ms=ms, **more))
    return rows


def text_of(path: Path, **more: Path) -> str:
    return render((path,), NOWHERE, "table", None, (), more.get("page"), more.get("reproducers"), full=True).text


def joined(text: str) -> str:
    """Wrapped paragraphs as single lines."""
    return re.sub(r"\n  (?! )", " ", text)


@pytest.fixture
def planner_report(tmp_path: Path) -> str:
    return joined(text_of(write(tmp_path / "lab.jsonl", many_pairs(calibrated=0.5, direct=0.25))))


def test_the_verdict_stands_first_and_every_number_in_it_is_the_runs(planner_report: str) -> None:
    lines = planner_report.splitlines()
    assert lines[3].startswith(
        "On box-1 (gloo, mesh 2x2), use direct for redistributions that you write yourself: 0.25"
    )
    assert "calibrated for everything: 0.50 [0.50, 0.50] of greedy's time over 24 pairs" in lines[3]
    # greedy takes 10 ms, the best 2.5: three quarters are wasted; it sends 1 MiB where a quarter must arrive.
    assert lines[4].startswith("greedy wastes 75 % of its time: greedy is 4.00x slower than the best")
    assert "sends 4.0x the bytes that must arrive" in lines[4]
    assert "another path than greedy on 24 of 24 pairs" in lines[5] and "slower in 24" in lines[5]
    assert "takes 0.25 [0.25, 0.25] of greedy's time. Predictions have errors of 0 %" in lines[6]
    assert "rank 100 % of" in lines[6] and "errors are large" not in lines[6]


def test_the_story_ends_with_the_lines_of_code_and_the_runs_own_profile(planner_report: str) -> None:
    tail = planner_report[planner_report.index("The line of code") :]
    assert '    with distbench.calibrated_planning("machine.json"):\n        train()' in tail
    assert "    plan = redistribute.plan(" in tail
    assert tail.rstrip().endswith("# any number of times\n\nPASS: 96 cases in 1 scenario: all correct")


def test_a_planner_that_is_not_surely_faster_is_not_recommended(tmp_path: Path) -> None:
    text = joined(text_of(write(tmp_path / "lab.jsonl", many_pairs(calibrated=1.0, direct=2.0))))
    assert "use greedy, torch's default, for the rest, because no planner for everything is faster beyond noise" in text
    assert "not a gain beyond noise" in text
    assert "use direct" not in text and "redistribute.plan" not in text


def test_direct_is_left_out_where_what_is_set_for_everything_is_faster(tmp_path: Path) -> None:
    text = joined(text_of(write(tmp_path / "lab.jsonl", many_pairs(calibrated=0.25, direct=0.5))))
    assert "use calibrated for everything: 0.25" in text and "use direct" not in text


def test_predictions_that_do_not_fit_the_machine_are_called_rough(tmp_path: Path) -> None:
    rows = many_pairs(calibrated=0.5, direct=0.25)
    for row in rows:
        row["counters"]["predicted_s"] *= 3
    text = joined(text_of(write(tmp_path / "lab.jsonl", rows)))
    assert "Predictions have errors of 200 % (median per planner)" in text and "Calibrate again" in text


def test_wrong_and_broken_cases_are_grouped_and_not_listed_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "lab.jsonl", [*four_pairs(), *failing()])
    text = text_of(path)
    assert "NOT OK" not in text
    flat = joined(text)
    assert "torch's planners gave wrong values or failed: greedy on 4, min_cost on 1 cases; " in flat
    assert "results of distbench's planners are correct" in flat
    assert "Wrong or broken, by cause: 5 cases" in text
    rows = [line for line in text.splitlines() if line.startswith(("wrong ", "raised ", "aborted "))]
    assert [line.split()[:3] for line in rows] == [
        ["wrong", "greedy", "3"], ["raised", "greedy", "1"], ["aborted", "min_cost", "1"],
    ]  # fmt: skip


def test_our_own_wrong_values_are_said_as_loudly(tmp_path: Path) -> None:
    rows = [*four_pairs(), *failing()]
    rows[-3]["status"] = "wrong"
    assert rows[-3]["case"]["params"]["planner"] == "greedy"
    rows[-2] = {**rows[-2], "status": "wrong"}
    text = joined(text_of(write(tmp_path / "lab.jsonl", rows)))
    assert "distbench's planners gave wrong values or failed: calibrated on 1 cases" in text


def test_no_line_is_longer_than_120_characters(tmp_path: Path) -> None:
    rows = [*four_pairs(), *failing()]
    natives = [{**row, "case": {**row["case"], "params": dict(row["case"]["params"])}} for row in four_pairs()]
    for row in natives:
        row["case"]["params"]["planner"] += "+native"
        row["counters"]["path"] = "S(0)[1]S(0)[0]S(1)S(2)->" * 12
    for row in failing():
        row["error"] = "element of a word " * 40
        rows.append(row)
    text = text_of(write(tmp_path / "lab.jsonl", [*rows, *natives]))
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.long
def test_the_page_begins_with_the_verdict_and_the_line_of_code(tmp_path: Path) -> None:
    rows = [*many_pairs(calibrated=0.5, direct=0.25), *failing()]
    text_of(write(tmp_path / "lab.jsonl", rows), page=tmp_path / "page.html")
    page = page_at(tmp_path / "page.html")
    assert page.num_pictures == 3
    first = page.text[page.text.index("<h1>") :]
    assert first.index("use direct for redistributions") < first.index("calibrated_planning(") < first.index("<svg")


@pytest.mark.long
def test_plots_of_a_laboratory_are_drawn_too(tmp_path: Path) -> None:
    path = write(tmp_path / "lab.jsonl", many_pairs(calibrated=0.5, direct=0.25))
    render((path,), NOWHERE, "table", tmp_path / "plots", ())
    names = {file.name for file in (tmp_path / "plots").iterdir()}
    assert {f"{name}-box-1.svg" for name in ("ratio-by-size", "cost-over-best", "predicted-against-measured")} <= names


def test_markdown_keeps_code_as_code(tmp_path: Path) -> None:
    path = write(tmp_path / "lab.jsonl", many_pairs(calibrated=0.5, direct=0.25))
    text = render((path,), NOWHERE, "markdown", None, ()).text
    assert "```python\nimport distbench\n" in text


def test_the_command_writes_page_and_reproducers_and_says_where(cli: Cli, tmp_path: Path) -> None:
    path = write(tmp_path / "lab.jsonl", [*four_pairs(), *failing()])
    done = cli("report", str(path), "--page", str(tmp_path / "p.html"), "--reproducers", str(tmp_path / "up"))
    assert done.returncode == 0, done.stderr
    assert f"page written: {tmp_path / 'p.html'}" in done.stderr
    assert len(list((tmp_path / "up").iterdir())) == done.stderr.count("reproducer written: ") == 3
    refused = cli("report", str(path), "--page", str(tmp_path / "none" / "p.html"))
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1


def test_folders_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "lab.jsonl", [*four_pairs(), *failing()])
    with pytest.raises(UserError, match=r"--reproducers .* cannot be written"):
        text_of(path, reproducers=path / "below a file")


@pytest.mark.parametrize(
    "planner", ["direct", "min_cost", "min_cost+native", "calibrated", "calibrated+native", "greedy+native"]
)
def test_lines_of_code_run_and_import_nothing_private_of_ours(planner: str) -> None:
    """As a user would paste them, on a fake process group of 4 ranks."""
    lines = code_for(planner, str(ROOT / "profiles" / "h100_8x_ib.json"))
    assert not re.search(r"distbench\.\w+\.|from distbench\.", "\n".join(lines))
    moved = []
    with fake_ranks({"dp_shard": 2, "tp": 2}) as mesh:
        x = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0), Replicate()])
        names = {"x": x, "mesh": mesh, "train": lambda: moved.append(x.redistribute(mesh, [Replicate(), Shard(0)]))}
        exec("\n".join(lines), names)
    result = names["local"] if planner == "direct" else moved[0].to_local()
    assert tuple(result.shape) == (4, 2)  # type: ignore[attr-defined]


@pytest.mark.long
def test_a_real_runs_story(tmp_path: Path) -> None:
    """A dozen pairs and every failure of a laboratory on 4 gloo ranks, --quick: all of it comes out and fits."""
    page = tmp_path / "page.html"
    text = text_of(GOLDEN / "laboratory.jsonl", page=page)
    assert max(map(len, text.splitlines())) <= 120
    assert "Time relative to greedy, by mesh and size" in text and "The line of code" in text
    assert page_at(page).num_pictures == 3
    # Worked out from the file's lines alone: what was not ok, and direct's mean time over greedy's.
    records = [json.loads(line) for line in (GOLDEN / "laboratory.jsonl").read_text().splitlines()]
    cases = [(record["case"]["params"], record) for record in records if record["type"] == "case"]
    bad = Counter(params["planner"] for params, record in cases if record["status"] != "ok")
    assert bad == {"greedy": 4, "min_cost": 2}
    assert "greedy on 4, min_cost on 2 cases" in joined(text) and "Wrong or broken, by cause: 6 cases" in text
    times: dict[str, dict[str, float]] = {}
    for params, record in cases:
        if record["status"] == "ok" and record["counters"]["num_collectives"]:
            times.setdefault(str({**params, "planner": ""}), {})[params["planner"]] = median(record["samples_s"])
    ratios = [pair["direct"] / pair["greedy"] for pair in times.values() if {"direct", "greedy"} <= set(pair)]
    assert f"direct for redistributions that you write yourself: {geometric_mean(ratios):.2f} " in joined(text)
