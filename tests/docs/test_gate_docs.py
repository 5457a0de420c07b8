"""docs/ci.md is executed: its loops with `distbench run` replaced by a writer of run files, its gates for real."""

import os
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from processes import Children

from distbench.show.ci_formats import badge

PAGE = (ROOT / "docs" / "ci.md").read_text()
RECIPES = (ROOT / "docs" / "ci-recipes.md").read_text()
SCRIPT = (ROOT / "docs" / "examples" / "gate.sh").read_text()
# Stands in for the command: `run` writes a run file as a launch of the code in the working folder would, at once, and
# `signature` what that code would communicate.
STAND_IN = """#!{python}
import pathlib, sys, time
# As `python -m distbench` the empty package of the job's own folder is imported already.
sys.modules.pop("distbench", None)
sys.path[:0] = [{root!r}, {tests!r}]
from gate_runs import CASE, case, records, steady, write
if sys.argv[1:3] == ["signature", "write"]:
    folder = pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1])
    folder.mkdir(exist_ok=True)
    text = pathlib.Path("plan").read_text()
    (folder / "train.signature").write_text({signature!r} + text)
    sys.exit()
if sys.argv[1] != "run":
    from distbench.cli.main import main
    main()
out = next(pathlib.Path(after) for word, after in zip(sys.argv, sys.argv[1:]) if word in ("--results", "--out"))
place = len(list(out.glob("*.jsonl")))
seconds = float(pathlib.Path("speed").read_text())
lines = records(f"{{out.name}}-{{place}}", time.time(), {{CASE: case(steady(seconds, place))}}, load_at_start=None)
write(out / f"{{place:02}}.jsonl", lines)
"""
# Stand-ins for what a recipe needs of the network; python3 makes an environment that changes nothing.
STUBS = {
    "pip": "",
    "python3": '[ "$2" != venv ] || { mkdir -p "$3/bin" && touch "$3/bin/activate"; }',
    "buildkite-agent": '{ echo "$@"; cat; } >>"$DID"',
}
SIGNATURE = "distbench signature, version 1\nscenario train\nmesh tp=2\ntorch 2.13.0\n\n[step/x]\n"
MORE = "step/x: layers.*.wq, forward: +1 all_gather over tp"
GATHER = "x forward tp all_gather over tp (2), f32, 8192 B: layers.*.wq, implicit S(1)->R\n"


def stand_in(folder: Path, python: str) -> Path:
    """The command `distbench` of a CI job, in a folder of its own."""
    folder.mkdir()
    bench = folder / "distbench"
    tests = str(ROOT / "tests")
    bench.write_text(STAND_IN.format(python=python, root=str(ROOT), tests=tests, signature=SIGNATURE))
    bench.chmod(0o755)
    return bench


def block(title: str, number: int = 0) -> Any:
    """A YAML block below a title of one of the pages."""
    (below,) = (part for page in (PAGE, RECIPES) for part in page.split("\n## ") if part.startswith(f"{title}\n"))
    return yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", below, re.MULTILINE | re.DOTALL)[number])


