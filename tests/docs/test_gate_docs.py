"""docs/ci.md is executed: its loops with `distbench run` replaced by a writer of run files, its gates for real."""

import os
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from processes import Children

PAGE = (ROOT / "docs" / "ci.md").read_text()
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


def block(title: str) -> str:
    found = re.search(rf"^## {title}\n.*?^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found.group(1)


def launch_loop() -> str:
    """The loop that launches both sides in turn, and the gate after it."""
    found = re.search(r"^```bash\n(git worktree .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found.group(1)


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
    found = re.search(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found.group(1)


def github_script() -> str:
    steps = re.findall(r"^      - run: (.*)$", block("GitHub Actions"), re.MULTILINE)
    assert len(steps) == 4
    return "\n".join(steps)


def gitlab_script() -> str:
    return "\n".join(yaml.safe_load(block("GitLab"))["gate"]["script"])


def jenkins_script() -> str:
    """The pipeline's shell lines, without those that make an environment and fetch from a server."""
    found = re.search(r"^## Jenkins\n.*?sh '''\n(.*?)'''", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    lines = textwrap.dedent(found.group(1)).splitlines()
    kept = [line for line in lines if not line.startswith(("python3 -m venv", "git fetch"))]
    assert len(kept) == len(lines) - 2
    return "\n".join(kept)


def test_a_stock_runner_has_what_the_workflow_s_lines_need() -> None:
    """A Python of its own before the first pip, torch's CPU wheels before distbench, in a version that it accepts."""
    job = yaml.safe_load(block("GitHub Actions"))["jobs"]["gate"]
    checkout, python, torch, ours, *_ = job["steps"]
    assert checkout["with"] == {"fetch-depth": 0}, "ab checks the base branch out"
    assert python["uses"].startswith("actions/setup-python@") and isinstance(python["with"]["python-version"], str)
    asked = shlex.split(torch["run"])
    assert asked[:2] == ["pip", "install"] and asked[3] == "--index-url" and ours["run"].startswith("pip install")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (accepted,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "torch")
    (wanted,) = Requirement(asked[2]).specifier
    assert wanted.operator == "==" and accepted.specifier.contains(wanted.version)
    assert SpecifierSet(project["requires-python"]).contains(python["with"]["python-version"])


@pytest.mark.parametrize(
    ("steps", "num_gathers", "seconds", "says"),
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
        (jenkins_script, "1", "0.0013", "FAIL: 1 regression"),
    ],
)
def test_the_recipes_fail_the_build_where_they_should(
    children: Children, tmp_path: Path, steps: Callable[[], str], num_gathers: str, seconds: str, says: str
) -> None:
    """On a pull request whose change communicates more, is slower, or is neither."""
    bench, code = stand_in(tmp_path / "bin", sys.executable), tmp_path / "code"
    package = code / "distbench"
    package.mkdir(parents=True)
    (bench.parent / "pip").write_text("#!/bin/sh\n")
    (bench.parent / "pip").chmod(0o755)
    # What ab launches in a revision's folder is the distbench that it finds there.
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(bench.read_text())
    script = f"""
        git init -q; echo '1 {GATHER}' | tr -s '\n' > plan; echo 0.001 > speed; touch bench.py
        {once()}
        git add -A; git commit -qm base; git update-ref refs/remotes/origin/main HEAD
        echo '{num_gathers} {GATHER}' | tr -s '\n' > plan; echo {seconds} > speed
        {steps()}
    """
    who = {f"GIT_{role}_{what}": "x@x.invalid" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    variables = {"PATH": f"{bench.parent}:{os.environ['PATH']}", "GITHUB_BASE_REF": "main", **who}
    variables |= {"CHANGE_TARGET": "main", "CI_MERGE_REQUEST_DIFF_BASE_SHA": "origin/main"}
    done = children.run("bash", "-e", "-c", textwrap.dedent(script), cwd=code, variables=variables)
    assert done.returncode == (not says.startswith("PASS")), done.stdout + done.stderr
    assert says in done.stdout, done.stdout + done.stderr


def test_the_page_lists_every_field_and_every_verdict() -> None:
    from distbench.records.run_file import MUST_AGREE
    from distbench.statistics.verdicts import VERDICTS

    flat = " ".join(PAGE.split())
    assert f"Fields that must agree: {', '.join(MUST_AGREE)}" in flat
    assert re.findall(r"^\| (\w+) \|", PAGE.split("### Verdicts")[1].split("\n##")[0], re.MULTILINE) == [
        "verdict",
        *VERDICTS,
    ]
