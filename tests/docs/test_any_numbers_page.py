"""docs/any-numbers.md is executed: its commands on generated tables, its loop with the page's own program."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import ROOT
from foreign_rows import as_csv, rows
from processes import Children

from distbench.cli.main import main

PAGE = (ROOT / "docs" / "any-numbers.md").read_text()
COMMANDS = re.findall(r"^```\n(distbench .*)\n```", PAGE, re.MULTILINE)


def test_the_commands_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("distbench.cli.gate.NUM_COMPARISONS", 5)
    as_csv(tmp_path / "base.csv", rows(1.0, count=20))
    table, _, *others = COMMANDS
    assert [shlex.split(command)[1] for command in COMMANDS] == ["gate", "gate", "self-test", "history"]
    for command in others:
        done = CliRunner().invoke(main, shlex.split(command)[1:])
        assert done.exit_code == 0, done.output
    as_csv(tmp_path / "base.csv", rows(1.0))
    as_csv(tmp_path / "new.csv", rows(1.25, shift=3))
    done = CliRunner().invoke(main, [*shlex.split(table)[1:], "--width", "120"])
    shown = re.search(r"^```\n(gate: .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert shown and done.exit_code == 1
    assert done.output == shown[1]


def test_the_loop_collects_tables_that_the_gate_pairs(children: Children, tmp_path: Path) -> None:
    loop, program = (
        re.search(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for kind in ("bash", "python")
    )
    assert loop and program
    for side in ("base", "new"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "bench.py").write_text(program[1].replace("65536", "2048"))
        (tmp_path / f"{side}.csv").write_text("turn,op,size,us\n")
    script = loop[1].replace("1 2 3 4 5 6 7 8 9 10", "1 2").replace("python", sys.executable)
    done = children.run("bash", "-e", "-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sides = [str(tmp_path / f"{side}.csv") for side in ("base", "new")]
    judged = CliRunner().invoke(main, ["gate", *sides, *shlex.split(COMMANDS[0])[4:], "-v"])
    assert judged.exit_code == 4 and "table: 2 pairs by --pair" in judged.output, judged.output
