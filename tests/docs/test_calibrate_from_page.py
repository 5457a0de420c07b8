"""docs/calibrate-from.md is executed: its first command on generated files prints what the page shows."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import ROOT
from nccl_files import OF_NCCL, nccl_file

from distbench.cli.main import main
from distbench.planning.redistribution_request import setting_of
from distbench.simulate.hardware_file import load_hardware

PAGE = (ROOT / "docs" / "calibrate-from.md").read_text()
COMMAND, *_ = re.findall(r"^```\n(distbench .*)\n```", PAGE, re.MULTILINE)
(SHOWN,) = re.findall(r"^```\n(NVIDIA .*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_command_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop = re.search(r"for op in (.*); do\n", PAGE)
    assert loop and loop[1].split() == list(OF_NCCL)
    for op in OF_NCCL:
        for on_hosts in ((8,), (8, 8)):
            nccl_file(tmp_path / f"{op}-{sum(on_hosts)}.json", op, on_hosts)
    done = CliRunner().invoke(main, [*shlex.split(COMMAND)[1:], "--width", "120"])
    assert done.exit_code == 0 and not done.stderr, done.stderr
    assert re.sub(r"in \d+ s", "in 3 s", done.output) == SHOWN
    setting_of("4096,4096", "bf16", "tp=8", Path("profile.json"))
    assert load_hardware("hardware.json").host is None
