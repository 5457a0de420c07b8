"""docs/watch.md is executed: its loop on gloo ranks, and its command on the dumps that they write."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import ROOT
from processes import Ranks

from distbench.cli.main import main

PAGE = (ROOT / "docs" / "watch.md").read_text()
NUMBER = re.compile(r"[0-9][0-9.]*")


def words(line: str) -> str:
    """A line without its numbers and its host."""
    return NUMBER.sub("#", re.sub(r"host \w+", "host HOST", line))


@pytest.mark.long
def test_the_loop_and_the_command_print_what_the_page_shows(ranks: Ranks, tmp_path: Path) -> None:
    loop, dump = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    end = "dist.destroy_process_group()\n"
    program = loop.replace("every=10)", "every=4)").replace("range(200)", "range(80)")
    (tmp_path / "train.py").write_text(program.replace(end, f"{dump}{end}"))
    variables = {"TORCH_FR_BUFFER_SIZE": "2000", "OMP_NUM_THREADS": "1"}
    done = ranks.torchrun(4, "train.py", cwd=tmp_path, variables=variables)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stderr.splitlines() if line.startswith("watch: ")]
    shown = [line for line in PAGE.splitlines() if line.startswith("watch: ")]
    assert [words(line) for line in printed[-2:]] == [words(line) for line in shown[-2:]]
    assert re.fullmatch(r"rank 2 0-3 [0-9.]+ ms \d+/20\n", done.stdout)
    (command,) = re.findall(r"^distbench watch dumps.*$", PAGE, re.MULTILINE)
    read = CliRunner().invoke(
        main, [word.replace("dumps", str(tmp_path / "dumps")) for word in shlex.split(command)[1:]]
    )
    assert read.exit_code == 1, read.output
    assert words(read.output) in words(PAGE)
