"""The faults of our own: that they are many, that the benchmark sees what goes wrong, and some of them tried; and the
page of faults, whose every line is held by a test."""

import re
from pathlib import Path

import pytest
from conftest import ROOT
from processes import Children

from benchmarks.bench_faults import FAULTS, line, rows_of
from benchmarks.claims import holds
from benchmarks.faulty_call import FaultyCall, Outcome, judge, tried

TESTS = ROOT / "tests"
TRIED = (
    "run: a mesh dim twice",
    "run: results in /proc",
    "gate: a side that is not there",
    "ab: a variable without a value",
    "run file: a line of 50 MB",
    "files: a folder of pipes and loops",
    "files: a name that is no text",
    "files: a missing name that is no text",
    "surroundings: ASCII output by name",
    "surroundings: all three closed",
    "surroundings: output full",
)


def test_there_are_more_than_a_hundred_and_each_has_its_name() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) > 200
    assert set(TRIED) <= set(names)


@pytest.mark.parametrize("name", TRIED)
def test_a_fault_is_met_as_it_should(children: Children, tmp_path: Path, name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    (tmp_path / "here").mkdir()
    outcome = tried(fault, tmp_path / "here")
    assert outcome.wrong == {}, line(1, fault, outcome)


def test_what_goes_wrong_is_seen() -> None:
    fault = FaultyCall("x", "distbench run", "no scenario", code=(2, 3))
    assert not judge(fault, 2, "", "distbench: no scenario 'x'\n") and not judge(fault, 3, "no\nscenario", "")
    assert judge(fault, 1, "", "Traceback (most recent call last):\nValueError\n") == {
        "traceback": 1,
        "exit code": 1,
        "no sentence": 1,
    }
    assert judge(fault, 2, "no scenario", "x" * 2000) == {"too long": 1}
    assert judge(fault, 2, "no scenario \x1b[31m", "") == {"raw": 1}
    assert judge(fault, 2, "no scenario\n::set-output x", "") == {"raw": 1}


def test_a_hang_an_orphan_and_a_lost_case_are_seen(children: Children, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    outcome = tried(FaultyCall("x", "sleep 30 & sleep 30", "", 0, timeout_s=0.3, num_ok=1), tmp_path / "here")
    assert outcome.wrong == {"hang": 1, "exit code": 1, "lost case": 1}
    rows = {name: (measured, holds((name, measured, bound))) for name, measured, bound in rows_of([outcome] * 100)}
    assert (
        rows["faults"] == (100, True) and rows["faults: hang"] == (100, False) and rows["faults: orphan"] == (0, True)
    )
    slight = rows_of([Outcome({"exit code": 1}, 0, "", 0.1)])
    assert ("faults: said wrongly", 1.0, 0.0) in slight


def test_every_line_of_the_page_of_faults_is_held_by_a_test() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| ") and "`test_" in row]
    assert rows and all(re.search(r"`test_\w+` \|$", row) for row in rows)
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row)}
    assert len(named) > 35
    code = "".join(file.read_text() for file in TESTS.rglob("test_*.py"))
    assert sorted(named - set(re.findall(r"^def (test_\w+)", code, re.MULTILINE))) == []
