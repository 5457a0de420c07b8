"""How the command line ends where nobody wrote a message: never with 1, which is the gate's word for a regression."""

import errno
import os
import sys
from pathlib import Path

import pytest
from processes import Children

from distbench.__main__ import unforeseen


def gate(children: Children, folder: Path, **variables: str) -> tuple[int, str]:
    done = children.cli("gate", "a.jsonl", "b.jsonl", real=True, cwd=folder, **variables)
    return done.returncode, done.stderr


@pytest.mark.parametrize("module", ["click", "numpy"])
def test_a_broken_package_on_the_path_is_one_sentence_with_the_traceback_in_a_file(
    children: Children, tmp_path: Path, module: str
) -> None:
    (tmp_path / f"{module}.py").write_text("raise ValueError('not the one you want')")
    (tmp_path / "a.jsonl").touch()
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    code, message = gate(children, tmp_path, PYTHONPATH=path, TMPDIR=str(tmp_path))
    assert code == 70 and message.count("\n") == 1 and "ValueError: not the one you want" in message
    (kept,) = tmp_path.glob("distbench-*.txt")
    assert str(kept) in message and f'{module}.py", line 1' in kept.read_text()


def test_where_no_file_can_be_written_the_traceback_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(**_: str) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    try:
        raise ValueError("of\nseveral lines")
    except ValueError as error:
        message = unforeseen(error)
    assert "(ValueError: of several lines)" in message and "\n" not in message
    assert "in test_where_no_file_can_be_written" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["list", "doctor", "gate --help"])
def test_standard_output_that_is_full_is_one_sentence(children: Children, command: str) -> None:
    # doctor asks a child that needs torch: forked.
    python = children.forked_python if command == "doctor" else sys.executable
    with Path("/dev/full").open("w") as full:
        done = children.run(python, "-m", "distbench", *command.split(), stdout=full)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "standard output cannot be written (No space left on device)" in done.stderr


def test_a_reader_that_leaves_ends_the_command_without_a_word(children: Children) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = children.python("-m", "distbench", "list", "--format", "json", stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_standard_output_that_is_closed_is_no_error(children: Children) -> None:
    done = children.run("bash", "-c", f"{sys.executable} -m distbench list >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_current_folder_that_is_gone_is_one_sentence(children: Children, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"rmdir {gone}; exec {sys.executable} -m distbench list"
    done = children.run("bash", "-c", script, cwd=gone)
    assert done.returncode == 2
    assert done.stderr == "distbench: the current folder no longer exists; change to an existing folder\n"
