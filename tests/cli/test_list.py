"""`distbench list`: scenarios by question, one line each, from source that is read and never run."""

from pathlib import Path

from click.testing import CliRunner

from distbench.cli.list import OWN, QUESTIONS
from distbench.cli.main import main
from distbench.spec import list_entries

OWN_FILE = '''
from distbench.spec import scenario
raise RuntimeError("this file is read, not run")

@scenario(mesh={"tp": 2})
def mine(*, x=1):
    """A first sentence. More of it."""

@scenario(mesh={"tp": 2}, tags=("collective",))
def mine_too(*, x=1):
    """It has a sentence that is far too long for one line of a terminal of eighty columns, and is wrapped. More."""
'''


def listed(*words: str) -> list[str]:
    done = CliRunner().invoke(main, ["list", *words, "--width", "80"])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_each_shipped_scenario_has_one_line_of_80_columns_below_a_question() -> None:
    lines = listed()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.startswith("  ")]
    assert sorted(row.split()[0] for row in rows) == [entry.name for entry in list_entries()]
    assert all(row.endswith(".") for row in rows)
    headings = [line for line in lines if line and not line.startswith((" ", "Next: "))]
    assert sorted(headings) == sorted(QUESTIONS) and headings[0] == "How long does a step take?"
    assert lines[-1].startswith("Next: ")


def test_scenarios_of_ones_own_have_a_group(tmp_path: Path) -> None:
    file = tmp_path / "bench.py"
    file.write_text(OWN_FILE)
    lines = listed(str(file))
    assert lines[lines.index(OWN) + 1] == "  mine      A first sentence."
    assert "mine_too" in lines[lines.index("What does a collective cost?") + 1]
    assert "and is wrapped." in " ".join(" ".join(lines).split()) and max(map(len, lines)) <= 80
    assert listed(f"{file}::mine")[0] == "mine"
