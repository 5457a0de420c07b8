"""The report on small golden run files, whose numbers were chosen so that every answer can be worked out by hand."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from lab_rows import write
from processes import Children

from distbench.records.dataframe import frame_of
from distbench.records.run_file import Run
from distbench.report import FORMS, Rendered, render
from distbench.report.section_protocol import ReportedRun
from distbench.report.sections import overview
from distbench.show.blocks import Table
from distbench.show.terminal import text_of
from distbench.spec.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
COLLECTIVES, STEPS, MOVES = (GOLDEN / f"{name}.jsonl" for name in ("collectives", "steps", "redistributions"))
NOWHERE = Path("nowhere")


def shown(*runs: Path, form: str = "table", by: tuple[str, ...] = (), out: Path = NOWHERE) -> Rendered:
    return render(runs, out, form, None, by, full=True)


def rows_of(*runs: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in json.loads(shown(*runs, form="json").text)}


def line_with(text: str, *words: str) -> str:
    result = [line for line in text.splitlines() if all(word in line for word in words)]
    assert result, f"no line with {words} in\n{text}"
    return result[0]


@pytest.mark.parametrize(
    ("case", "busbw"),
    [
        # S = 4 MiB in 5 ms is 0.8388608 GB/s (1e9), times 2(n-1)/n, (n-1)/n or 1; n: the group's size, not the world's.
        ("all_reduce/dp_shard", 1.2582912),
        ("all_reduce/tp", 0.8388608),
        ("all_gather/dp_shard", 0.6291456),
        ("all_to_all/tp", 0.4194304),
        ("broadcast/dp_shard", 0.8388608),
    ],
)
def test_bandwidths(case: str, busbw: float) -> None:
    row = rows_of(COLLECTIVES)[f"collective/f32[1048576]/{case}"]
    assert row["algbw_gb_per_s"] == pytest.approx(0.8388608)
    assert row["busbw_gb_per_s"] == pytest.approx(busbw)


def test_a_bandwidth_that_is_not_known_is_missing_and_never_guessed() -> None:
    assert rows_of(COLLECTIVES)["collective/f32[256]/mystery/tp"]["busbw_gb_per_s"] is None
    steps = rows_of(STEPS).values()
    assert {row["algbw_gb_per_s"] for row in steps} == {None}


def test_collectives_table_has_a_section_a_mesh_dim_and_names_what_really_ran() -> None:
    text = shown(COLLECTIVES).text
    assert "mesh dim dp_shard: groups of 4 ranks over gloo" in text
    assert "mesh dim tp: groups of 2 ranks over gloo" in text
    line = line_with(text, "all_reduce", "4 MiB")
    assert line.split() == [
        "all_reduce",
        "f32",
        "4",
        "MiB",
        "5.00",
        "ms",
        "[3.00,",
        "7.00]",
        "-",
        "0.839",
        "1.26",
    ]
    assert "reduce_scatter runs as all_reduce on gloo, so its busbw is not reduce-scatter busbw" in text


def test_what_is_not_ok_stands_above_every_result() -> None:
    text = shown(COLLECTIVES).text
    assert text.index("NOT OK: 1 of 12 cases") < text.index("mesh dim dp_shard")
    assert "rank 1: element 3 is 0, it must be 6" in line_with(text, "wrong", "all_gather")
    assert "11 ok, 1 wrong" in line_with(text, "complete")


def test_a_skipped_case_is_told_but_not_as_one_that_is_not_ok() -> None:
    cases = [{"status": status, "case": {"id": status}} for status in ("skipped", "ok", "unsupported", "skipped")]
    run = Run(Path("run.jsonl"), {}, cases, None, [])
    blocks = overview([ReportedRun(run, frame_of([run]))])
    not_ok, skipped = (block for block in blocks if isinstance(block, Table) and block.title != "runs")
    assert not_ok.title == "NOT OK: 1 of 4 cases" and [row[0] for row in not_ok.rows] == ["unsupported"]
    assert skipped.title == "skipped: 2 of 4 cases"


def test_steps_are_compared_with_the_first_variant() -> None:
    text = shown(STEPS).text
    assert "baseline" in line_with(text, "a=1", "100 ms")
    # A run file from before passes were kept: its samples are those of one pass, which tells nothing.
    assert line_with(text, "a=2", "50.0 ms").split()[-4:] == ["2.00", "too", "few", "passes"]
    assert "use --passes 8" in text
    assert "200" in line_with(text, "a=2", "50.0 ms")


def test_planners_are_judged_by_their_passes(tmp_path: Path) -> None:
    records = [json.loads(line) for line in MOVES.read_text().splitlines() if line.endswith("}")]
    rows = [record for record in records if record["type"] == "case"]
    lines = shown(write(tmp_path / "moves.jsonl", rows, records[0])).text.splitlines()

    def verdict(path: str) -> str:
        at = next(index for index, line in enumerate(lines) if line.startswith("greedy") and f" {path} " in line)
        return lines[at] + lines[at + 1]

    assert "0.50 [0.50, 0.50]" in verdict("S(0)R->RR") and "min_cost by 50 %+" in verdict("S(0)R->RR")
    assert "4.00 [3." in verdict("S(1)R->RR") and "greedy by 75 %+" in verdict("S(1)R->RR")
    assert "within noise" in verdict("RS(0)->RR")
    assert "same path" in verdict("RS(1)->RR")
    assert "too few passes" in verdict("P(sum)R->RR")
    assert "4 with different paths: min_cost faster beyond noise in 1, greedy in 1, neither in 1" in "\n".join(lines)
    # (0.5 * 4 * 1 * 3) ** (1/4), the pair with one path left out
    assert "1.57" in "\n".join(lines)


def test_planners_of_one_pass_have_ratios_and_no_verdict() -> None:
    """A run file from before planners took turns."""
    text = shown(MOVES).text
    assert "too few passes" in text and "min_cost by" not in text and "0.50" in text
    assert "fewer than 8 passes give no verdicts: use --passes 8 or a larger --budget" in " ".join(text.split())


def test_a_run_cut_short_is_reported_with_a_warning_for_each_bad_line() -> None:
    report = shown(MOVES)
    assert "interrupted" in line_with(report.text, "moves", "dp_shard=2")
    assert "10 ok" in report.text
    assert [warning for warning in report.warnings if "line 5" in warning]
    assert [warning for warning in report.warnings if "line 13" in warning]
    assert [warning for warning in report.warnings if "no footer" in warning]


def test_no_line_of_a_table_is_longer_than_120_characters(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in STEPS.read_text().splitlines()]
    for line in lines[1:-1]:
        line["case"]["params"]["variant"] = "a_rather_long_axis_name=some_value," * 8
        line["error"] = "x" * 300 + " \x1b[31mred\nand a second line"
    lines[0]["environment"]["cpu_model"] = "A CPU " * 40
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = shown(COLLECTIVES, STEPS, MOVES, long).text
    assert max(map(len, text.splitlines())) <= 120
    assert "\x1b" not in text
    wide = Table("t", ("<a", "b", "<c"), [("word " * 60, "1" * 30, "S(0)S(1)->" * 30)])
    assert max(map(len, text_of([wide]).splitlines())) <= 120


def test_columns_of_numbers_line_up() -> None:
    text = shown(COLLECTIVES).text
    points = {line.index("0.839") for line in text.splitlines() if "0.839 " in line}
    assert len(points) == 1


def test_markdown_has_the_same_cells() -> None:
    text = shown(MOVES, COLLECTIVES, form="markdown").text
    assert "| min\\_cost" in text or "| min_cost" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in table)
    assert "5.00 ms | [3.00, 7.00] | -" in text


def test_csv_and_json_hold_every_case_and_the_same_values() -> None:
    records = json.loads(shown(COLLECTIVES, STEPS, MOVES, form="json").text)
    rows = list(csv.DictReader(io.StringIO(shown(COLLECTIVES, STEPS, MOVES, form="csv").text)))
    assert len(records) == len(rows) == 12 + 5 + 10
    for record, row in zip(records, rows, strict=True):
        assert list(record) == list(row)
        for name, value in record.items():
            if isinstance(value, float):
                assert math.isclose(float(row[name]), value)
            else:
                assert row[name] == ("" if value is None else str(value))
    first = records[0]
    assert (first["scenario"], first["run_file"], first["num_samples"]) == ("collectives", "collectives.jsonl", 9)
    assert (first["median_s"], first["q1_s"], first["q3_s"], first["ci_low_s"]) == (0.005, 0.003, 0.007, None)


@pytest.mark.long
def test_missing_and_odd_fields_crash_nothing(tmp_path: Path) -> None:
    odd = [
        {"type": "run", "schema_version": 1},
        {"type": "case", "case": {"id": "step/a"}, "status": "ok", "samples_s": [1.0]},
        {
            "type": "case",
            "case": {"id": "b", "kind": "collective", "params": None},
            "status": "ok",
            "samples_s": [1, 2],
        },
        {
            "type": "case",
            "case": {"id": "c", "kind": "collective"},
            "status": "ok",
            "samples_s": [0.0],
            "group_size": 0,
        },
        {"type": "case", "case": {"id": "d", "kind": "step"}, "status": "ok", "samples_s": [1.0], "counters": None},
        {
            "type": "case",
            "case": {"id": "e", "kind": "redistribute"},
            "status": "ok",
            "samples_s": [1.0],
            "phases_s": 3,
        },
        {"type": "case", "case": {"id": "f", "kind": "step"}, "status": "timeout", "samples_s": [], "error": None},
        {"type": "footer", "spent_s": None},
    ]
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in odd))
    for form in FORMS:
        assert shown(path, form=form).text
    render((path,), NOWHERE, "table", tmp_path / "plots", ())


def test_a_run_with_no_case_is_still_a_report(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(STEPS.read_text().splitlines()[0] + "\n")
    for form in FORMS:
        assert shown(path, form=form).warnings
    assert "none finished" in shown(path).text
    assert shown(path, by=("kind",)).text


def test_group_by() -> None:
    groups = json.loads(shown(COLLECTIVES, STEPS, form="json", by=("kind", "status")).text)
    result = {(group["kind"], group["status"]): group for group in groups}
    assert result[("collective", "ok")]["num_cases"] == 11
    assert result[("collective", "ok")]["geometric_mean_s"] == pytest.approx(0.005)
    assert result[("collective", "wrong")]["geometric_mean_s"] is None
    step = result[("step", "ok")]
    assert step["geometric_mean_s"] == pytest.approx((0.1 * 0.05 * 0.1001 * 0.01) ** 0.25)
    assert (step["min_s"], step["max_s"]) == pytest.approx((0.01, 0.1001))
    assert "collective" in line_with(shown(COLLECTIVES, by=("kind",)).text, "5.00 ms")
    assert json.loads(shown(COLLECTIVES, form="json", by=("min_s",)).text)


def test_an_unknown_column_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"stats.*status"):
        shown(COLLECTIVES, by=("stats",))


@pytest.mark.long
def test_plots_are_written_and_listed_last(tmp_path: Path) -> None:
    report = render((COLLECTIVES, STEPS, MOVES), NOWHERE, "table", tmp_path, ())
    names = ["busbw-f32-collectives", "step-toy", "min_cost-against-greedy-moves"]
    wanted = {tmp_path / f"{name}.{ending}" for name in names for ending in ("png", "svg")}
    assert set(tmp_path.iterdir()) == wanted
    assert all(path.stat().st_size > 5000 for path in wanted)
    last = report.text.splitlines()[-len(wanted) :]
    assert {line.strip() for line in last} == {path.name for path in wanted}


def test_importing_the_report_loads_neither_pandas_nor_matplotlib(children: Children) -> None:
    code = "import sys, distbench.report; print({'pandas', 'matplotlib', 'torch'} & set(sys.modules) or 'none')"
    done = children.python("-c", code, check=True)
    assert done.stdout.strip() == "none"
