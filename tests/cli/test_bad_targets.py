"""Targets and limits that cannot be: each command says so in one sentence, before it measures anything."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import ROOT

from distbench.cli.main import main
from distbench.cli.options import check_writable

GOLDEN = ROOT / "tests" / "golden"
RUN = str(GOLDEN / "steps.jsonl")
# FILE is a file, so FILE/x can neither be a file nor become a folder; FOLDER is a folder.
COMMANDS = (
    ["calibrate", "-o", "FOLDER"],
    ["calibrate", "-o", "FILE/x"],
    ["calibrate", "--plots", "FILE/x"],
    ["signature", "llama_2d", "tp_mlp", "--output-dir", "FILE"],
    ["signature", "llama_2d", "-o", "FILE/x.signature"],
    ["export", "pytest-benchmark", RUN, "-o", "FOLDER"],
    ["baseline", "save", RUN, "--results", "FILE/x"],
    ["history", "--results", str(GOLDEN), "--plots", "FILE/x"],
    ["site", "--results", str(GOLDEN / "steps.jsonl"), "--output-dir", "FILE"],
    ["site", "--results", str(GOLDEN / "steps.jsonl"), "--output-dir", "FILE/x"],
    ["report", RUN, "--page", "FOLDER"],
    ["report", RUN, "--page", "FILE/x.html"],
    ["report", RUN, "--plots", "FILE/x"],
    ["gate", RUN, str(GOLDEN / "collectives.jsonl"), "--write", "junit=FOLDER"],
    ["signature", "update", "FILE/x", "SIGNATURE"],
    ["run", "tp_mlp", "--device", "cpu", "--results", "FILE/x"],
)
SIGNATURE = "distbench signature, version 1\nscenario a\nmesh tp=2\ntorch 2\n\n[c]\nnothing\n"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.long
def test_a_target_that_cannot_be_is_one_sentence(
    known_host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FILE").touch()
    (tmp_path / "SIGNATURE").write_text(SIGNATURE)
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit) and done.stderr.startswith("distbench: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert not any((tmp_path / "FOLDER").iterdir()) and not (tmp_path / "results").exists()


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    check_writable(tmp_path / "new", "-o")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").write_text("kept")
    check_writable(tmp_path / "old", "-o")
    assert (tmp_path / "old").read_text() == "kept"


@pytest.mark.parametrize(
    "command",
    [
        ["run", "tp_mlp", "--timeout", "nan"],
        ["calibrate", "--timeout", "inf"],
        ["gate", RUN, RUN, "--alpha", "nan"],
        ["gate", RUN, RUN, "--floor-us", "inf"],
        ["ab", ".", ".", "--budget", "nan", "--", "x"],
    ],
    ids=" ".join,
)
def test_a_limit_that_nothing_could_reach_is_refused(command: list[str]) -> None:
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2 and "Invalid value for" in done.stderr
