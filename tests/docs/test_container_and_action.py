"""Dockerfile and action.yml, which nothing here can build or run: what they name is there, their shell is valid."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from conftest import ROOT
from processes import Children

from distbench.cli.main import main

DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
# How GitHub runs a step with `shell: bash`.
SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
# What answers for python3 in a step: it writes its words, and ends as asked.
STAND_IN = '#!/bin/sh\nprintf \'%s\\n\' "$*" >>words\n[ "$3" = ab ] && exit 3\n[ "$5" = wrong ] && exit 2\nexit 0\n'


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.+)$", DOCKERFILE, re.MULTILINE)


def test_the_dockerfile_copies_what_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [source for line in instructions("COPY") for source in shlex.split(line)[:-1]]
    assert copied and set(copied) == kept and all((ROOT / source).exists() for source in copied)
    assert instructions("FROM") == ["${BASE}"] and "BASE=python:3.12-slim" in instructions("ARG")


def test_shell_lines_are_valid(children: Children) -> None:
    lines = [*instructions("RUN"), *(step["run"] for step in STEPS)]
    assert len(lines) >= 6
    for line in lines:
        done = children.run("bash", "-n", "-c", line)
        assert done.returncode == 0, done.stderr


def stand_in(folder: Path, *names: str) -> dict[str, str]:
    """The environment of a shell in which these commands do nothing but write down their words, into `folder/did`."""
    for name in names:
        (folder / name).write_text(
            f'#!/bin/sh\nprintf \'%s\\n\' "{name} $*" >>{folder}/did\n[ "$2" != "import torch" ]\n'
        )
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_the_steps_of_the_dockerfile_do_what_they_should(children: Children, tmp_path: Path) -> None:
    """Each as a shell runs it, with stand-ins for what would change this machine: torch first, ours without another."""
    variables = stand_in(tmp_path, "apt-get", "rm", "python3", "useradd", "mkdir", "chown")
    (tmp_path / "constraints.txt").write_bytes((ROOT / "constraints.txt").read_bytes())
    for line in instructions("RUN"):
        here = line.replace("/src", str(tmp_path)).replace("/tmp/constraints.txt", f"{tmp_path}/kept.txt")
        done = children.run(
            "sh", "-e", "-c", here, env=variables | {"TORCH": "torch==2.13.0", "TORCH_INDEX": "https://i"}
        )
        assert done.returncode == 0, done.stderr
    did = (tmp_path / "did").read_text().splitlines()
    assert [line.split()[0] for line in did] == [
        *("apt-get", "apt-get", "rm", "python3", "python3", "python3", "useradd", "mkdir", "chown")
    ]
    assert did[4] == "python3 -m pip install --no-cache-dir --index-url https://i torch==2.13.0"
    assert did[5] == f"python3 -m pip install --no-cache-dir --constraint {tmp_path}/kept.txt {tmp_path}"
    given, kept = ((tmp_path / name).read_text().splitlines() for name in ("constraints.txt", "kept.txt"))
    assert kept == [line for line in given if not line.startswith("torch==")] and len(kept) == len(given) - 1


def test_options_of_the_dockerfile_and_the_action_are_known_to_the_commands(children: Children) -> None:
    text = "\n".join([*instructions("RUN"), STEPS[0]["run"]])
    helps = {
        "pip install": children.python("-m", "pip", "install", "--help").stdout,
        "useradd": children.run("useradd", "--help").stdout,
        "grep": children.run("grep", "--help").stdout,
    }
    for command, known in helps.items():
        # An option's value may itself be a variable that brings an option: ${X:+--index-url "$X"}.
        used = {
            option for line in re.findall(rf"{command} ([^&|\n]*)", text) for option in re.findall(r"--[a-z-]+", line)
        }
        assert used and {option for option in used if option not in known} == set(), command


@pytest.mark.parametrize(("torch", "index"), [("", ""), ("torch==2.13.0", ""), ("torch==2.13.0", "https://i")])
def test_the_installing_step_takes_torch_first_from_its_index(
    children: Children, tmp_path: Path, torch: str, index: str
) -> None:
    variables = stand_in(tmp_path, "python3")
    given = {"INSTALL": "/action", "TORCH": torch, "TORCH_INDEX": index}
    assert given.keys() == STEPS[0]["env"].keys() - {"PIP_BREAK_SYSTEM_PACKAGES"}
    done = children.run("bash", "-e", "-c", STEPS[0]["run"], env=variables | given)
    assert done.returncode == 0, done.stderr
    first = [f"python3 -m pip install --quiet {f'--index-url {index} ' * bool(index)}{torch}"] * bool(torch)
    ours = ["python3 -m pip install --quiet /action", "python3 -m distbench doctor"]
    assert (tmp_path / "did").read_text().splitlines() == [*first, *ours]


def test_what_docs_say_of_the_container_is_in_the_dockerfile() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    flat = " ".join(text.split())
    assert "has not been built yet" in flat and 'ENTRYPOINT ["distbench"]' in DOCKERFILE
    for command in re.findall(r" distbench (\w+) ", "\n".join(re.findall(r"^docker run.*$", text, re.MULTILINE))):
        assert command in main.commands


def test_the_action_is_a_composite_one_whose_inputs_are_all_described_and_used() -> None:
    assert ACTION["runs"]["using"] == "composite" and all(step["shell"] == "bash" for step in STEPS)
    text = (ROOT / "action.yml").read_text()
    used = set(re.findall(r"inputs\.([\w-]+)", text))
    assert used == set(ACTION["inputs"]) and all(one["description"] for one in ACTION["inputs"].values())
    assert ACTION["name"] and ACTION["description"]
    assert all({"description", "value"} <= set(one) for one in ACTION["outputs"].values())
    # What a user gives reaches the shell as a variable, never as its text.
    assert not any("${{" in step["run"] for step in STEPS)


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (
            {"MODE": "ab", "BASE": "main", "SCENARIOS": "bench.py --quick"},
            3,
            "ab main . --github --strict {written} -- bench.py --quick",
        ),
        (
            {"MODE": "gate", "BASELINE": "a", "CANDIDATE": "b"},
            0,
            "gate a vs b --github --strict {written}",
        ),
        (
            {"MODE": "signature", "BASELINE": "s", "SCENARIOS": "x", "OPTIONS": ""},
            0,
            "signature check s {tmp}/signatures --github {written}",
        ),
        ({"MODE": "fly"}, 2, ""),
        ({"MODE": "ab", "SCENARIOS": "bench.py"}, 2, ""),
        (
            {"MODE": "signature", "BASELINE": "s", "SCENARIOS": "wrong"},
            2,
            "signature write wrong --output-dir {tmp}/signatures",
        ),
    ],
)
def test_its_judging_step_calls_the_command_and_ends_with_its_code(
    children: Children, tmp_path: Path, given: dict[str, str], code: int, words: str
) -> None:
    (tmp_path / "python3").write_text(STAND_IN)
    (tmp_path / "python3").chmod(0o755)
    environment = (
        dict.fromkeys(STEPS[1]["env"], "") | {"OPTIONS": "--strict", "JUNIT": "j.xml", "BADGE": "b.json"} | given
    )
    environment |= {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_OUTPUT": str(tmp_path / "out"),
    }
    done = children.run("bash", "-e", "-c", STEPS[1]["run"], cwd=tmp_path, env=environment)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "out").read_text() == f"exit-code={code}\n"
    message = (tmp_path / "words").read_text().splitlines() if words else [""]
    written = f"--write junit=j.xml --write badge=b.json --write markdown={tmp_path}/distbench.md"
    assert message[-1].removeprefix("-m distbench ") == words.format(tmp=tmp_path, written=written)
    # Each option that it gives is one of the command's.
    if words:
        first, second, *_ = words.split()
        group = main.commands[first]
        command = group.commands[second] if isinstance(group, click.Group) else group
        known = {name for option in command.params for name in option.opts}
        assert {word for word in words.partition(" -- ")[0].split() if word.startswith("--")} <= known


GH = """#!/bin/sh
printf '%s\\n' "$*" >>did
while [ $# -gt 0 ]; do
  case "$1" in
    --jq) exec jq -r "$2" comments ;;
    --field) [ -e readonly ] && exit 1; cat "${2#body=@}" >body; exit 0 ;;
  esac
  shift
