"""Pages that are executed: docs/tp-fsdp.md with its model as a file, docs/quickstart.md with its outputs."""

import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ROOT
from processes import Ranks

PAGE = (ROOT / "docs" / "tp-fsdp.md").read_text()
COMMANDS = ("check", "run", "report", "report", "signature", "signature", "signature")
# Fewer seconds of samples than a reader of the pages takes: what commands print has the same shape.
SHORT = "[tool.distbench]\nbudget = 2\n"


@pytest.mark.long
def test_the_commands_on_the_page_do_what_it_says(ranks: Ranks, tmp_path: Path) -> None:
    (model,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    script = "".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    assert tuple(re.findall(r"^distbench (\w+)", script, re.MULTILINE)) == COMMANDS
    (tmp_path / "my_model.py").write_text(model)
    (tmp_path / "pyproject.toml").write_text(SHORT)
    command = tmp_path / "bin" / "distbench"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {ranks.forked_python} -m distbench "$@"\n')
    command.chmod(0o755)
    variables = {"PATH": f"{command.parent}:{os.environ['PATH']}"}
    done = ranks.run("bash", "-e", "-c", script, cwd=tmp_path, variables=variables, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    message = " ".join(done.stdout.split())
    # What the page's text relies on: both plans run and are right, the norms' gradients are summed over tp.
    assert message.count("; forward, loss and backward run") == 2 and "my_model: 3 ok" in done.stderr
    assert re.search(r"tp all_reduce tp 4 4 KiB", message) and re.search(
        r"fsdp reduce_scatter\^ dp_shard 3 2.14 MiB", message
    )
    assert (
        "plan=sequence compared with plan=tensor: +6 tp all_gather of 128 KiB, +5 tp reduce_scatter of 128 KiB"
        in message
    )
    assert "blocks.*.norm, backward: -4 all_reduce over tp (tp), 1 KiB f32, explicit P(sum)->R" in message
    assert message.endswith("exit code 1")


FIRST_RUN = (ROOT / "docs" / "quickstart.md").read_text()


def shape_of(printed: str) -> set[str]:
    """What an output looks like, whatever was measured: heads of its tables, its headings, and how its lines begin."""
    lines = printed.splitlines()
    ruled = {" ".join(line.split()) for line, below in pairwise(lines) if re.fullmatch(r"[-=]{4,}", below)}
    # Upper lines of a heading stand where the widths below put them.
    starts = {re.match(r"[ ]*[A-Za-z_^]*", line)[0] for line in lines if not line.startswith(" " * 12)}  # type: ignore[index]
    return {re.sub(r"[\d.,]+", "#", text) for text in ruled | starts}


def alike(heading: str, other: str) -> bool:
    """Whether both head the same table: which columns fit depends on what was measured."""
    words, others = heading.split(), other.split()
    return len(words) > 3 and words[:3] == others[:3] and len({*words} & {*others}) >= 0.6 * len({*words})


@pytest.mark.long
def test_what_the_first_run_shows_is_what_its_commands_print(ranks: Ranks, tmp_path: Path) -> None:
    blocks = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", FIRST_RUN, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    (tmp_path / "pyproject.toml").write_text(SHORT)
    command = tmp_path / "bin" / "distbench"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {ranks.forked_python} -m distbench "$@"\n')
    command.chmod(0o755)
    variables = {"PATH": f"{command.parent}:{os.environ['PATH']}", "DISTBENCH_MACHINE": "laptop"}
    for line, shown in blocks:
        done = ranks.run("bash", "-c", line, cwd=tmp_path, variables=variables, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        printed = shape_of(done.stdout)
        missing = {text for text in shape_of(shown) - printed if not any(alike(text, other) for other in printed)}
        # Verdicts, cautions and which columns fit are the run's own.
        own = ("warning", "sequence_parallel", "No", "Detectable", "columns", "in", "a", "more", "and", "speed")
        assert {text for text in missing if text.strip().split(":")[0] not in own} == set(), line
