"""The tables of promises are what `./run.sh bench` prints: docs/promises.md all of it, the README some rows of it."""

import re
import time
from pathlib import Path

import pytest
from conftest import DATA, ROOT
from processes import Children

import benchmarks.__main__
from benchmarks.__main__ import main
from benchmarks.claims import HEAD, Claim, benchmark, claims_of, detail, holds, lines, names


@pytest.fixture(autouse=True)
def a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.claims.date_and_commit", lambda: "2026-01-01, 1234567")


def cells(line: str) -> tuple[str, str, str]:
    """(promise, wanted, command) of a row: all but what was measured, and when."""
    promise, _, wanted, _, command = line.strip().strip("|").split(" | ")
    return promise.strip(), wanted, command.strip()


def rows_of(page: str) -> list[str]:
    section = (ROOT / page).read_text().split(HEAD + "\n")
    assert len(section) == 2, "the page has the table once, with the head that bench prints"
    return section[1].split("\n\n")[0].splitlines()


def test_the_page_has_the_rows_that_bench_prints_and_the_readme_some_of_them() -> None:
    printed = [line for name in names() for line in lines(name, None)]
    rows = rows_of("docs/promises.md")
    assert [cells(line) for line in rows] == [cells(line) for line in printed]
    chosen = rows_of("README.md")
    assert len(chosen) >= 3 and chosen == [row for row in rows if row in chosen]


def test_every_command_of_the_table_exists_and_every_row_has_a_figure() -> None:
    for row in rows_of("docs/promises.md"):
        command = re.search(r"`(\w+)` \|$", row)
        assert command and command[1] in names() and callable(benchmark(command[1]).main)
        assert re.search(r"\d", row.split(" | ")[1])


def test_a_figure_is_of_the_measurements_that_it_names() -> None:
    rows = [("cold, 2x2", 3.0, -1.0), ("warm, 2x2", 10.4, -1.0), ("warm, 4x4", 20.6, -30.0), ("share", 0.5, 0.6)]
    claim = Claim("planning", "{:.0f}x, {:.0f}x ({least:.1f} to {most:.1f}, {total:.0f})", "30x", ("warm, *",))
    assert claim.measured(rows) == "10x, 21x (10.4 to 20.6, 31)"
    assert Claim("share", "{:.0%}", "60 %", ("share",)).measured(rows) == "50 %"
    with pytest.raises(ValueError, match="no measurement is called hot"):
        Claim("planning", "{}", "", ("hot",)).measured(rows)
    assert [holds(row) for row in rows] == [True, True, False, True]
    assert "FAIL warm, 4x4" in detail(rows[2]) and "(at least 30)" in detail(rows[2])


def test_nothing_may_be_exceeded_where_none_is_allowed() -> None:
    assert holds(("wrong", 0.0, 0.0)) and not holds(("wrong", 1.0, 0.0)) and not holds(("x", float("nan"), 1.0))


def test_bench_prints_a_table_and_says_what_does_not_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["sprint"]) == 2
    assert "no benchmark 'sprint'; there are accuracy, any_numbers," in capsys.readouterr().err

    rows = [("list", 4.0, 3.0), ("help", 2.0, 3.0)]
    monkeypatch.setattr(benchmarks.__main__, "measured", lambda *_: rows)
    assert main(["startup"]) == 1
    printed = capsys.readouterr()
    [claim] = claims_of(benchmark("startup"))
    assert printed.out == f"{HEAD}\n{claim.line('4.00x, 2.00x', 'startup')}\n"
    assert "FAIL list" in printed.err
    monkeypatch.setattr(benchmarks.__main__, "measured", lambda *_: None)
    assert main(["startup"]) == 1
    assert capsys.readouterr().out == f"{HEAD}\n{claim.line('not measured', 'startup')}\n"


def test_a_benchmark_that_hangs_is_stopped_with_what_it_started(
    children: Children, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{DATA}")
    began = time.monotonic()
    assert benchmarks.__main__.measured("hanging_bench", 3.0) is None
    assert time.monotonic() - began < 3.0 + benchmarks.__main__.END_S
    assert "hanging_bench did not end within 3 s and was stopped" in capfd.readouterr().err
    assert not (tmp_path / "made").exists()
    status = Path("/proc", (tmp_path / "sleeper").read_text(), "status")
    assert not status.exists() or "State:\tZ" in status.read_text()
