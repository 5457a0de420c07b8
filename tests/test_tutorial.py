"""docs/your-own-model.md is executed: its model as a file outside the project, its commands in order."""

import os
import re
from pathlib import Path

from conftest import ROOT
from processes import Ranks

PAGE = (ROOT / "docs" / "your-own-model.md").read_text()
COMMANDS = ("check", "run", "report", "report", "signature", "signature", "gate")


def test_the_commands_on_the_page_do_what_it_says(ranks: Ranks, tmp_path: Path) -> None:
    (model,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    script = "".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    assert tuple(re.findall(r"^distbench (\w+)", script, re.MULTILINE)) == COMMANDS
    (tmp_path / "my_model.py").write_text(model)
    command = tmp_path / "bin" / "distbench"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {ranks.forked_python} -m distbench "$@"\n')
    command.chmod(0o755)
    variables = {"PATH": f"{command.parent}:{os.environ['PATH']}"}
    done = ranks.run("bash", "-e", "-c", script, cwd=tmp_path, variables=variables, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = " ".join(done.stdout.split())
    # What the page's text leans on: both plans run and are right, the first again, the optimizer's all-reduces, owners.
    assert told.count("; a step runs") == 2 and "my_model: 3 ok" in done.stderr
    assert re.search(r"P\(sum\)->R implicit tp all_reduce 12 ", told)
    assert "plan=sequence against plan=tensor: +8 tp all_reduce" in told and "+5 tp reduce_scatter of 256 KiB" in told
    assert "optimizer: -12 all_reduce over tp (tp), 1 KiB f32, implicit P(sum)->R" in told
    assert told.endswith("exit code 1")
