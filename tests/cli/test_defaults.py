"""[tool.distbench] of a pyproject.toml: which options it reaches, what wins, and what is refused."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from processes import Children

from distbench.cli.main import NOT_COMMON, defaults_for, main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a folder in it, which is the current one."""
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    (tmp_path / "repository" / "bench").mkdir()
    monkeypatch.chdir(tmp_path / "repository" / "bench")
    return tmp_path / "repository"


def write(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(text)


def params(command: str, *words: str) -> dict[str, Any]:
    """What a command would be called with."""
    context = main.commands[command].make_context(
        command, [*words], default_map=defaults_for(main).of_commands.get(command)
    )
    return context.params


def test_a_default_reaches_every_command_that_has_the_option(project: Path) -> None:
    write(
        project / "bench",
        '[tool.distbench]\nmesh = "tp=2"\nbudget = 7\ndevice = "cpu"\nresults = "there"\nquiet = true\n',
    )
    result = params("run", "tp_mlp")
    assert (
        result["mesh"] == {"tp": 2} and result["budget_s"] == 7.0 and result["out"] == Path("there") and result["quiet"]
    )
    assert params("check", "tp_mlp")["mesh"] == params("calibrate")["mesh"] == {"tp": 2}
    # What one writes the others read; ab and sweep have their own folders.
    assert params("history")["out"] == params("clean", "--keep", "1")["out"] == Path("there")
    assert "out" not in {**defaults_for(main).of_commands.get("ab", {}), **defaults_for(main).of_commands["tune"]}


def test_an_old_key_works_with_a_warning(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project / "bench", '[tool.distbench]\nout = "there"\nrun.runs = "here"\n')
    assert params("report")["out"] == Path("there") and params("run", "x")["out"] == Path("here")
    assert "out is an old name. Use results." in capsys.readouterr().err


def test_the_command_line_and_a_commands_own_table_win(project: Path) -> None:
    text = '[tool.distbench]\ntimeout = 5\nrun.timeout = 9\ngate.tolerance = ["8%", "p10=3%"]\n'
    write(project / "bench", text)
    assert params("run", "x")["timeout_s"] == 9 and params("calibrate")["timeout_s"] == 5
    assert params("run", "x", "--timeout", "30")["timeout_s"] == 30
    assert params("gate", "a", "b")["tolerance"] == ("8%", "p10=3%")


def test_a_parents_file_holds_up_to_the_git_root_with_paths_from_where_it_lies(project: Path) -> None:
    write(project.parent, '[tool.distbench]\nmesh = "tp=8"\n')
    assert defaults_for(main).file is None
    write(project, '[tool.distbench]\nresults = "results"\n')
    write(project / "bench", "[tool.other]\nname = 'distbench'\n")
    assert params("run", "x")["out"] == project / "results"
    assert defaults_for(main).file == project / "pyproject.toml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("buget = 3", "'buget' in [tool.distbench] is not an option (nearest: budget"),
        ("budget = 'much'", "budget in [tool.distbench] cannot be used: 'much' is not a duration"),
        ("budget = -1", "budget in [tool.distbench] cannot be used: -1 is not a duration"),
        ("quiet = 1", "1 is not true or false"),
        ("device = 'tpu'", "'tpu' is not one of"),
        ("mesh = 4", "4 is not a string"),
        ("yes = true", "'yes' in [tool.distbench] is not an option"),
        ("run.older-than = '3d'", "'older-than' in [tool.distbench.run] is not an option"),
        ("fly.mesh = 'tp=2'", "[tool.distbench.fly] is not a command"),
        ("results = 'a'\nresults = 'b'", "is not valid TOML"),
        ("gate.tolerance = [5]", "[5] is not a string, or a list of strings"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(project: Path, text: str, message: str) -> None:
    write(project / "bench", f"[tool.distbench]\n{text}\n")
    done = run("list")
    assert done.exit_code == 2 and message in done.output, done.output
    assert done.output.startswith("distbench: ") and len(done.output.strip().splitlines()) == 1


def test_a_table_that_is_none_and_a_project_without_one(project: Path) -> None:
    write(project / "bench", "[tool]\ndistbench = 3\n")
    assert "tool.distbench is not a table" in run("list").output
    write(project / "bench", "[tool.ruff]\nline-length = 100\n")
    assert run("list").exit_code == 0


def test_a_default_is_used_by_the_command_itself(project: Path) -> None:
    write(project / "bench", '[tool.distbench]\nresults = "nowhere"\n')
    done = run("report")
    assert done.exit_code == 2 and "no run file under nowhere" in done.output


SUITE = """
[tool.distbench.suite.nightly]
scenarios = ["tp_mlp", "bench.py::mine"]
quick = true
budget = "30s"
set = ["sequence_parallel=True"]
"""


def test_a_suite_is_scenarios_and_options_of_run(project: Path) -> None:
    write(project / "bench", SUITE)
    result = params("run", "@nightly", "fsdp_knobs")
    assert result["scenarios"] == ("tp_mlp", "bench.py::mine", "fsdp_knobs")
    assert result["quick"] and result["budget_s"] == 30 and result["choices"] == ("sequence_parallel=True",)
    assert params("run", "@nightly", "--budget", "1m")["budget_s"] == 60
    assert not params("run", "tp_mlp")["quick"]
    # An option's own @NAME is of a run's label.
    assert params("run", "links", "--against", "@nightly")["scenarios"] == ("links",)
    (project / "bench" / "pyproject.toml").rename(project / "pyproject.toml")
    assert params("run", "@nightly")["scenarios"] == ("tp_mlp", str(project / "bench.py::mine"))


def test_a_suite_is_run(project: Path, children: Children, known_host: None) -> None:
    write(project / "bench", '[tool.distbench.suite.small]\nscenarios = ["tp_mlp"]\nmesh = "tp=2"\nquick = true\n')
    done = run("run", "@small", "--dry-run")
    assert done.exit_code == 0 and "tp_mlp on tp=2 (2 ranks" in done.output, done.output


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (SUITE, ["@weekly"], "@weekly is not a suite; use @nightly"),
        (SUITE, ["@nightly", "@nightly"], "give one suite"),
        ("", ["@weekly"], "write [tool.distbench.suite.weekly] with scenarios"),
        ("[tool.distbench.suite.a]\nquick = true", ["@a"], "[tool.distbench.suite.a] needs a list of scenarios"),
        ("[tool.distbench]\nsuite = 3", ["@a"], "needs a list of scenarios"),
        ("[tool.distbench.suite.a]\nscenarios = ['x']\nbuget = 3", ["@a"], "is not an option (nearest: budget"),
    ],
)
def test_a_suite_that_cannot_be_run_is_one_sentence(project: Path, text: str, words: list[str], message: str) -> None:
    write(project / "bench", text)
    done = run("run", *words)
    assert done.exit_code == 2 and message in done.output, done.output
    assert done.output.startswith("distbench: ") and len(done.output.strip().splitlines()) == 1


def test_doctor_shows_them(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"usable": True, "checks": [{"name": "x", "ok": True, "found": "y"}]}
    result |= {"host": {"machine": "m", "cpu_model": "c", "num_cpus": 2, "memory_bytes": 2**34}}
    monkeypatch.setattr("distbench.cli.doctor.examine", lambda deep: result)
    write(project / "bench", '[tool.distbench]\nmesh = "tp=2"\ngate.tolerance = ["8%"]\n')
    message = run("doctor", "-v").output
    assert (
        "defaults of " in message
        and "  mesh = tp=2\n  gate.tolerance = 8%" in message
        and "2 CPUs, 16.0 GiB" in message
    )
    assert json.loads(run("doctor", "--format", "json").output)["defaults"]["values"]["mesh"] == "tp=2"


def test_each_option_has_one_type_of_default(project: Path) -> None:
    """A common key must be the same kind of thing in each command that it reaches."""
    kinds: dict[str, set[str]] = {}
    for name, command in main.commands.items():
        for option in command.params:
            own = isinstance(option, click.Option) and option.name in NOT_COMMON.get(name, ())
            if isinstance(option, click.Option) and option.opts[0] not in ("--format", "--help") and not own:
                kinds.setdefault(max(option.opts, key=len), set()).add(option.type.name)
    assert {name: result for name, result in kinds.items() if len(result) > 1} == {}
