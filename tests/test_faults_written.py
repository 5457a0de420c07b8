"""What a command writes for people, on a disk that fills up: the whole file, or the one that was there before."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from test_faults import largest_file
from trace_records import record, run_file

from distbench.cli.main import main
from distbench.spec.file_io import write_whole
from distbench.spec.printable_text import cell

GOLDEN = Path(__file__).parent / "golden"


def invoke(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.parametrize(
    ("command", "old"),
    [
        (f"report {GOLDEN / 'collectives.jsonl'} --plots plots", "plots/collectives.png"),
        (f"report {GOLDEN / 'steps.jsonl'} --page page.html", "page.html"),
        (f"report {GOLDEN / 'laboratory.jsonl'} --reproducers scripts", ""),
        ("report --paths traced.jsonl --chrome trace.json", "trace.json"),
        (f"history --results {GOLDEN / 'steps.jsonl'} --plots plots", ""),
        (f"export pytest-benchmark {GOLDEN / 'steps.jsonl'} -o exported.json", "exported.json"),
        (f"baseline save {GOLDEN / 'steps.jsonl'} --results stored", ""),
    ],
)
@pytest.mark.long
def test_a_full_disk_leaves_no_half_file_and_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, old: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if old:
        (tmp_path / old).parent.mkdir(exist_ok=True)
        (tmp_path / old).write_text("old")
    run_file(tmp_path / "traced.jsonl", record())
    before = files(tmp_path)
    with largest_file(300):
        done = invoke(*command.split())
    assert done.exit_code == 2 and "File too large" in done.output and "cannot be written" in done.output, done.output
    assert files(tmp_path) == before and (not old or (tmp_path / old).read_text() == "old")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_command_that_is_stopped_while_it_writes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(descriptor: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "x", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_text() == "old"


def test_a_text_is_no_formula_of_a_spreadsheet_and_a_number_stays_one() -> None:
    for text in ("=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1"):
        assert cell(text) == f"'{text}"
    for value in ("-5", "+1e-3", "a=1", "step/x", "", -5, 0.5, None, True):
        assert cell(value) is value


Change = Callable[[str], str]


@pytest.mark.parametrize("command", ["report FILE --format csv", "report FILE --group-by variant --format csv"])
def test_names_in_csv_are_no_formulas(tmp_path: Path, command: str) -> None:
    import csv
    import json

    records = [json.loads(line) for line in (GOLDEN / "steps.jsonl").read_text().splitlines()]
    records[0]["job"]["scenario"] = "=cmd"
    for one in records[1:-1]:
        if one["type"] == "case":
            one["case"]["id"] = "@" + one["case"]["id"]
            one["case"]["params"]["variant"] = "=HYPERLINK(1)"
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    done = invoke(*command.replace("FILE", str(file)).split())
    assert done.exit_code == 0, done.output
    rows = [*csv.reader(done.stdout.splitlines())]
    cells = [one for row in rows for one in row]
    assert any(one.startswith(("'=", "'@")) for one in cells)
    assert not [one for one in cells if one.startswith(("=", "@"))]
