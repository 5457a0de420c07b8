"""`distbench site`: history's verdicts, an index that reads only what is new, and folders that belong to others."""

import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import ROOT
from foreign_rows import as_csv, rows
from site_runs import FASTER, IDS, RECOVERED, SLOWER, write_runs

from distbench.cli.main import main
from distbench.records.run_index import INDEX_NAME
from distbench.statistics import change_points as statistics


def site(results: Path, folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(
        main, ["site", "--results", str(results), "--output-dir", str(folder), "--run-pages", "0", *arguments]
    )
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return write_runs(tmp_path / "results")


def changes_of(series: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {each["case_id"]: each["levels"] for each in series if len(each["levels"]) > 1}


@pytest.mark.long
def test_the_changes_are_those_of_history(runs: Path, tmp_path: Path) -> None:
    """On each machine, as `history` of that machine's runs."""
    write_runs(runs, "box-2", 20, {SLOWER: [(9, 99, 1.3)]})
    code, out, _ = site(runs, tmp_path / "site", "--json")
    changed = json.loads(out)["changed"]
    assert code == 0 and [each["standing"] for each in changed] == ["slower", "slower", "recovered", "faster"]
    for machine in ("box-1", "box-2"):
        history = CliRunner().invoke(main, ["history", "--results", str(runs / machine), "--json"])
        own = [each for each in changed if each["machine"] == machine]
        assert changes_of(own) == changes_of(json.loads(history.stdout)) != {}


@pytest.mark.long
def test_a_selection_and_alternating_commits_are_judged_as_by_history(runs: Path, tmp_path: Path) -> None:
    write_runs(runs, "box-1", 12, {})  # the oldest launches of every commit are of unchanged code
    for index in range(6):  # two commits take turns
        shutil.copy(runs / "box-1" / f"{index + 2:02}.jsonl", runs / f"again-{index}.jsonl")
        text = (
            (runs / f"again-{index}.jsonl")
            .read_text()
            .replace('"box-1-', '"again-')
            .replace('"started_at": 18', '"started_at": 19')
        )
        (runs / f"again-{index}.jsonl").write_text(text)
    for chosen in ((), ("-k", "not 64 and not 256")):
        _, out, _ = site(runs, tmp_path / "site", "--json", *chosen)
        history = CliRunner().invoke(main, ["history", "--results", str(runs), "--json", *chosen])
        assert changes_of(json.loads(out)["changed"]) == changes_of(json.loads(history.stdout)) != {}


def cases_of(page: Path) -> list[str]:
    """The cases in the page's tables, in their order."""
    plain = re.sub(r"</?(span|wbr)>", "", page.read_text())
    return re.findall(r'<tr><td class="left long">(collective/[^<]*)</td>', plain)


@pytest.mark.long
def test_the_headline_counts_regressions_and_pages_have_every_case_once(runs: Path, tmp_path: Path) -> None:
    _, out, _ = site(runs, tmp_path / "site")
    headline = "FAIL: 2 regressions in 14 cases since 2027-01-15, 1 of them recovered. Improvements: 1."
    assert headline in out and out.splitlines()[-1].startswith("Next: distbench ab 11111111 12121212 -- collectives")
    assert headline in (tmp_path / "site" / "index.html").read_text()
    names = cases_of(tmp_path / "site" / "collectives-on-box-1-tp-4.html")
    assert names[:3] == [SLOWER, RECOVERED, FASTER] and names[3:] == sorted(IDS[3:])


@pytest.mark.parametrize(
    ("count", "severity"),
    [(24, "PASS: no change in 14 cases"), (4, "UNKNOWN: too few launches to detect a change: 4 launches")],
)
@pytest.mark.long
def test_no_change_and_too_few_launches_are_headlines(tmp_path: Path, count: int, severity: str) -> None:
    code, out, _ = site(write_runs(tmp_path / "results", count=count, factors={}), tmp_path / "site")
    assert code == 0 and out.startswith(severity)


@pytest.mark.long
def test_the_index_reads_only_new_and_changed_files(runs: Path, tmp_path: Path) -> None:
    def num_read() -> int:
        _, _, err = site(runs, tmp_path / "site")
        [number] = re.findall(r"\((\d+) files? read\)", err)
        return int(number)

    assert [num_read(), num_read()] == [24, 0]
    newest = runs / "box-1" / "23.jsonl"
    text = newest.read_text()
    newest.unlink()
    assert num_read() == 0 and "23 launches" not in text
    assert "2027-02-07" not in (tmp_path / "site" / "collectives-on-box-1-tp-4.html").read_text()
    newest.write_text(text)
    assert num_read() == 1
    newest.write_text(text.replace("box-1-23", "box-1-new"))
    assert num_read() == 1
    (runs / "broken.jsonl").write_text("{")
    assert [num_read(), num_read()] == [1, 0]
    _, out, _ = site(runs, tmp_path / "site", "-v")
    assert "left out" in out and "broken.jsonl" in out


@pytest.mark.long
def test_a_damaged_or_old_index_is_written_again_and_a_locked_one_is_a_sentence(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site(runs, tmp_path / "site")
    index = runs / INDEX_NAME
    before = (tmp_path / "site" / "index.html").read_text()
    for is_old in (False, True):
        if is_old:
            with closing(sqlite3.connect(index)) as database:
                database.execute("PRAGMA user_version = 99")
        else:
            index.write_bytes(b"no database" * 100)
        code, _, err = site(runs, tmp_path / "site")
        assert code == 0 and err.count("all run files are read again") == 1 and "(24 files read)" in err
        assert (tmp_path / "site" / "index.html").read_text() == before
    monkeypatch.setattr("distbench.records.run_index.LOCK_S", 0.05)
    other = sqlite3.connect(index)
    other.execute("BEGIN EXCLUSIVE")
    code, _, err = site(runs, tmp_path / "site")
    other.close()
    assert code == 2 and "another distbench site is writing" in err and len(err.strip().splitlines()) == 1


@pytest.mark.long
def test_files_of_others_are_never_overwritten_or_deleted(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "index.html").write_text("mine")
    code, _, err = site(runs, folder)
    assert code == 2 and "was not written by distbench site" in err and (folder / "index.html").read_text() == "mine"
    assert not (runs / INDEX_NAME).exists()
    (folder / "index.html").unlink()
    assert site(runs, folder)[0] == 0 == site(runs, folder)[0]
    (folder / "CNAME").write_text("example.org")
    assert site(runs, folder)[0] == 2 and (folder / "CNAME").exists()
    (folder / "CNAME").unlink()
    (folder / "index.html").write_text("changed")
    code, _, err = site(runs, folder)
    assert code == 2 and "was changed after" in err and (folder / "index.html").read_text() == "changed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results", "site"]


@pytest.mark.long
def test_a_failed_build_leaves_the_earlier_site(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site(runs, tmp_path / "site")
    before = {path: path.read_bytes() for path in (tmp_path / "site").iterdir()}

    def full(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("distbench.report.site.write_whole", full)
    code, _, err = site(runs, tmp_path / "site")
    assert code == 2 and "No space left" in err
    assert {path: path.read_bytes() for path in (tmp_path / "site").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results", "site"]


def only_new(source: str, target: str) -> None:
    """Copy a file that does not exist yet."""
    if not Path(target).exists():
        shutil.copy(source, target)


@pytest.mark.long
def test_pages_of_runs_are_written_for_the_newest_and_stay(runs: Path, tmp_path: Path) -> None:
    CliRunner().invoke(main, ["site", "--results", str(runs), "--output-dir", str(tmp_path / "site")])
    first = (tmp_path / "site" / "runs" / "23.html").stat().st_mtime_ns
    shutil.copytree(write_runs(tmp_path / "more", count=25), runs, dirs_exist_ok=True, copy_function=only_new)
    CliRunner().invoke(main, ["site", "--results", str(runs), "--output-dir", str(tmp_path / "site"), "-q"])
    pages = sorted((tmp_path / "site" / "runs").iterdir())
    assert [page.name for page in pages] == ["23.html", "24.html"] and pages[0].stat().st_mtime_ns == first
    text = (tmp_path / "site" / "collectives-on-box-1-tp-4.html").read_text()
    assert '<a href="runs/24.html">24.jsonl</a>' in text and ">05.jsonl<" in text


@pytest.mark.long
def test_pages_stay_below_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbench.report.site.MAX_PAGE_BYTES", 110_000)
    results = write_runs(tmp_path / "results")
    site(results, tmp_path / "site")
    pages = list((tmp_path / "site").glob("collectives*.html"))
    assert len(pages) > 1 and max(path.stat().st_size for path in pages) < 110_000
    assert sorted(name for page in pages for name in cases_of(page)) == sorted(IDS)


def test_numbers_of_other_tools_have_a_site_too(tmp_path: Path) -> None:
    table = as_csv(tmp_path / "rates.csv", rows(1.0, count=20))
    options = ("--launch", "turn", "--case", "op,size", "--value", "us", "--better", "higher", "--unit", "tokens/s")
    code, out, _ = site(table, tmp_path / "site", *options)
    assert code == 0 and out.startswith("PASS: no change in 3 cases")
    assert "tokens/s" in (tmp_path / "site" / "table-on-unknown-machine.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rates.csv", "site"]


@pytest.mark.long
def test_the_limit_of_a_large_family_is_that_of_all_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a sample of 200 of 1,000 cases; without sampling, it is the exact one."""
    logs = 0.03 * np.random.default_rng(1).standard_normal((1000, 24))
    logs[7, 12:] += 0.3
    sampled = statistics.change_points(logs)
    monkeypatch.setattr(statistics, "MAX_ROWS", 1000)
    exact = statistics.change_points(logs)
    assert sampled.own == exact.own and sampled.own[7] == [12] and sum(map(bool, sampled.own)) == 1
    assert sampled.own_share == pytest.approx(exact.own_share, rel=0.05)


def test_a_temporary_level_is_found_where_it_was_made() -> None:
    logs = 0.001 * np.random.default_rng(2).standard_normal((8, 26))
    logs[0, 9:18] += 0.3
    assert statistics.change_points(logs).own[0] == [9, 18]


@pytest.mark.long
def test_the_commands_and_the_message_of_the_page_are_as_shown(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "site.md").read_text()
    [command] = re.findall(r"^```\ndistbench (.*)\n```", page, re.MULTILINE)
    [message] = re.findall(r"^distbench: .*CNAME.*\n", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(main, command.split()).exit_code == 0
    (tmp_path / "site" / "CNAME").touch()
    assert CliRunner().invoke(main, command.split()).stderr == message
