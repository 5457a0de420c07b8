"""The library of redistributions: the page's lines and every value on real ranks, what its import costs and loads."""

import json
import re
from pathlib import Path

from conftest import ROOT
from processes import Children, Ranks

RANKS = ROOT / "tests" / "ranks"
COST = """
import sys, time, torch, torch.distributed.tensor
start = time.process_time()
from distbench import redistribute
print(time.process_time() - start)
print([name for name in ("click", "pandas", "scenarios", "scipy", "distbench.cli", "distbench.records.run_file",
    "distbench.torch_private") if name in sys.modules])
"""


def test_values_forward_backward_and_compiled_on_real_ranks(ranks: Ranks, tmp_path: Path) -> None:
    done = ranks.run_forked(4, RANKS / "library_checks.py", tmp_path / "checked")
    assert done.returncode == 0, done.stderr
    checked = json.loads((tmp_path / "checked").read_text())
    kinds = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "cut", "partition", "zero_fill")
    assert all(checked[kind] for kind in (*kinds, "calibrated: forward", "direct: forward", "compiled"))
    assert checked["calibrated: forward"] + checked["direct: forward"] == 240 and checked["backward"] > 120


def test_the_import_costs_little_beyond_torch(children: Children) -> None:
    """The least of four, since other processes use the caches too; with bytecode, as an installed package has it."""
    folders = [ROOT / "distbench" / name for name in ("spec", "planning", "redistribute", "__init__.py", "version.py")]
    children.python("-m", "compileall", "-q", *folders, check=True)
    seconds = []
    for _ in range(4):
        done = children.python("-c", COST, check=True)
        cost, loaded = done.stdout.splitlines()
        assert loaded == "[]"
        seconds.append(float(cost))
    assert min(seconds) < 0.05, seconds


def test_the_lines_of_the_page_run(ranks: Ranks, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "redistribution.md").read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) == 5
    script = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    script += "full = torch.arange(4096 * 4096.0).reshape(4096, 4096)\n"
    script += "row, column = divmod(dist.get_rank(), 2)\nrows = full.chunk(2)[row]\n"
    script += f"{code}\nassert torch.equal(columns, full.chunk(2, dim=1)[column])\n"
    (tmp_path / "lines.py").write_text(script)
    done = ranks.run_forked(4, tmp_path / "lines.py")
    assert done.returncode == 0, done.stderr
