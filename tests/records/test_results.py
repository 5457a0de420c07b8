import json
import math
from pathlib import Path

import pytest

from distbench.records.bus_bandwidth import busbw_factor
from distbench.records.run_file import SCHEMA_VERSION, Case, CaseResult, Environment, append, header_of, read_run
from distbench.spec import UserError
from distbench.statistics.intervals import median, median_ci, median_ci_ranks

HEADER = {"type": "run", "schema_version": SCHEMA_VERSION, "run_id": "r", "job": {}, "environment": {}}


def case(name: str) -> dict[str, object]:
    return CaseResult(Case(name, "collective"), "ok", samples_s=[1.0, 2.0]).to_record()


def written(path: Path, *records: dict[str, object]) -> Path:
    for record in records:
        append(path, record)
    return path


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    run = read_run(
        written(tmp_path / "run.jsonl", HEADER, case("a"), case("b"), {"type": "footer", "status": "complete"})
    )
    assert [record["case"]["id"] for record in run.cases] == ["a", "b"]
    assert run.footer == {"type": "footer", "status": "complete"} and run.warnings == []


def test_a_file_without_a_footer_is_an_interrupted_run_whose_cases_count(tmp_path: Path) -> None:
    run = read_run(written(tmp_path / "run.jsonl", HEADER, case("a")))
    assert len(run.cases) == 1 and run.footer is None and "interrupted" in run.warnings[0]


def test_a_cut_line_costs_only_itself_and_the_next_append_stands_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", HEADER, case("a"))
    with path.open("a") as file:
        file.write('{"type": "case", "case": {"id": "lo')
    append(path, case("b"))
    run = read_run(path)
    assert [record["case"]["id"] for record in run.cases] == ["a", "b"]
    assert "line 3" in run.warnings[0]


@pytest.mark.parametrize(
    "line", ["not json", "[]", '{"type":"case"}', '{"type":"case","case":{"id":"x"},"status":"fine"}']
)
def test_a_corrupt_line_is_left_out_with_a_warning(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "run.jsonl", HEADER, case("a"))
    with path.open("a") as file:
        file.write(line + "\n")
    run = read_run(path)
    assert len(run.cases) == 1 and "line 3" in run.warnings[0]


@pytest.mark.parametrize("text", ["", "hello\n", '{"type":"case"}\n', "\x00\x01\x02"])
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match="not a distbench run file"):
        read_run(path)


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, -5, "1", None])
def test_a_version_that_is_not_known_is_refused_with_a_sentence(tmp_path: Path, version: object) -> None:
    path = written(tmp_path / "run.jsonl", {**HEADER, "schema_version": version})
    with pytest.raises(UserError, match="update distbench"):
        read_run(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_run(tmp_path / "none.jsonl")


def test_not_a_number_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        append(tmp_path / "run.jsonl", {"x": math.nan})


def test_median_of_odd_even_and_none() -> None:
    assert median([3, 1, 2]) == 2 and median([4, 1, 2, 3]) == 2.5 and math.isnan(median([]))


@pytest.mark.parametrize("count", [6, 7, 10, 15, 20, 50, 100, 333, 999])
def test_ci_ranks_cover_95_percent_and_no_narrower_pair_does(count: int) -> None:
    def coverage(low: int, high: int) -> float:
        return sum(math.comb(count, k) for k in range(low + 1, high + 1)) / 2**count

    low, high = median_ci_ranks(count)
    assert low + high == count - 1
    assert coverage(low, high) >= 0.95
    assert coverage(low + 1, high - 1) < 0.95


def test_ci_of_a_known_sample() -> None:
    # Conover's table: for n = 10 the 2nd smallest and 2nd largest bound the median.
    assert median_ci([10, 9, 8, 7, 6, 5, 4, 3, 2, 1]) == (2, 9)


@pytest.mark.parametrize(
    ("op", "group_size", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 2, 0.5),
        ("broadcast", 8, 1.0),
        ("send_recv", 2, 1.0),
        ("scatter", 4, 0.75),
        ("gather", 8, 0.875),
        ("all_to_all_v", 4, 0.75),
    ],
)
def test_busbw_factors_are_those_of_nccl_tests(op: str, group_size: int, factor: float) -> None:
    assert busbw_factor(op, group_size) == factor


def test_an_unknown_collective_has_no_factor() -> None:
    with pytest.raises(ValueError, match="gather_scatter"):
        busbw_factor("gather_scatter", 4)


def test_lines_are_plain_json(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", HEADER, case("a"))
    assert [json.loads(line)["type"] for line in path.read_text().splitlines()] == ["run", "case"]


def test_traces_are_read_beside_cases_and_a_broken_one_is_left_out(tmp_path: Path) -> None:
    table = {"columns": ["rank", "kind"], "rows": [[0, "all_gather"]]}
    whole = {"type": "trace", "case_id": "a", **table, "phases": {"columns": ["rank"], "rows": []}}
    failed = {"type": "trace", "case_id": "a", "error": "RuntimeError: no"}
    lacking = [{**whole, "rows": [[0]]}, {**whole, "phases": None}, {"type": "trace", "error": "no case"}]
    run = read_run(written(tmp_path / "run.jsonl", HEADER, case("a"), whole, failed, *lacking))
    assert run.traces == [whole, failed] and len(run.cases) == 1
    wrong = (
        "line 5: rows is not a list of rows with 2 values",
        "line 6: phases is missing",
        "line 7: case_id is missing",
    )
    assert all(any(words in warning for warning in run.warnings) for words in wrong)
    assert read_run(written(tmp_path / "old.jsonl", HEADER, case("a"))).traces == []


def test_a_header_is_read_with_what_it_lacks() -> None:
    job = {"scenario": "toy", "mesh": {"tp": 2}, "settings": {"iterations_per_sample": 10, "x": 1}, "device": "cpu"}
    whole = header_of({"run_id": "r", "job": job, "environment": {"num_cpus": 4, "load_at_start": [2.0, 1, 1]}})
    assert (whole.scenario, whole.mesh, whole.environment.load_per_cpu) == ("toy", {"tp": 2}, 0.5)
    assert (whole.facts["mesh"], whole.facts["pipelined"], whole.facts["settings"]) == ("tp=2", 10, {"x": 1})
    odd = header_of({"job": None, "environment": None})
    assert (odd.scenario, odd.mesh, odd.settings, odd.started_at) == (None, None, {}, 0)
    assert odd.environment == Environment() and odd.facts["mesh"] is None
