"""run.sh: what each command installs, and set-up that fails with one sentence and continues in the next call.

Stand-ins replace Python and pip: they write down their arguments, and fail where a test says so. Every new clone tries
the same arguments with a real pip.
"""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from processes import Children

# Replaces python3 and the environment's python. FAULT names the failing steps; arguments are appended to calls.txt.
STAND_IN = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$* $FAULT" in
    *"sys.version_info"*old*) exit 1 ;;
    "-m venv .venv"*no-venv*) echo "ensurepip is not available" >&2; exit 1 ;;
    "-m venv .venv"*) mkdir -p .venv/bin && cp "$STAND_IN" .venv/bin/python ;;
    "-m pip --version"*no-pip*) [ -e .venv/pip ] ;;
    "-m ensurepip"*no-ensurepip*) echo "No module named ensurepip" >&2; exit 1 ;;
    "-m ensurepip"*) touch .venv/pip ;;
    "-m pip install"*no-network*) echo "Could not reach the index" >&2; exit 1 ;;
    "-m pip install"*editable*full*) echo "No space left on device" >&2; exit 1 ;;
    "-m pip install"*interrupted*) kill -INT $PPID; sleep 5; exit 130 ;;
    "-m distbench list"*no-list*) exit 70 ;;
    "-m distbench list"*) echo '[{"name": "collectives", "tags": []}]' ;;
    "-c import json"*) cat >/dev/null; echo collectives ;;
    "-m distbench report"*no-report*) exit 2 ;;
    "-m distbench report"*) echo summary; mkdir -p results && touch "${@: -1}" ;;
