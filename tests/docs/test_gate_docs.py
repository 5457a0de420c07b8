"""docs/ci.md is executed: its loops with `distbench run` replaced by a writer of run files, its gates for real."""

import os
import re
import shlex
import sys
import textwrap
import tomllib
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
sys.path[:0] = [{root!r}, {tests!r}]
from gate_runs import CASE, case, records, steady, write
if sys.argv[1] == "signature":
    folder = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
    folder.mkdir(exist_ok=True)
    text = pathlib.Path("plan").read_text()
    (folder / "train.signature").write_text({signature!r} + text)
    sys.exit()
if sys.argv[1] != "run":
    from distbench.cli.main import main
    main()
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
place = len(list(out.glob("*.jsonl")))
seconds = float(pathlib.Path("speed").read_text())
lines = records(f"{{out.name}}-{{place}}", time.time(), {{CASE: case(steady(seconds, place))}}, load_at_start=None)
write(out / f"{{place:02}}.jsonl", lines)
"""
SIGNATURE = "distbench signature, version 1\nscenario train\nmesh tp=2\ntorch 2.13.0\n\n[step/x]\n"
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


def github_script() -> str:
    loop = re.search(r"^        run: \|\n((?: {10}.*\n)+)", block("GitHub"), re.MULTILINE)
    judge = re.search(r"^        run: (distbench gate .*)$", block("GitHub"), re.MULTILINE)
    assert loop and judge
    return loop.group(1) + judge.group(1)


def gitlab_script() -> str:
    lines = re.search(r"  script:\n(.*?)  artifacts:", block("GitLab"), re.DOTALL)
    assert lines
    commands = [one.removeprefix("|\n") for one in re.split(r"^    - ", lines.group(1), flags=re.M)]
    return "\n".join(one for one in commands if one.strip() and not one.startswith("pip"))


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


@pytest.mark.parametrize(
    ("script", "base", "after", "exit_code"),
    [
        (github_script, "BASE", "0.0013", 1),
        (github_script, "BASE", "0.001", 0),
        (gitlab_script, "CI_MERGE_REQUEST_DIFF_BASE_SHA", "0.0013", 1),
    ],
)
def test_the_jobs_on_the_page_do_what_it_says(
    children: Children, tmp_path: Path, script: object, base: str, after: str, exit_code: int
) -> None:
    bench = stand_in(tmp_path / "bin", children.forked_python)
    commit = repository(children, tmp_path / "code", "0.001", after)
    summary = tmp_path / "summary.md"
    variables = {"PATH": f"{bench.parent}:{os.environ['PATH']}", base: commit, "RUNNER_TEMP": str(tmp_path / "out")}
    variables |= {"GITHUB_STEP_SUMMARY": str(summary), "CI_PROJECT_DIR": str(tmp_path / "code")}
    command = ("bash", "-e", "-c", script())  # type: ignore[operator]
    done = children.run(*command, cwd=tmp_path / "code", variables=variables)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert "10 pairs of launches that took turns" in done.stdout
    assert (tmp_path / "code" / "gate.xml").exists()
    assert summary.exists() == (base == "BASE")


def workflow() -> tuple[str, str]:
    """(what is done once, what CI does) of the path at the top."""
    once = re.search(r"^## A GitHub workflow\n.*?^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    steps = re.findall(r"^      - run: (.*)$", block("A GitHub workflow"), re.MULTILINE)
    assert once and len(steps) == 4
    return once.group(1), "\n".join(steps)


def test_a_stock_runner_has_what_the_workflow_s_lines_need() -> None:
    """A Python of its own before the first pip, torch's CPU wheels before distbench, in a version that it accepts."""
    job = yaml.safe_load(block("A GitHub workflow"))["jobs"]["gate"]
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
    ("num_gathers", "seconds", "says"),
    [
        ("2", "0.001", "::error title=train.signature::step/x: layers.*.wq, forward: +1 all_gather over tp"),
        ("1", "0.0013", "FAIL: 1 regression"),
        ("1", "0.001", "PASS: 1 pass"),
    ],
)
def test_the_workflow_s_lines_end_in_a_red_cross_where_they_should(
    children: Children, tmp_path: Path, num_gathers: str, seconds: str, says: str
) -> None:
    """On a pull request whose change communicates more, is slower, or is neither."""
    once, steps = workflow()
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
        {once}
        git add -A; git commit -qm base; git update-ref refs/remotes/origin/main HEAD
        echo '{num_gathers} {GATHER}' | tr -s '\n' > plan; echo {seconds} > speed
        {steps}
    """
    who = {f"GIT_{role}_{what}": "x@x.invalid" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    variables = {"PATH": f"{bench.parent}:{os.environ['PATH']}", "GITHUB_BASE_REF": "main", **who}
    done = children.run("bash", "-e", "-c", textwrap.dedent(script), cwd=code, variables=variables)
    assert done.returncode == (not says.startswith("PASS")), done.stdout + done.stderr
    assert says in done.stdout, done.stdout + done.stderr


def test_the_page_lists_every_field_and_every_verdict() -> None:
    from distbench.records.run_file import MUST_AGREE
    from distbench.statistics.verdicts import VERDICTS

    flat = " ".join(PAGE.split())
    assert f"Fields that must agree: {', '.join(MUST_AGREE)}" in flat
    assert re.findall(r"^\| (\w+) \|", PAGE.split("## What it says")[1].split("\n## ")[0], re.MULTILINE) == [
        "verdict",
        *VERDICTS,
    ]
