"""`distbench clean`: what is old, what belongs together, what is nobody's to delete."""

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from gate_runs import CASE, case, records, steady, write

from distbench.cli.main import main

NOW = time.time()
DAY_S = 86_400.0


def run(*arguments: object, answer: str = "") -> Result:
    return CliRunner().invoke(main, ["clean", *map(str, arguments)], input=answer)


def one_run(folder: Path, name: str, age_d: float, invocation: str | None = None, complete: bool = True) -> Path:
    started_at = NOW - age_d * DAY_S
    lines = records(name, started_at, {CASE: case(steady(1.0, 0))}, complete, invocation_id=invocation, scenario=name)
    path = write(folder / f"{name}.jsonl", lines)
    (folder / "logs" / name).mkdir(parents=True)
    (folder / "logs" / name / "rank0.log").write_text("x" * 1000)
    os.utime(path, (started_at, started_at))
    return path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Five runs of four commands, 1 to 40 days old, beside what is not ours."""
    folder = tmp_path / "results"
    box = folder / "box"
    for name, age_d, invocation in (("a", 40, "i1"), ("b", 40, "i1"), ("c", 20, "i2"), ("d", 3, "i3"), ("e", 1, "i4")):
        one_run(box, name, age_d, invocation)
    write(folder / "baselines" / "box" / "kept.jsonl", records("old", NOW - 90 * DAY_S, {}))
    (folder / "baselines" / "box" / "x.json").write_text("{}")
    (folder / "notes.jsonl").write_text('{"mine": 1}\n')
    (folder / "plots").mkdir()
    (folder / "plots" / "a.png").write_bytes(b"x")
    return folder


def left(results: Path) -> set[str]:
    return {str(path.relative_to(results)) for path in results.rglob("*") if path.is_file()}


OTHERS = {"baselines/box/kept.jsonl", "baselines/box/x.json", "notes.jsonl", "plots/a.png"}


def with_logs(*names: str) -> set[str]:
    return OTHERS | {f"box/{name}.jsonl" for name in names} | {f"box/logs/{name}/rank0.log" for name in names}


@pytest.mark.parametrize(
    ("options", "stay"),
    [
        (("--keep", 2), "de"),
        (("--keep", 3), "cde"),
        (("--older-than", "10d"), "de"),
        (("--older-than", "48h"), "e"),
        (("--older-than", "2d", "--keep", 3), "cde"),
        (("--older-than", "3w", "--keep", 0), "cde"),
        (("--keep", 0), ""),
    ],
)
def test_what_is_old_goes_with_its_logs_and_nothing_else(results: Path, options: tuple[object, ...], stay: str) -> None:
    done = run("--results", results, *options, "--yes")
    assert done.exit_code == 0, done.output
    assert left(results) == with_logs(*stay)
    assert (results / "box").exists() == bool(stay)


def test_it_lists_with_sizes_and_asks_first(results: Path) -> None:
    before = left(results)
    message = run("--results", results, "--keep", 2, answer="n\n")
    assert message.exit_code == 0 and left(results) == before and "nothing was deleted" in message.output
    lines = message.output.splitlines()
    # Two runs of the oldest command are one line: 2 logs of 1,000 bytes, and two run files.
    assert lines[0].endswith("a, b") and "kB" in lines[0] and lines[1].endswith(" c")
    assert "Delete 2 runs (6 files, " in message.output and "2 runs remain? [y/N]" in message.output
    assert run("--results", results, "--keep", 2, answer="y\n").exit_code == 0 and left(results) == with_logs("d", "e")


def test_json_lists_the_runs_and_never_asks(results: Path) -> None:
    assert run("--results", results, "--keep", 2, "--json").exit_code == 2
    before = left(results)
    record = json.loads(run("--results", results, "--keep", 2, "--json", "--dry-run").stdout)
    assert record["num_kept"] == 2 and [len(old["run_files"]) for old in record["runs"]] == [2, 1]
    assert left(results) == before
    assert run("--results", results, "--keep", 2, "--json", "--yes").exit_code == 0 and left(results) < before


def test_a_dry_run_lists_and_deletes_nothing(results: Path) -> None:
    before = left(results)
    done = run("--results", results, "--keep", 2, "--dry-run")
    assert done.exit_code == 0 and "would delete 2 runs (6 files, " in done.output and left(results) == before


def test_without_an_answer_nothing_is_deleted(results: Path) -> None:
    done = run("--results", results, "--keep", 1)
    assert done.exit_code == 2 and "add --yes" in done.output and left(results) == with_logs(*"abcde")


def test_a_run_that_may_still_be_going_on_stays_and_one_long_dead_goes(results: Path) -> None:
    going = one_run(results / "box", "going", 0.5, complete=False)
    one_run(results / "box", "dead", 30, complete=False)
    assert run("--results", results, "--keep", 0, "--yes").exit_code == 0
    assert going.exists() and left(results) == with_logs("going")


def test_both_sides_of_an_ab_go_together(results: Path) -> None:
    for side in "ab":
        one_run(results / "ab" / "20260101T000000Z" / side / "box", f"launch-{side}", 50)
    done = run("--results", results, "--older-than", "45d", "--yes")
    assert "ab/20260101T000000Z (2 launches)" in done.output and "deleted 1 run (" in done.output
    assert not (results / "ab").exists() and left(results) == with_logs(*"abcde")


def test_links_are_left_and_never_followed(results: Path, tmp_path: Path) -> None:
    outside = one_run(tmp_path / "outside", "far", 90)
    (results / "box" / "link.jsonl").symlink_to(outside)
    (results / "more").symlink_to(tmp_path / "outside")
    assert run("--results", results, "--keep", 0, "--yes").exit_code == 0
    assert outside.exists() and (tmp_path / "outside" / "logs" / "far" / "rank0.log").exists()
    assert (results / "box" / "link.jsonl").is_symlink()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --keep N"),
        (("--older-than", "soon"), "'soon' is not a duration"),
        (("--keep", "-1"), "-1 is not in the range"),
        (("--results", "nowhere", "--keep", "1"), "--results nowhere is not a folder"),
    ],
)
def test_what_the_user_can_mend_is_a_sentence(options: tuple[str, ...], message: str) -> None:
    done = run(*options)
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output


def test_nothing_old_is_said(results: Path) -> None:
    assert "nothing to delete" in run("--results", results, "--keep", 9).output


def test_quiet_deletes_and_prints_nothing(results: Path) -> None:
    done = run("--results", results, "--keep", 1, "--yes", "-q")
    assert (done.exit_code, done.output) == (0, "") and left(results) == with_logs("e")
