"""The scripts of docs/upstream show what their table says of this version of torch."""

import re

import pytest
import torch
from conftest import ROOT
from processes import Ranks

FOLDER = ROOT / "docs" / "upstream"
VERSION = torch.__version__.partition("+")[0]
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "planners.md").read_text().splitlines()
    if line.startswith(("| script |", "| [`"))
]


def test_every_script_has_a_row() -> None:
    named = {match[1] for row in TABLE[1:] if (match := re.match(r"\[`(\w+\.py)`\]", row[0]))}
    assert named == {file.name for file in FOLDER.glob("*.py")} and named


@pytest.mark.skipif(f"torch {VERSION}" not in TABLE[0], reason=f"the table has no column of torch {VERSION}")
@pytest.mark.parametrize("row", TABLE[1:], ids=lambda row: row[0].split("`")[1])
def test_a_script_shows_what_the_table_says(ranks: Ranks, row: list[str]) -> None:
    script = FOLDER / row[0].split("`")[1]
    text = script.read_text()
    if "spmd_types" in text:
        pytest.importorskip("spmd_types", reason="spmd_types is not installed; pip install spmd_types")
    (num_ranks,) = re.findall(r"--nproc-per-node (\d)", text)
    done = ranks.run_forked(int(num_ranks), script)
    assert done.returncode == 0, done.stderr
    (outcome,) = re.findall(r"^torch \S+: (right|wrong|raises|slow)", done.stdout, re.MULTILINE)
    assert outcome == row[TABLE[0].index(f"torch {VERSION}")]
