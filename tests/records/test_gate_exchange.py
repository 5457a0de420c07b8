"""Stored baselines, other tools' formats out, nccl-tests' JSON in."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gate_runs import CASE, OTHER, case, launches, steady, taking_turns, write_side
from processes import Children

from distbench.cli.main import main
from distbench.judge.gate import gate
from distbench.records.baselines import read_baseline
from distbench.records.nccl_tests import read_nccl_tests
from distbench.records.run_file import read_run
from distbench.spec.errors import UserError
from distbench.statistics.verdicts import Options


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


FORMS = ("pytest-benchmark", "customSmallerIsBetter")


def two_cases(index: int) -> dict[str, dict[str, object]]:
    return {CASE: case(steady(1e-3, index)), OTHER: case(status="wrong", error="off") if index == 2 else case([0.5])}


def test_a_baseline_keeps_what_a_gate_needs(tmp_path: Path) -> None:
    write_side(tmp_path / "runs", two_cases)
    saved = run("baseline", "save", tmp_path / "runs", "--results", tmp_path)
    path = tmp_path / "baselines" / "box-1" / "collectives-tp-4-cpu.json"
    assert saved.exit_code == 0 and saved.output == f"baseline: {path}\n"
    before, after = launches(tmp_path / "runs"), read_baseline(path)
    assert [one.run_id for one in after] == [one.run_id for one in before]
    for old, new in zip(before, after, strict=True):
        kept = ("facts", "variants", "started_at", "ended_at", "complete")
        assert [getattr(new, name) for name in kept] == [getattr(old, name) for name in kept]
        assert new.foreign_load == pytest.approx(0.1)
        assert new.cases[CASE].mean_s == pytest.approx(old.cases[CASE].mean_s, rel=1e-5)
        assert new.cases[CASE].p10_s == pytest.approx(old.cases[CASE].p10_s, rel=1e-5)
    assert (after[2].cases[OTHER].status, after[2].cases[OTHER].error) == ("wrong", "off")
    # Reviewable in git: a case is a line, and there are no raw samples.
    lines = path.read_text().splitlines()
    assert sum(CASE in line for line in lines) == 1
    assert len(json.loads(path.read_text())["cases"][CASE]["mean_s"]) == 10


def test_a_stored_baseline_only_warns(tmp_path: Path) -> None:
    base, _ = taking_turns(tmp_path, 1e-3, 1e-3)
    run("baseline", "save", base, "--results", tmp_path)
    late = write_side(tmp_path / "late", lambda index: {CASE: case(steady(1.5e-3, index))}, start=90_000.0)
    done = run("gate", tmp_path / "baselines", late)
    assert (
        done.exit_code == 0
        and "INCONCLUSIVE: 1 inconclusive. 1 measured slower than the tolerance. Worst: " in done.output
    )
    assert "1.5x slower than the baseline (95 % CI 1.47-1.53x)" in " ".join(done.output.split())
    assert run("gate", tmp_path / "baselines", late, "--dedicated").exit_code == 1


def test_baselines_are_listed_and_shown(tmp_path: Path) -> None:
    message = " ".join(run("baseline", "list", "--results", tmp_path).output.split())
    assert message.endswith("Next: distbench baseline save RUN")
    write_side(tmp_path / "runs", two_cases)
    run("baseline", "save", tmp_path / "runs", "--results", tmp_path)
    listed = " ".join(run("baseline", "list", "--results", tmp_path).output.split())
    assert "collectives tp=4 10 2 aaaaaaaa" in listed
    file = tmp_path / "baselines" / "box-1" / "collectives-tp-4-cpu.json"
    assert json.loads(run("baseline", "show", file, "--json").stdout) == json.loads(file.read_text())
    shown = run("baseline", "show", tmp_path / "baselines" / "box-1" / "collectives-tp-4-cpu.json")
    assert shown.exit_code == 0
    assert "10 launches" in shown.output and "torch 2.13.0" in shown.output
    row = next(line for line in shown.output.splitlines() if line.startswith(CASE))
    # WOBBLE's standard deviation is 1.9 %.
    assert row.split()[1:] == ["10", *["1.00", "ms,", "1.9", "%"] * 2]


def stored(**changed: object) -> str:
    """A baseline of one launch and one case, some of whose fields or columns are changed; its facts are not known."""
    columns = {"num_samples": [3], "mean_s": [2.0], "p10_s": [1.0]}
    launch = {"run_id": "r", "started_at": 1.0, "variants": "", "foreign_load": None, "complete": True, "facts": {}}
    record: dict[str, object] = {"distbench_baseline": 2, "scenario": "s", "saved_at": "then", "facts": {}}
    record |= {"launches": [launch], "cases": {"c": {name: changed.pop(name, columns[name]) for name in columns}}}
    return json.dumps({**record, **changed})


def test_a_baseline_that_knows_no_facts_is_read_by_all(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(stored())
    for command in (
        ["baseline", "show"],
        ["baseline", "save", "--results", tmp_path],
        *(["export", form] for form in FORMS),
    ):
        done = run(*command, tmp_path / "old.json")
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not a baseline"),
        ('{"distbench_baseline": 99}', "is newer than this distbench"),
        ('{"distbench_baseline": 1}', "without 10th percentiles; save the baseline again"),
        ('{"distbench_baseline": 2, "launches": [{}]}', "cannot be used"),
        (stored(launches=[{}]), "launches[0].run_id is missing"),
        (stored(mean_s=["x"]), "cannot be used"),
        (stored(p10_s=[0]), "cannot be used: cases.c.p10_s[0] is 0, not"),
        (stored(facts=3), "cannot be used: facts is 3, not an object"),
        ("{", "cannot be read"),
    ],
)
def test_a_bad_baseline_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    done = run("baseline", "show", tmp_path / "bad.json")
    assert done.exit_code == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_pytest_benchmark_compares_two_exports(children: Children, tmp_path: Path) -> None:
    """By running it: it must read both files and put the times of each case side by side."""
    base, new = taking_turns(tmp_path, 1e-3, 1.5e-3)
    storage = tmp_path / "storage" / "machine"
    storage.mkdir(parents=True)
    for number, folder in enumerate((base, new), start=1):
        assert (
            run("export", "pytest-benchmark", folder, "-o", storage / f"000{number}_{folder.name}.json").exit_code == 0
        )
    tool = Path(sys.executable).with_name("pytest-benchmark")
    command = [str(tool), "--storage", f"file://{tmp_path / 'storage'}", "compare", "--columns=min,median,rounds"]
    done = children.run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if CASE in line]
    assert len(rows) == 2, done.stdout
    assert all(line.rstrip().endswith("10") for line in rows)
    slower = next(line for line in rows if "new" in line)
    assert "(1.50)" in slower, done.stdout


def test_exports_hold_one_value_a_launch(tmp_path: Path) -> None:
    runs = write_side(tmp_path / "runs", two_cases, count=4)
    (smaller, other) = json.loads(run("export", "customSmallerIsBetter", runs).output)
    assert smaller["name"] == f"collectives: {CASE}" and smaller["unit"] == "ms"
    assert smaller["value"] == pytest.approx(0.995, abs=1e-3), "the median of 1.030, 0.980, 1.010, 0.970"
    assert other["extra"].startswith("3 launches"), "the one that was wrong is not exported"


def test_exporting_nothing_is_refused(tmp_path: Path) -> None:
    runs = write_side(tmp_path / "runs", lambda index: {CASE: case(status="skipped")}, count=1)
    done = run("export", "pytest-benchmark", runs)
    assert done.exit_code == 2 and "nothing was exported" in done.stderr


def nccl_tests(moment: str, factor: float, per_iteration: bool = False, wrong: float = 0.0) -> dict[str, Any]:
    """A file as nccl-tests' src/util.cu writes it (file version 2). Constructed from that source, not recorded."""
    devices = [
        {
            "rank": rank,
            "group": 0,
            "pid": 100 + rank,
            "hostname": "node1",
            "device": rank,
            "device_hex": f"0000:0{rank}:00",
        }
        | {"device_info": "NVIDIA H100 80GB HBM3"}
        for rank in range(8)
    ]
    results = []
    for size in (1024, 1 << 20):
        row: dict[str, Any] = {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1"}
        for placement, time_us in (("out_of_place", 20.0 * factor), ("in_place", 19.0 * factor)):
            row[placement] = {"time": time_us, "alg_bw": 0.05, "bus_bw": 0.09, "nwrong": wrong}
            if per_iteration:
                row[f"{placement}_per_iter"] = {"min_us": time_us, "times_us": [time_us * 1.2, time_us, time_us * 1.1]}
        results.append(row | {"actual_iterations": 20, "experiment_name": "all_reduce_perf"})
    return {
        "version": 2,
        "start_time": moment,
        "args": ["./build/all_reduce_perf", "-b", "1K", "-J", "x.json"],
        "env": ["AWS_SECRET_ACCESS_KEY=hush"],
        "nccl_version": 22703,
        "config": {"nthreads": 1, "ngpus": 8, "iterations": 20, "aggregated_iterations": 1, "devices": devices},
        "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 0.09, "okay": "unchecked"},
        "errors": [],
        "end_time": moment,
    }


def write_nccl_side(folder: Path, factor: float, minute: int, **more: Any) -> Path:
    folder.mkdir()
    for index in range(6):
        data = nccl_tests(f"2026-01-01 1{index}:{minute:02}:00", factor * (1 + 0.01 * (index % 3)), **more)
        (folder / f"{index}.json").write_text(json.dumps(data))
    return folder


def test_nccl_tests_files_are_read_as_runs(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.json"
    path.write_text(json.dumps(nccl_tests("2026-01-01 10:00:00", 1.0, per_iteration=True)))
    read = read_nccl_tests(path)
    assert [one["case"]["id"] for one in read.cases][:2] == [
        "collective/f32[256]/all_reduce/sum/ranks/out_of_place",
        "collective/f32[256]/all_reduce/sum/ranks/in_place",
    ]
    assert read.cases[0]["samples_s"] == pytest.approx([24e-6, 20e-6, 22e-6])
    assert read.header["environment"]["device_name"] == "NVIDIA H100 80GB HBM3"
    assert read.header["environment"]["world_size"] == 8
    assert read.header["job"]["settings"]["iterations_per_sample"] == 1
    assert "hush" not in json.dumps(read.header), "its file holds the whole environment, secrets included"


def test_nccl_tests_files_are_gated_and_reported(tmp_path: Path) -> None:
    base, new = write_nccl_side(tmp_path / "base", 1.0, 0), write_nccl_side(tmp_path / "new", 1.3, 5)
    done = run("gate", base, new, "-v")
    assert done.exit_code == 1 and "FAIL: 4 regression" in done.output
    assert "6 pairs of alternating launches" in done.output
    bad = write_nccl_side(tmp_path / "bad", 1.0, 5, wrong=7.0)
    done = run("gate", base, bad, "--format", "json")
    assert done.exit_code == 4
    assert json.loads(done.output)["cases"][0]["reason"] == "wrong in 6 of 6 candidate launches: 7 elements are wrong"
    written = tmp_path / "out" / "nccl.jsonl"
    written.parent.mkdir()
    assert run("export", "run", base / "0.json", "-o", written).exit_code == 0
    assert len(read_run(written).cases) == 4
    shown = run("report", written, "--full")
    assert "all_reduce" in shown.output and "a sample is the mean of 20 iterations back to back" in shown.output


def test_a_broken_nccl_tests_file_is_refused(tmp_path: Path) -> None:
    data = nccl_tests("2026-01-01 10:00:00", 1.0)
    for name, value, message in (
        ("results", [], "no results"),
        ("start_time", "today", "does not have the format of version 2"),
    ):
        (tmp_path / "x.json").write_text(json.dumps({**data, name: value}))
        with pytest.raises(UserError, match=message):
            read_nccl_tests(tmp_path / "x.json")


def test_gating_takes_a_baseline_apart_by_run(tmp_path: Path) -> None:
    """A stored baseline holds the launches it was made from: the same run may not stand on both sides."""
    base, _ = taking_turns(tmp_path, 1e-3, 1e-3)
    run("baseline", "save", base, "--results", tmp_path)
    stored = read_baseline(next((tmp_path / "baselines").rglob("*.json")))
    with pytest.raises(UserError, match="is in the baseline and in the candidate"):
        gate(stored, launches(base), Options())