def launch_loop() -> str:
    """The loop that alternates launches of both sides, and the gate after it."""
    result = re.search(r"^```bash\n(git worktree .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert result
    return result.group(1)


def repository(children: Children, folder: Path, before: str, after: str) -> str:
    """A repository whose code takes `before` seconds, then `after` in its second commit; the first commit's hash."""
    folder.mkdir()
    identity = ["-c", "user.name=x", "-c", "user.email=x@x.invalid"]
    for index, seconds in enumerate((before, after)):
        (folder / "speed").write_text(seconds)
        for command in (["init", "-q"], ["add", "speed"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"])[
            index > 0 :
        ]:
            children.run("git", *command, cwd=folder, variables={"GIT_CONFIG_GLOBAL": "/dev/null"}, check=True)
    return children.run("git", "rev-parse", "HEAD~1", cwd=folder, check=True).stdout.strip()


@pytest.mark.parametrize(("after", "exit_code"), [("0.0013", 1), ("0.001", 0)])
@pytest.mark.long
def test_the_launch_loop_on_the_page_does_what_it_says(
    children: Children, tmp_path: Path, after: str, exit_code: int
) -> None:
    bench = stand_in(tmp_path / "bin", children.forked_python)
    commit = repository(children, tmp_path / "code", "0.001", after)
    summary = tmp_path / "summary.md"
    variables = {"PATH": f"{bench.parent}:{os.environ['PATH']}", "BASE": commit, "RUNS": str(tmp_path / "out")}
    variables |= {"GITHUB_STEP_SUMMARY": str(summary)}
    done = children.run("bash", "-e", "-c", launch_loop(), cwd=tmp_path / "code", variables=variables)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert "gate: 10 baseline launches, 10 candidate launches" in done.stdout
    assert (tmp_path / "code" / "gate.xml").exists() and summary.exists()


def once() -> str:
    """Return what is done once, before CI runs anything."""
    result = re.search(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert result
    return result.group(1)


def github_script() -> str:
    lines = [step["run"] for step in block("GitHub Actions", 1)["jobs"]["gate"]["steps"] if "run" in step]
    assert len(lines) == 4
    return "\n".join(lines)


def gitlab_script() -> str:
    job = block("GitLab")["gate"]
    assert job["variables"] == {"GIT_DEPTH": 0, "BASE": "$CI_MERGE_REQUEST_DIFF_BASE_SHA"}
    return "\n".join([f"export BASE={job['variables']['BASE']}", *job["script"]])


def jenkins_script() -> str:
    lines = re.findall(r"^ +sh '(.*)'$", RECIPES, re.MULTILINE)
    assert len(lines) == 2
    return "\n".join(lines)


def buildkite_script() -> str:
    (step,) = block("Buildkite")["steps"]
    return "\n".join(step["command"]).replace("$$", "$")


def test_a_stock_runner_has_what_the_workflow_s_lines_need() -> None:
    """A Python of its own before the first pip, torch's CPU wheels before distbench, in a version that it accepts."""
    job = block("GitHub Actions", 1)["jobs"]["gate"]
    checkout, python, torch, ours, *_ = job["steps"]
    assert checkout["with"] == {"fetch-depth": 0}, "ab checks the base branch out"
    assert python["uses"].startswith("actions/setup-python@") and isinstance(python["with"]["python-version"], str)
    requested = shlex.split(torch["run"])
    assert (
        requested[:2] == ["pip", "install"] and requested[3] == "--index-url" and ours["run"].startswith("pip install")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (accepted,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "torch")
    (wanted,) = Requirement(requested[2]).specifier
    assert wanted.operator == "==" and accepted.specifier.contains(wanted.version)
    assert SpecifierSet(project["requires-python"]).contains(python["with"]["python-version"])


@pytest.mark.parametrize(
    ("steps", "num_gathers", "seconds", "expected"),
    [
        (
            github_script,
            "2",
            "0.001",
            f"::error title=train.signature::{MORE}",
        ),
        (github_script, "1", "0.0013", "FAIL: 1 regression"),
        (github_script, "1", "0.001", "PASS: 1 pass"),
        (gitlab_script, "1", "0.0013", "FAIL: 1 regression"),
        (jenkins_script, "2", "0.001", MORE),
        (buildkite_script, "2", "0.001", MORE),
        (buildkite_script, "1", "0.0013", "FAIL: 1 regression"),
    ],
)
@pytest.mark.long
def test_the_recipes_fail_the_build_where_they_should(
    children: Children, tmp_path: Path, steps: Callable[[], str], num_gathers: str, seconds: str, expected: str
) -> None:
    """On a pull request whose change communicates more, is slower, or is neither."""
    bench, code, server = stand_in(tmp_path / "bin", sys.executable), tmp_path / "code", tmp_path / "server.git"
    package = code / "distbench"
    package.mkdir(parents=True)
    for name, lines in STUBS.items():
        (bench.parent / name).write_text(f"#!/bin/sh\n{lines}\n")
        (bench.parent / name).chmod(0o755)
    # What ab launches in a revision's folder is the distbench that it finds there.
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(bench.read_text())
    (code / "gate.sh").write_text(SCRIPT)
    script = f"""
        git init -q -b main; git init -q --bare {server}; git remote add origin {server}
        echo '1 {GATHER}' | tr -s '\n' > plan; echo 0.001 > speed; touch bench.py
        {once()}
        git add -A; git commit -qm base; git push -q origin main
        echo '{num_gathers} {GATHER}' | tr -s '\n' > plan; echo {seconds} > speed
        {steps()}
    """
    # As in a new container: no variable of this process, an empty home, and the system's own commands.
    who = {f"GIT_{role}_{what}": "x@x.invalid" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    variables = {"PATH": f"{bench.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "GITHUB_BASE_REF": "main", **who}
    variables |= {"CHANGE_TARGET": "main", "CI_MERGE_REQUEST_DIFF_BASE_SHA": "origin/main"}
    variables |= {"BUILDKITE_PULL_REQUEST_BASE_BRANCH": "main", "DID": str(tmp_path / "did")}
    done = children.run("bash", "-e", "-c", textwrap.dedent(script), cwd=code, env=variables)
    assert done.returncode == (not expected.startswith("PASS")), done.stdout + done.stderr
    assert expected in done.stdout, done.stdout + done.stderr
    if steps is not github_script:
        assert (code / "signature.md").exists() and (code / "signature.xml").exists()
        assert (code / "gate.md").exists() == (code / "runs" / "b").exists() == (num_gathers == "1")
    if steps is buildkite_script:
        message = (tmp_path / "did").read_text()
        assert message.startswith("annotate --context distbench --style info\n# exact gate: ")
        assert ("# gate: " in message) == (num_gathers == "1")


def test_the_script_installs_torch_first_from_its_index(children: Children, tmp_path: Path) -> None:
    for name in ("pip", "python3", "distbench"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{STUBS.get(name, '')}\necho {name} $* >>{tmp_path}/did\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BASE": "b", "TORCH_INDEX": "https://i", "DISTBENCH": "/mirror"}
    done = children.run("bash", "-c", SCRIPT, cwd=tmp_path, env=variables)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "did").read_text().splitlines()[:3] == [
        "python3 -m venv .venv-gate",
        "pip install --quiet --index-url https://i torch==2.13.0",
        "pip install --quiet /mirror",
    ]


def test_the_badge_s_lines_push_it_as_the_only_file_of_its_branch(children: Children, tmp_path: Path) -> None:
    """Twice, from a clone; the branch has one commit and the clone's files stay."""
    *_, uses, push = block("Badge")["jobs"]["badge"]["steps"]
    assert uses["with"]["badge"] == "distbench.json" and push["if"] == "${{ !cancelled() }}"
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    begin = "git init -q --bare server.git; git init -q clone; git -C clone remote add origin ../server.git"
    children.run("bash", "-ec", begin, cwd=tmp_path, env=variables, check=True)
    for text in ("one", "two"):
        (tmp_path / "clone" / "distbench.json").write_text(text)
        done = children.run("bash", "-eo", "pipefail", "-c", push["run"], cwd=tmp_path / "clone", env=variables)
        assert done.returncode == 0, done.stderr
    shown = "git log --format=%s badges; git ls-tree --name-only badges; git show badges:distbench.json"
    message = children.run("bash", "-ec", shown, cwd=tmp_path / "server.git", env=variables, check=True)
    assert message.stdout == "Badge\ndistbench.json\ntwo"


def test_the_page_s_badge_is_what_the_gate_writes() -> None:
    (shown,) = re.findall(r"^```json\n(.*?)\n```", RECIPES, re.MULTILINE | re.DOTALL)
    assert shown == badge("distbench gate", "PASS: 30 pass. No case is slower than the baseline by more than 5 %")


def test_the_workflows_use_inputs_that_the_action_has() -> None:
    inputs = yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]
    jobs = [block("GitHub Actions")["jobs"]["gate"], block("Badge")["jobs"]["badge"]]
    given = [step["with"] for job in jobs for step in job["steps"] if "distbench@" in step.get("uses", "")]
    assert len(given) == 3 and all(each.keys() <= inputs.keys() for each in given)
    assert block("GitHub Actions")["permissions"]["pull-requests"] == "write"
    assert [each.get("comment") for each in given] == ["signatures", "step time", None]


def test_the_page_lists_every_field_and_every_verdict() -> None:
    from distbench.records.run_file import MUST_AGREE
    from distbench.statistics.verdicts import VERDICTS

    flat = " ".join(PAGE.split())
    assert f"Fields that must be equal: {', '.join(MUST_AGREE)}" in flat
    assert re.findall(r"^\| (\w+) \|", PAGE.split("### Verdicts")[1].split("\n##")[0], re.MULTILINE) == [
        "verdict",
        *VERDICTS,
    ]
