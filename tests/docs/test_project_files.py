"""Files that GitHub, pip, pre-commit and editors read: they load, and what they name exists here."""

import configparser
import os
import re
import shlex
import shutil
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from processes import Children
from torches import RELEASES

from distbench.version import __version__

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))


def loaded(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


def run_lines() -> list[tuple[str, str]]:
    """(workflow, command) of each `run:`, once per combination of its matrix's first values."""
    result = []
    for path in WORKFLOWS:
        for job in loaded(path)["jobs"].values():
            values = job.get("strategy", {}).get("matrix", {})
            for step in job["steps"]:
                if "run" in step:
                    command = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda name: values[name[1]][0], step["run"])  # noqa: B023
                    assert "${{" not in command, "give values of GitHub as variables, never as text of a command"
                    result.append((path.name, command))
    return result


RUN_LINES = run_lines()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_reads_only_unless_a_job_asks_and_every_job_has_a_limit(path: Path) -> None:
    workflow = loaded(path)
    # YAML 1.1 reads the key `on` as True.
    assert workflow["name"] and workflow[True] and workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["runs-on"] == "ubuntu-latest" and job["timeout-minutes"] <= 90
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)


def test_the_matrix_has_every_supported_torch_and_python() -> None:
    jobs = loaded(GITHUB / "workflows" / "ci.yml")["jobs"]
    assert jobs["torch"]["strategy"]["matrix"] == {"python": PYTHONS, "torch": list(RELEASES)}
    assert jobs["test"]["strategy"]["matrix"] == {"python": PYTHONS}
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


@pytest.mark.parametrize(("workflow", "command"), RUN_LINES)
def test_a_command_is_valid_and_names_programs_that_exist(children: Children, workflow: str, command: str) -> None:
    assert children.run("bash", "-n", "-c", command).returncode == 0
    program, *arguments = shlex.split(command)
    if program == "./run.sh":
        commands = re.findall(r"^\./run\.sh ([a-z-]+)", (ROOT / "run.sh").read_text(), re.MULTILINE)
        assert arguments[0] in commands
        assert os.access(ROOT / program, os.X_OK)
    else:
        # `gh` is on GitHub's runners; it is not needed here.
        assert program == "gh" or shutil.which(program)


def test_dependabot_reads_files_that_exist() -> None:
    config = loaded(GITHUB / "dependabot.yml")
    files = {"github-actions": ".github/workflows", "pip": "constraints.txt", "docker": "Dockerfile"}
    assert config["version"] == 2
    assert {update["package-ecosystem"] for update in config["updates"]} == set(files)
    assert all((ROOT / name).exists() for name in files.values())


@pytest.mark.parametrize(
    "path", [path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"], ids=lambda p: p.name
)
def test_an_issue_form_has_fields_with_labels(path: Path) -> None:
    form = loaded(path)
    assert form["name"] and form["description"] and form["labels"]
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    assert {field["type"] for field in form["body"]} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in form["body"])


def test_hooks_start_programs_that_check_installs() -> None:
    [repository] = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    installed = {re.split(r"[^\w-]", package)[0] for package in PROJECT["optional-dependencies"]["check"]}
    for hook in repository["hooks"]:
        program, *arguments = hook["entry"].split()
        assert program.removeprefix(".venv/bin/") in {*installed, "python"} and hook["language"] == "system"
        assert "-m" not in arguments or (ROOT / (arguments[1].replace(".", "/") + ".py")).exists()


def test_citation_and_package_agree() -> None:
    citation = loaded(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["version"] == __version__
    assert citation["license"] == PROJECT["license"] == "Apache-2.0"
    assert citation["authors"] == PROJECT["authors"] == [{"name": "The distbench authors"}]


def test_editorconfig_loads_and_allows_the_lines_that_ruff_allows() -> None:
    config = configparser.ConfigParser()
    config.read_string("[top]\n" + (ROOT / ".editorconfig").read_text())
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert config["*.{py,sh}"]["max_line_length"] == str(ruff["line-length"])
    assert config["top"]["root"] == "true"


def test_scripts_are_executable_in_git() -> None:
    for name in ("run.sh", ".ci/run"):
        assert (ROOT / name).stat().st_mode & stat.S_IXUSR


def test_links_between_project_files_resolve() -> None:
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "README.md", ".github/PULL_REQUEST_TEMPLATE.md"):
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{name}: {target}"
