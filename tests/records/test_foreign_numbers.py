"""Other tools' numbers: each format read as launches, and judged by the commands as run files are."""

import json
import math
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from foreign_rows import as_csv, rows
from gate_runs import WOBBLE, taking_turns

from distbench.cli.main import main
from distbench.judge.gate import gate
from distbench.judge.gate_self_test import recorded
from distbench.records.baselines import read_side
from distbench.records.foreign_numbers import NumberColumns
from distbench.records.launches import Launch, Unit
from distbench.spec.errors import UserError
from distbench.statistics.verdicts import Options

COLUMNS = ("--case", "op,size", "--value", "us", "--pair", "turn")
CHOSEN = NumberColumns(case="op,size", value="us", pair="turn")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def as_json_lines(path: Path, table: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return path


def as_files(folder: Path, table: Sequence[dict[str, Any]]) -> Path:
    """A file per launch, without a column that names it."""
    folder.mkdir()
    for turn in range(10):
        own = [{name: row[name] for name in ("op", "size", "us")} for row in table if row["turn"] == turn]
        as_csv(folder / f"{turn}.csv", own)
    return folder


def read(path: Path, columns: NumberColumns | None = None, warnings: list[str] | None = None) -> list[Launch]:
    return read_side([path], "baseline", [] if warnings is None else warnings, columns or NumberColumns())


def test_every_form_of_a_table_gets_the_verdicts_of_the_same_numbers_in_run_files(tmp_path: Path) -> None:
    tables = rows(1.0), rows(1.25, shift=3)
    sides = {
        "csv": [as_csv(tmp_path / f"{index}.csv", table) for index, table in enumerate(tables)],
        "tsv": [as_csv(tmp_path / f"{index}.tsv", table, "\t") for index, table in enumerate(tables)],
        "jsonl": [as_json_lines(tmp_path / f"{index}.jsonl", table) for index, table in enumerate(tables)],
    }
    judged = {}
    for form, (base, new) in sides.items():
        gated = gate(read(base, CHOSEN), read(new, CHOSEN), Options())
        judged[form] = [(case.case_id, case.verdict, case.paired, case.metrics) for case in gated.cases]
    folders = [as_files(tmp_path / f"files{index}", table) for index, table in enumerate(tables)]
    chosen = NumberColumns(case="op,size", value="us", pair="file")
    gated = gate(*(read(folder, chosen) for folder in folders), Options())
    judged["a file per launch"] = [(case.case_id, case.verdict, case.paired, case.metrics) for case in gated.cases]
    assert all(cases == judged["csv"] for cases in judged.values())
    assert [case[:3] for case in judged["csv"]] == [
        ("softmax/1024", "regression", True),
        ("add/1024", "pass", True),
        ("add/65536", "pass", True),
    ]
    metric = judged["csv"][0][3][0]
    assert metric.num_launches == 10 and metric.change == pytest.approx(0.25, abs=0.01)
    assert metric.baseline_s == pytest.approx(30e-6, rel=0.02), "the column's name gives the unit"


def test_the_command_line_has_the_gate_s_answers_and_exit_codes(tmp_path: Path) -> None:
    base, new = as_csv(tmp_path / "base.csv", rows(1.0)), as_csv(tmp_path / "new.csv", rows(1.25, 3))
    done = run("gate", base, new, *COLUMNS)
    assert done.exit_code == 1
    assert "FAIL: 1 regression, 2 pass. Worst: softmax/1024: " in done.output and "x slower than" in done.output
    assert (
        "Next: alternate launches of both versions, in random order, " in done.output and "ab REF_A" not in done.output
    )
    assert run("gate", base, as_csv(tmp_path / "same.csv", rows(1.0, 3)), *COLUMNS).exit_code == 0
    record = json.loads(run("gate", base, new, *COLUMNS, "--json").output)
    assert record["exit_code"] == 1 and record["cases"][0]["unit"] == {"name": "s", "is_reciprocal": False}
    assert run("gate", base, new, *COLUMNS, "--format", "markdown").output.startswith("# gate: FAIL: 1 regression")
    unpaired = run("gate", base, new, "--launch", "turn", *COLUMNS[:4])
    assert unpaired.exit_code == 0 and "and give this column as --pair" in " ".join(unpaired.output.split())
    few = [as_csv(tmp_path / f"few{index}.csv", rows(1.0, count=1)) for index in (0, 1)]
    done = run("gate", *few, *COLUMNS[:4], "--launch", "turn")
    assert done.exit_code == 4 and "UNKNOWN: 3 inconclusive. 1 launch per side; a verdict needs at" in done.output
    assert "10 times each" in done.output


def test_where_higher_is_better_a_lower_number_is_the_regression(tmp_path: Path) -> None:
    sides = [
        as_json_lines(
            tmp_path / f"{name}.jsonl",
            [{"run": row["turn"], "kernel": row["op"], "GB/s": 1e4 / row["us"]} for row in rows(factor, shift)],
        )
        for name, factor, shift in (("base", 1.0, 0), ("new", 1.25, 3))
    ]
    words = ("--pair", "run", "--case", "kernel", "--value", "GB/s", "--better", "higher", "--unit", "GB/s", "-v")
    done = run("gate", *sides, *words)
    assert done.exit_code == 1 and "regression  softmax" in done.output
    [row] = [line for line in done.output.splitlines() if line.startswith("regression")]
    assert "333 GB/s" in row.replace("334", "333").replace("332", "333") and "-20." in row, row
    assert "Worst: softmax: mean 1.25x lower than the baseline" in done.output.replace("p10", "mean")
    assert "reciprocals are judged" in " ".join(done.output.split())
    assert run("gate", *reversed(sides), *words).exit_code == 0
    assert run("gate", *sides, *words, "--floor-us", 3).exit_code == 2


@pytest.mark.long
def test_self_test_and_history_read_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbench.cli.gate.NUM_COMPARISONS", 5)
    slower = [row | {"us": row["us"] * (1.5 if row["turn"] >= 12 else 1)} for row in rows(1.0, count=24)]
    path, steps = as_csv(tmp_path / "a.csv", rows(1.0, count=24)), as_csv(tmp_path / "b.csv", slower)
    series = recorded(path, CHOSEN)
    assert series.num_launches == 24 and len(series.case_ids) == 3 and "tail" not in series.changes
    done = run("self-test", path, *COLUMNS[:4], "--launch", "turn")
    assert done.exit_code == 0 and "a.csv: 10 pairs, 3 cases, 24 launches" in done.output, done.output
    done = run("history", "--results", steps, "--launch", "turn", *COLUMNS[:4], "--plots", tmp_path / "plots")
    assert done.exit_code == 0 and '"12"' in done.output and "FAIL: " in done.output, done.output
    assert "Next: alternate launches of both versions" in done.output and list((tmp_path / "plots").glob("*.png"))
    assert run("self-test", "--value", "us").exit_code == 2


# Known tools.


def write_all(folder: Path, texts: Sequence[str], suffix: str) -> Path:
    folder.mkdir()
    for index, text in enumerate(texts):
        (folder / f"{index}{suffix}").write_text(text)
    return folder


def moment(index: int, side: int) -> datetime:
    return datetime(2026, 1, 1) + timedelta(minutes=2 * index + side)


def pytest_benchmark(index: int, side: int, factor: float, **changed: Any) -> str:
    data = [1e-3 * factor * math.exp(WOBBLE[(index + 3 * side) % 10])] * 5
    stats = {"mean": data[0], "ops": 1 / data[0], "total": sum(data), "data": data}
    record = {
        "machine_info": {"node": "box", "cpu": {"brand_raw": "cpu", "count": 4}, "python_version": "3.12.0"},
        "commit_info": {"id": f"{side}" * 40, "dirty": False},
        "benchmarks": [{"fullname": "test_x.py::test_x", "stats": stats}],
        "datetime": f"{moment(index, side).isoformat()}+00:00",
    }
    return json.dumps(record | changed, indent=4)


def vllm(index: int, side: int, factor: float, **changed: Any) -> str:
    seconds = factor * math.exp(WOBBLE[(index + 3 * side) % 10])
    record = {
        "date": moment(index, side).strftime("%Y%m%d-%H%M%S"),
        "backend": "vllm",
        "model_id": "llama",
        "num_prompts": 100,
        "request_rate": "inf",
        "duration": 20 * seconds,
        "failed": 0,
        "output_throughput": 1000 / seconds,
        "mean_ttft_ms": 30 * seconds,
        "p99_tpot_ms": 5 * seconds,
    }
    return json.dumps(record | changed)


def torchtitan(index: int, side: int, factor: float, warm_up: float = 9.0) -> str:
    tps = 4000 / factor / math.exp(WOBBLE[(index + 3 * side) % 10])
    lines = ["\x1b[32mBuilding llama3 debugmodel"]
    for step in range(1, 5):
        numbers = "\x1b[32mloss:  7.1  \x1b[38;2;54;234;195mmemory:  1.90GiB(2.00%)  \x1b[34mtps: "
        lines.append(f"\x1b[31mstep: {step:2}  {numbers}{tps / (warm_up if step == 1 else 1):,.0f}  tflops: 1.25")
        lines.append(f"validate step: {step:2}  loss: 7.0  memory:  1.90GiB(2.00%)  tps: 1")
    times = (moment(index, side) + timedelta(seconds=place) for place in range(len(lines)))
    return "".join(
        f"[rank0]:[titan] {time},250 - root - INFO - {line}\x1b[39m\n" for time, line in zip(times, lines, strict=True)
    )


TOOLS = {
    "pytest-benchmark": (pytest_benchmark, ".json", {"test_x.py::test_x": Unit()}),
    "vllm": (
        vllm,
        ".json",
        {
            "model_id=llama num_prompts=100 request_rate=inf/output_throughput": Unit("tokens/s", is_reciprocal=True),
            "model_id=llama num_prompts=100 request_rate=inf/mean_ttft_ms": Unit(),
            "model_id=llama num_prompts=100 request_rate=inf/p99_tpot_ms": Unit(),
        },
    ),
    "torchtitan": (torchtitan, ".log", {"tps": Unit("tokens/s", is_reciprocal=True)}),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_files_of_a_known_tool_are_paired_by_their_times(tmp_path: Path, tool: str) -> None:
    write, suffix, units = TOOLS[tool]
    base, new, same = (
        write_all(tmp_path / name, [write(index, side, factor) for index in range(8)], suffix)
        for name, side, factor in (("base", 0, 1.0), ("new", 1, 1.3), ("same", 1, 1.0))
    )
    launches = read(base)
    assert [launch.scenario for launch in launches] == [tool] * 8
    assert {name: value.unit for name, value in launches[0].cases.items()} == units
    done = run("gate", base, new, "-v")
    assert done.exit_code == 1 and f"FAIL: {len(units)} regression" in done.output, done.output
    assert "8 pairs of alternating launches" in done.output
    assert run("gate", base, same).exit_code == 0
    assert run("gate", base, new, "--case", "x").exit_code == run("gate", base, new, "--pair", "x").exit_code == 2
    assert run("gate", base, new, "--value", "swiftness").exit_code == 2


def test_what_is_read_of_each_tool(tmp_path: Path) -> None:
    for name, text in (
        ("a.json", pytest_benchmark(0, 0, 1.0)),
        ("b.json", vllm(0, 0, 1.0)),
        ("c.log", torchtitan(0, 0, 1.0)),
    ):
        (tmp_path / name).write_text(text)
    [launch] = read(tmp_path / "a.json")
    assert launch.facts["machine"] == "box" and launch.facts["git_commit"] == "0" * 40
    assert launch.ended_at - launch.started_at == pytest.approx(5e-3 * math.exp(WOBBLE[0]), abs=1e-6)
    [launch] = read(tmp_path / "a.json", NumberColumns(value="ops"))
    assert launch.cases["test_x.py::test_x"].unit == Unit("ops/s", is_reciprocal=True)
    [launch] = read(tmp_path / "b.json", NumberColumns(value="mean_ttft_ms"))
    [value] = launch.cases.values()
    assert value.mean_s == pytest.approx(30e-3 * math.exp(WOBBLE[0]))
    [launch] = read(tmp_path / "c.log")
    assert launch.cases["tps"].num_samples == 3, "the first step is a warm-up, and validation is no training"
    assert 1 / launch.cases["tps"].mean_s == pytest.approx(4000 / math.exp(WOBBLE[0]), rel=1e-3)
    assert read(tmp_path / "c.log", NumberColumns(value="memory"))[0].cases["memory"].mean_s == pytest.approx(1.9)
    (tmp_path / "d.json").write_text(f"{vllm(0, 0, 1.0)}\n{vllm(1, 0, 1.0)}\n")  # --append-result
    assert len(read(tmp_path / "d.json")) == 2
    (tmp_path / "e.json").write_text(json.dumps({"avg_latency": 2.0, "latencies": [1.0, 3.0], "percentiles": {}}))
    assert read(tmp_path / "e.json")[0].cases["latencies"].mean_s == pytest.approx(2.0)
    (tmp_path / "f.json").write_text(json.dumps({"elapsed_time": 2.0, "num_requests": 4, "tokens_per_second": 50.0}))
    assert read(tmp_path / "f.json")[0].cases["num_requests=4/tokens_per_second"].mean_s == pytest.approx(0.02)


def test_failed_requests_are_no_times(tmp_path: Path) -> None:
    base = write_all(tmp_path / "base", [vllm(index, 0, 1.0) for index in range(6)], ".json")
    new = write_all(tmp_path / "new", [vllm(index, 1, 1.0, failed=3) for index in range(6)], ".json")
    done = run("gate", base, new)
    assert done.exit_code == 4 and "3 requests failed" in done.output


def test_logs_of_two_ranks_of_one_launch_are_not_two_launches(tmp_path: Path) -> None:
    folder = write_all(tmp_path / "logs", [torchtitan(0, 0, 1.0)] * 2, ".log")
    with pytest.raises(UserError, match="overlap in time, as the ranks of one launch do; give the log of one rank"):
        read(folder)


# Bad input.

TABLE = NumberColumns(launch="l", case="c", value="v")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "is empty; write a header"),
        ("a.csv", "l,c,v\n", "has no number to judge"),
        ("a.csv", "l,case,v\n1,x,3\n", "--case 'c' is not a column of"),
        ("a.csv", "l,c,v\n1,x,3\n1,x,nan\n", "'v' in line 3 of"),
        ("a.csv", "l,c,v\n1,x,12 ms\n", "is '12 ms', not a number above 0"),
        ("a.csv", "l,c,v\n1,x,0\n", "is '0', not a number above 0"),
        ("a.csv", "l,c,v\n1,x,1e999\n", "not a number above 0"),
        ("a.csv", "l,c,v\n1,x\n", "line 2 of"),
        ("a.csv", "l,c,v,unit\n1,x,3,ms\n1,x,3,GB\n", "has case 'x' in GB and in s"),
        ("a.csv", "l,c,v\n1,x,\x00\n", "a.csv"),
        ("a.jsonl", '{"l": 1, "c": "x", "v": true}\n', "is True, not a number above 0"),
        ("a.jsonl", '{"l": 1, "c": "x", "v": 1}\n[1]\n', "line 2 of"),
        ("a.jsonl", '{"l": 1, "c": "x", "v": 1}\n{"l"\n', "is not valid JSON; write one object per line"),
        ("a.parquet", "PAR1", "needs pyarrow"),
    ],
)
def test_a_table_that_cannot_be_judged_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / name
    path.write_text(text)
    done = run("gate", path, path, "--launch", "l", "--case", "c", "--value", "v")
    assert done.exit_code == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_what_would_mix_numbers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("l,c,v,p\n1,x,3,a\n2,x,4,a\n")
    (tmp_path / "moved.csv").write_text("l,c,v,p\n1,x,3,a\n1,x,4,b\n")
    (tmp_path / "ms.csv").write_text("l,c,v,unit\n1,x,3,ms\n1,x,3000,us\n")
    (tmp_path / "gb.csv").write_text("l,c,v,unit\n1,x,3,GB\n1,x,3,GB\n")
    paired = NumberColumns(launch="l", case="c", value="v", pair="p")
    twice = read(tmp_path / "twice.csv", paired)
    with pytest.raises(UserError, match="of one side have pair 'a'; a pair is one launch per side"):
        gate(twice, [*map(replaced, twice)], Options())
    with pytest.raises(UserError, match="has 'a' and 'b' in column 'p'"):
        read(tmp_path / "moved.csv", paired)
    [launch] = read(tmp_path / "ms.csv", TABLE)
    assert launch.cases["x"].mean_s == pytest.approx(3e-3), "times in several units are the same times"
    warnings: list[str] = []
    sides = read(tmp_path / "ms.csv", TABLE), read(tmp_path / "gb.csv", TABLE, warnings)
    assert warnings and "1 copy of an earlier row" in warnings[0]
    with pytest.raises(UserError, match="case 'x' is in s, and in GB in"):
        gate(*sides, Options())


def replaced(launch: Launch) -> Launch:
    return Launch(**{**vars(launch), "run_id": f"{launch.run_id}, candidate"})


def test_run_files_choose_no_columns_and_a_table_must(tmp_path: Path) -> None:
    base, new = taking_turns(tmp_path, 1e-3, 1e-3)
    done = run("gate", base, new, "--unit", "ms")
    assert done.exit_code == 2 and "in which nothing is chosen" in done.stderr
    table = as_csv(tmp_path / "base.csv", rows(1.0))
    for words, message in (
        ((), "for a table, give the columns --case and --value"),
        (("--value", "us"), "is a table; give --case, one of its columns: turn, op, size, us"),
    ):
        done = run("gate", table, table, *words)
        assert done.exit_code == 2 and message in done.stderr, done.stderr


def test_a_parquet_table_is_read_where_pyarrow_is_installed(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(rows(1.0)), tmp_path / "a.parquet")
    [first, *_] = read(tmp_path / "a.parquet", CHOSEN)
    assert first.cases == read(as_csv(tmp_path / "a.csv", rows(1.0)), CHOSEN)[0].cases
