"""Names of runs: `last`, `last~1`, `@LABEL` and a commit, in every command that takes a RUN."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from gate_runs import CASE, case, records, steady, write

import distbench
from distbench.cli.main import main
from distbench.records.results_folder import named_run, named_runs
from distbench.spec.errors import UserError

OLD, NEW = "0123abc" + "0" * 33, "fedcba9" + "1" * 33
NAMES = ("before-1", "before-2", "after-1", "after-2", "other", "dirty")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five commands, oldest first; `after-2` and `other` are two files of one, and `dirty` is of a changed tree."""
    commits = {"before-1": OLD, "before-2": OLD, "dirty": NEW}
    for number, name in enumerate(NAMES):
        lines = records(name, 1000.0 * (number + 1), {CASE: case(steady(1.0, number))})
        lines[0]["invocation_id"] = "one-command" if name in ("after-2", "other") else name
        lines[0]["job"]["label"] = name.partition("-")[0]
        lines[0]["environment"] = {
            **lines[0].get("environment", {}),
            "git_commit": commits.get(name, NEW),
            "git_dirty": name == "dirty",
        }
        write(tmp_path / "results" / "box" / f"{name}.jsonl", lines)
    monkeypatch.chdir(tmp_path)
    return Path("results")


def names_of(results: Path, *targets: str) -> list[str]:
    return [path.stem for path in named_runs(map(Path, targets), results)]


def test_each_name_means_its_runs(results: Path) -> None:
    assert names_of(results, "last") == ["dirty"]
    assert names_of(results, "last~1") == ["after-2", "other"]
    assert names_of(results, "last~4") == ["before-1"]
    assert names_of(results, "@before", "@after") == ["before-1", "before-2", "after-1", "after-2"]
    assert names_of(results, OLD[:7]) == names_of(results, OLD) == ["before-1", "before-2"]
    # Runs of a changed working tree are of another code than the commit.
    assert names_of(results, NEW[:8]) == ["after-1", "after-2", "other"]
    assert [str(path) for path in named_runs([Path("last::tp=2")], results)] == ["results/box/dirty.jsonl::tp=2"]


def test_files_folders_and_scenarios_are_left_alone(results: Path) -> None:
    Path("last").mkdir()
    targets = [Path("last"), Path("results/box"), Path("toy"), Path("nowhere.jsonl")]
    assert named_runs(targets, results) == tuple(targets)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("last~5", "results has only 5 runs; the oldest is last~4"),
        ("@befor", "no run under results has this label; available labels: 'after', 'before', 'dirty', 'other'"),
        ("abcdef0", "no run under results has this commit; the newest commits are fedcba91, 0123abc0"),
    ],
)
def test_a_name_without_a_run_is_one_sentence(results: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{name}: ") as caught:
        named_runs([Path(name)], results)
    assert message in str(caught.value)


def test_one_run_file_is_asked_for_where_one_is_needed(results: Path, tmp_path: Path) -> None:
    assert named_run(Path("last"), results).stem == "dirty"
    with pytest.raises(UserError, match="last~1 has 2 run files; give a single file"):
        named_run(Path("last~1"), results)
    with pytest.raises(UserError, match="no run file under empty; measure with"):
        named_run(Path("last"), Path("empty"))


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def test_every_command_that_takes_a_run_takes_a_name(results: Path, tmp_path: Path) -> None:
    (shown,) = json.loads(run("report", "last", "--json").stdout)
    assert shown["scenario"] == "collectives"
    both = run("compare", "@before", "vs", "@after", "--json")
    assert both.exit_code == 0 and json.loads(both.stdout), both.output
    assert run("gate", OLD[:7], NEW[:7]).exit_code == 4  # too few launches for a verdict
    assert len(distbench.compare("@before", "@after").frame) == 1
    assert CASE in run("export", "pytest-benchmark", "last").stdout
    assert run("baseline", "save", "@before").exit_code == 0
    for words in (["report", "last~9"], ["compare", "last~9", "last"], ["gate", "last~9", "last"]):
        done = run(*words)
        assert done.exit_code == 2 and "last~9: results has only 5 runs" in done.stderr, done.output
    # A name is looked for in --results.
    Path("results").rename("elsewhere")
    assert "no run file under results" in run("report", "last").stderr
    assert run("report", "last", "--results", "elsewhere").exit_code == 0
    for option in ("--against", "--resume"):
        done = run("run", "links", option, "last~9", "--results", "elsewhere")
        assert done.exit_code == 2 and "last~9: elsewhere has only 5 runs" in done.stderr, done.output
