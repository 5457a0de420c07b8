"""docs/architecture.md against the layers; what the docs name, and the patches of docs/examples, against the tree."""

import ast
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from processes import Children
from test_layers import MAY_IMPORT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.patch"))
MAX_LINES = 120
MAX_FILES = 4
# What a page names is meant from the project's root, or from the package.
ROOTS = (ROOT, ROOT / "distbench")
FOLDERS = ("distbench", "benchmarks", "docs", "profiles", "scenarios", "signatures", "tests")


def packages_of_page() -> dict[str, set[str]]:
    section = (ROOT / "docs" / "architecture.md").read_text().split("\n## Packages\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    return {
        name.strip("`/").removesuffix(".py"): {other.strip() for other in others.split(",") if other}
        for name, _, others in rows[2:]
    }


def test_the_table_of_packages_is_what_the_layers_hold() -> None:
    assert packages_of_page() == MAY_IMPORT


def test_files_that_a_package_s_row_names_are_in_that_package() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().split("\n## Packages\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)/` \|(.*)$", section, re.MULTILINE)
    assert rows
    for package, row in rows:
        for name in re.findall(r"`(\w+\.py)`", row):
            assert (ROOT / "distbench" / package / name).exists(), f"{package}/ has no {name}"


def test_the_page_stays_short() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= MAX_LINES


def named_paths(text: str) -> set[str]:
    """Files and folders in backticks, of the project or the package; NAME stands for one that is yet to be."""
    spans = re.findall(r"`([\w./-]+(?:/|\.\w+))`", text)
    return {span for span in spans if span.split("/")[0] in {*FOLDERS, *MAY_IMPORT} and "NAME" not in span}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    assert [name for name in sorted(named_paths(text)) if not any((root / name).exists() for root in ROOTS)] == []
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    assert [link for link in sorted(links - {""}) if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_applies_and_touches_few_files(example: Path, children: Children, tmp_path: Path) -> None:
    files = re.findall(r"^\+\+\+ b/(\S+)$", example.read_text(), re.MULTILINE)
    assert 0 < len(files) <= MAX_FILES
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    for options in (["--check"], []):
        done = children.run("git", "apply", *options, example, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for file in files:
        if file.endswith(".py"):
            ast.parse((tmp_path / file).read_text())


def test_every_example_is_explained() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert EXAMPLES and [path.name for path in EXAMPLES if f"`docs/examples/{path.name}`" not in text] == []