done
"""
OTHERS = [{"id": 1, "body": "Please rebase."}, {"id": 2, "body": "<!-- distbench: other -->\n# gate: PASS"}]
OURS = {"id": 3, "body": "<!-- distbench: step time -->\n# gate: PASS"}


@pytest.mark.parametrize(
    ("comments", "call"),
    [
        (OTHERS, "--method POST repos/o/r/issues/7/comments"),
        ([*OTHERS, OURS, {**OURS, "id": 4}], "--method PATCH repos/o/r/issues/comments/3"),
    ],
)
@pytest.mark.parametrize("report", ["# gate: FAIL: 1 regression\n\n| a |\n\n<details>every case</details>\n", None])
def test_its_comment_is_updated_where_it_exists(
    children: Children, tmp_path: Path, comments: list[dict[str, object]], call: str, report: str | None
) -> None:
    done = commented(children, tmp_path, comments, report)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
    assert f"api --silent {call} --field body=@{tmp_path}/comment.md" in (tmp_path / "did").read_text()
    shown = "# gate: FAIL: 1 regression\n\n| a |\n\n" if report else "distbench: no result\n"
    log = "[Log](https://github.com/o/r/actions/runs/5)"
    assert (tmp_path / "body").read_text() == f"<!-- distbench: step time -->\n{shown}\n{log}\n"


def test_a_comment_that_may_not_be_written_is_a_warning(children: Children, tmp_path: Path) -> None:
    (tmp_path / "readonly").touch()
    done = commented(children, tmp_path, [], "# gate: PASS\n")
    assert done.returncode == 0 and done.stdout.startswith("::warning title=distbench::the comment was not written;")


def commented(
    children: Children, folder: Path, comments: list[dict[str, object]], report: str | None
) -> "subprocess.CompletedProcess[str]":
    """The comment step, as a stock runner calls it, with a stand-in for `gh` that has these comments."""
    step = STEPS[2]
    assert step["if"] == "${{ !cancelled() && inputs.comment != '' && github.event.pull_request.number }}"
    (folder / "gh").write_text(GH)
    (folder / "gh").chmod(0o755)
    (folder / "comments").write_text(json.dumps(comments))
    if report:
        (folder / "distbench.md").write_text(report)
    given = {"MARKER": "<!-- distbench: step time -->", "PULL_REQUEST": "7", "GH_TOKEN": "x"}
    assert given.keys() == step["env"].keys() and given["MARKER"] in step["env"]["MARKER"].replace(
        "${{ inputs.comment }}", "step time"
    )
    runner = {"GITHUB_REPOSITORY": "o/r", "GITHUB_RUN_ID": "5", "GITHUB_SERVER_URL": "https://github.com"}
    runner |= {"RUNNER_TEMP": str(folder), "PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder)}
    return children.run(*SHELL, step["run"], cwd=folder, env=given | runner)
