"""The documentation site: built with warnings as errors, every page in its contents, the README short."""

import html
import re
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from processes import Children

from distbench.cli.main import SHORT, main
from distbench.spec import list_entries

MAX_WORDS = 1200


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


@pytest.fixture(scope="module")
def site(children: Children, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ("--strict", "--quiet", "--site-dir", folder)
    done = children.run(
        sys.executable, "-m", "mkdocs", "build", *options, cwd=ROOT, variables={"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def text_of(page: Path) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page.read_text()).split())


def test_every_command_is_in_the_reference_with_its_options(site: Path) -> None:
    message = text_of(site / "commands" / "index.html")
    for name, command in main.commands.items():
        if name in SHORT:  # they are `run` with options
            continue
        assert command.hidden or f"distbench {name}" in message
        for option in command.params:
            visible = option.opts and not getattr(option, "hidden", False) and option.param_type_name == "option"
            assert not visible or option.opts[0] in message, f"{name} {option.opts}"


def test_the_reference_of_commands_is_their_help_line_by_line(site: Path) -> None:
    page = (site / "commands" / "index.html").read_text()
    message = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert "Sentinel" not in message and "UNSET" not in message
    lines = {line.strip() for line in message.splitlines()}
    commands = [*main.commands.values(), *main.commands["baseline"].commands.values()]  # type: ignore[attr-defined]
    examples = [line.strip() for one in commands for line in str(one.help).splitlines() if "  distbench " in line]
    assert len(examples) > 50 and not [line for line in examples if len(line) < 76 and line not in lines]


def test_every_scenario_is_on_its_page(site: Path) -> None:
    message = html.unescape(text_of(site / "scenarios" / "index.html"))
    assert [
        entry.name for entry in list_entries() if " ".join(f"{entry.name} {entry.summary}".split()) not in message
    ] == []


def test_the_python_reference_has_what_scenarios_and_training_code_import(site: Path) -> None:
    message = text_of(site / "python" / "index.html")
    for name in (
        "calibrated_planning",
        "DirectRedistribution",
        "native_all_to_all",
        "load_profile",
        "ParallelPlan",
        "FsdpPlan",
        "CpPlan",
        "CompilePlan",
        "Scenario",
        "scenario",
    ):
        assert name in message


def test_every_page_is_in_the_contents() -> None:
    contents = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]
    named = re.findall(r"[\w-]+\.md", repr(contents))
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MAX_WORDS
