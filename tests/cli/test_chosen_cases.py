"""`-k`: report, compare and gate read the chosen cases alone."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from conftest import ROOT
from gate_runs import CASE, OTHER, case, records, steady, write

from distbench.cli.main import main

COLLECTIVES = ROOT / "tests" / "golden" / "collectives.jsonl"


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [*map(str, words)])


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """Five launches per side; OTHER is slower on the second side."""
    for name, start, other_s in (("a", 1000.0, 1.0), ("b", 1010.0, 2.0)):
        for number in range(5):
            cases = {CASE: case(steady(1.0, number)), OTHER: case(steady(other_s, number))}
            lines = records(f"{name}{number}", start + 20 * number, cases)
            write(tmp_path / name / f"{number}.jsonl", lines)
    return tmp_path / "a", tmp_path / "b"


def test_a_report_shows_the_chosen_cases() -> None:
    rows = json.loads(run("report", COLLECTIVES, "-k", "all_gather and dp_shard", "--json").stdout)
    assert rows and all("all_gather/dp_shard" in row["id"] for row in rows)


def test_compare_and_gate_judge_the_chosen_cases(sides: tuple[Path, Path]) -> None:
    assert run("gate", *sides).exit_code == 1
    assert run("gate", *sides, "-k", f"not '{OTHER}'").exit_code == 0
    rows = json.loads(run("compare", *sides, "-k", f"'{OTHER}'", "--json").stdout)
    assert [row["case"] for row in rows] == [OTHER]


@pytest.mark.parametrize("command", ["report", "compare", "gate"])
def test_an_expression_without_a_case_is_refused(command: str, sides: tuple[Path, Path]) -> None:
    for expression, message in (("nothing", "matches 0 of 2 cases"), ("(", "a part of a case's id is missing")):
        done = run(command, *sides[: 1 if command == "report" else 2], "-k", expression)
        assert done.exit_code == 2 and message in " ".join(done.stderr.split()), done.output


def test_paths_have_their_own_choice() -> None:
    assert "RUN::PART" in run("report", COLLECTIVES, "--paths", "-k", "x").stderr