esac
"""


class Clone:
    """A clone with run.sh, and stand-ins for the programs that run.sh calls."""

    def __init__(self, children: Children, folder: Path) -> None:
        self.folder = folder / "a clone"
        self.folder.mkdir()
        for name in ("run.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder)
            os.utime(self.folder / name, (1e9, 1e9))
        (folder / "bin").mkdir()
        self.stand_in = folder / "bin" / "python3"
        self.stand_in.write_text(STAND_IN)
        self.stand_in.chmod(0o755)
        self._children, self._calls = children, folder / "calls.txt"

    def run(self, *words: str, fault: str = "", path: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run `./run.sh WORDS`; FAULT names the steps that fail."""
        path = path or f"{self.stand_in.parent}:{os.environ['PATH']}"
        variables = {"PATH": path, "FAULT": fault, "CALLS": str(self._calls), "STAND_IN": str(self.stand_in)}
        return self._children.run("/bin/bash", self.folder / "run.sh", *words, variables=variables, cwd=self.folder)

    def calls(self) -> list[str]:
        """Return the commands since the last call of this method."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return lines


@pytest.fixture
def clone(children: Children, tmp_path: Path) -> Clone:
    return Clone(children, tmp_path)


@pytest.mark.parametrize(
    ("words", "fault", "message"),
    [
        ("list", "old", "run.sh: python3 is older than 3.11"),
        ("test", "no-venv", "run.sh: python3 could not make the virtual environment .venv"),
        ("check", "no-pip no-ensurepip", "run.sh: .venv has no pip"),
        ("", "no-network", "run.sh: pip could not install ."),
        ("test", "full", "run.sh: pip could not install ."),
    ],
)
def test_a_step_that_fails_ends_it_and_the_next_call_goes_on(
    clone: Clone, words: str, fault: str, message: str
) -> None:
    failed = clone.run(*words.split(), fault=fault)
    assert failed.returncode == 2
    assert message in failed.stderr.splitlines()[-1]
    assert not any("-m distbench" in call or "-m pytest" in call for call in clone.calls())
    assert not (clone.folder / ".venv" / ".installed").exists()
    assert clone.run("list").returncode == 0
    assert clone.calls()[-1] == "-m distbench list"


def test_what_is_set_up_is_not_set_up_again(clone: Clone) -> None:
    clone.run("list")
    clone.calls()
    assert clone.run("list").returncode == 0
    assert clone.calls() == ["-m distbench list"]


EXTRAS = {
    (): "",
    ("list",): "",
    ("signatures",): "",
    ("test", "--fast"): "[test,docs,hf,torchx,spmd]",
    ("gpu-tests",): "[test,docs,hf,torchx,spmd]",
    ("gpu-day",): "[test,docs,hf,torchx,spmd]",
    ("torches", "newest"): "[test,docs,hf,torchx,spmd]",
    ("check",): "[check]",
    ("docs",): "[docs]",
    ("bench", "check"): "[test,hf,spmd]",
}


@pytest.mark.parametrize("words", EXTRAS)
def test_a_command_installs_only_what_it_needs(clone: Clone, words: tuple[str, ...]) -> None:
    done = clone.run(*words)
    installed = [call.split()[-1] for call in clone.calls() if "pip install" in call]
    assert installed == [f".{EXTRAS[words]}"]
    steps = re.findall(r"set-up, step (\d) of (\d), \d+ s: (.+)", done.stderr)
    assert [(step, of) for step, of, _ in steps] == [("1", "2"), ("2", "2")]
    assert "set-up finished after" in done.stderr


def test_a_command_adds_its_packages_to_those_that_are_there(clone: Clone) -> None:
    clone.run("list")
    clone.run("docs")
    clone.calls()
    clone.run("check")
    assert [call.split()[-1] for call in clone.calls() if "pip install" in call] == [".[check]"]
    clone.run("docs")
    clone.run("check")
    assert not [call for call in clone.calls() if "pip install" in call]
    # Changed requirements bring everything up to date that was installed for some command.
    os.utime(clone.folder / "pyproject.toml")
    os.utime(clone.folder / ".venv" / ".installed", (1.5e9, 1.5e9))
    clone.run("list")
    assert clone.calls()[-2].endswith(" .[check,docs]")


def test_every_extra_that_it_installs_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = {extra for extras in EXTRAS.values() for extra in re.findall(r"\w+", extras)}
    assert installed == set(declared) - {"export"}  # for users; the tests of these formats skip without it


def test_an_environment_without_pip_is_given_one(clone: Clone) -> None:
    assert clone.run("list", fault="no-pip").returncode == 0
    assert "-m ensurepip --upgrade" in clone.calls()


def test_without_python_it_says_so(clone: Clone, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("dirname", "cat", "touch"):
        (tools / name).symlink_to(shutil.which(name) or name)
    failed = clone.run("list", path=str(tools))
    assert (failed.returncode, failed.stderr) == (2, "run.sh: there is no python3 here; install Python 3.11 or newer\n")


def test_a_stop_in_the_middle_of_installing_leaves_no_stamp(clone: Clone) -> None:
    assert clone.run("list", fault="interrupted").returncode != 0
    assert not (clone.folder / ".venv" / ".installed").exists()
    assert clone.run("list").returncode == 0


@pytest.mark.parametrize(("fault", "code"), [("no-list", 70), ("no-report", 2), ("", 0)])
def test_the_quick_start_ends_with_the_code_of_what_failed(clone: Clone, fault: str, code: int) -> None:
    assert clone.run(fault=fault).returncode == code


def test_the_quick_start_ends_with_the_summary_of_its_run_and_the_path_of_a_page(clone: Clone) -> None:
    done = clone.run()
    assert done.stdout.splitlines()[-1] == "page: results/report.html" and "summary" not in done.stdout
    assert (clone.folder / "results" / "report.html").is_file()
    assert "page:" not in clone.run(fault="no-report").stdout


def test_help_sets_nothing_up(clone: Clone) -> None:
    assert "./run.sh test" in clone.run("help").stdout
    assert not clone.calls()


def test_every_command_of_ci_starts_the_program_that_it_names(clone: Clone) -> None:
    """The arguments of each `./run.sh` in workflows and in .ci/run, with stand-ins for what it starts."""
    files = [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / ".ci" / "run"]
    commands = {
        tuple(line.split())
        for path in files
        for line in re.findall(r"(?:run:|^) *\./run\.sh (.+?)(?: \|\|.*)?$", path.read_text(), re.MULTILINE)
    }
    assert {words[0] for words in commands} == {"check", "docs", "signatures", "test", "torches"}
    for name in ("ruff", "mypy"):
        tool = clone.folder / ".venv" / "bin" / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(clone.stand_in, tool)
    for words in commands:
        words = ("torches", "2.11.0") if "matrix" in " ".join(words) else words
        done = clone.run(*words)
        assert done.returncode == 0, (words, done.stderr)
        last = {"check": "", "docs": "mkdocs build", "signatures": "signature check", "test": "-m pytest"}
        assert last.get(words[0], "tests/torches.py") in clone.calls()[-1]
