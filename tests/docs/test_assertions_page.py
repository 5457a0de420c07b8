"""docs/assertions.md: its tests of other libraries, each in a pytest of its own; skipped where one is not installed."""

import importlib.util
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from processes import Children

EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "assertions.md").read_text()


@pytest.mark.parametrize("library", ["transformers", "trl", "torchtitan"])
@pytest.mark.long
def test_of_another_library(children: Children, tmp_path: Path, library: str) -> None:
    file = f"test_{library}_communication.py"
    assert f'--8<-- "docs/examples/{file}"' in PAGE
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ("-q", "-p", "no:cacheprovider", "-p", "distbench.pytest_plugin", "-c", tmp_path / "pytest.ini")
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = children.run(
        *(sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, EXAMPLES / file),
        cwd=EXAMPLES,
        variables=variables,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
