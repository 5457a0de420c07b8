"""Dockerfile and action.yml, which nothing here can build or run: what they name is there, their shell is valid."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from processes import Children

from distbench.cli import main

DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
# What answers for python3 in a step: it writes its words, and ends as asked.
STAND_IN = '#!/bin/sh\nprintf \'%s\\n\' "$*" >>words\n[ "$3" = ab ] && exit 3\n[ "$4" = wrong ] && exit 2\nexit 0\n'


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


def test_what_docs_say_of_the_container_is_in_the_dockerfile() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    assert "has not been built by us" in text and 'ENTRYPOINT ["distbench"]' in DOCKERFILE
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
            "ab main . --github --strict --write junit=j.xml -- bench.py --quick",
        ),
        ({"MODE": "gate", "BASELINE": "a", "CANDIDATE": "b"}, 0, "gate a vs b --github --strict --write junit=j.xml"),
        (
            {"MODE": "signature", "BASELINE": "s", "SCENARIOS": "x"},
            0,
            "gate --signature s {tmp}/signatures --github --strict --write junit=j.xml",
        ),
        ({"MODE": "fly"}, 2, ""),
        ({"MODE": "ab", "SCENARIOS": "bench.py"}, 2, ""),
        ({"MODE": "signature", "BASELINE": "s", "SCENARIOS": "wrong"}, 2, "signature wrong --output {tmp}/signatures"),
    ],
)
def test_its_judging_step_calls_the_command_and_ends_with_its_code(
    children: Children, tmp_path: Path, given: dict[str, str], code: int, words: str
) -> None:
    (tmp_path / "python3").write_text(STAND_IN)
    (tmp_path / "python3").chmod(0o755)
    environment = dict.fromkeys(STEPS[1]["env"], "") | {"OPTIONS": "--strict", "JUNIT": "j.xml"} | given
    environment |= {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_OUTPUT": str(tmp_path / "out"),
    }
    done = children.run("bash", "-e", "-c", STEPS[1]["run"], cwd=tmp_path, env=environment)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "out").read_text() == f"exit-code={code}\n"
    said = (tmp_path / "words").read_text().splitlines() if words else [""]
    assert said[-1].removeprefix("-m distbench ") == words.format(tmp=tmp_path)
    # Each option that it gives is one of the command's.
    if words:
        known = {name for option in main.commands[words.split()[0]].params for name in option.opts}
        assert {word for word in words.partition(" -- ")[0].split() if word.startswith("--")} <= known
