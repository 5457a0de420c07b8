"""The library of redistributions: the page's lines and every value on real ranks, what its import costs and loads."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from processes import Children, Ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distbench import redistribute
from distbench.spec.errors import UserError
from distbench.torch_private import fake_ranks

RANKS = ROOT / "tests" / "ranks"
COST = """
import sys, time, torch, torch.distributed.tensor
start = time.process_time()
from distbench import redistribute
print(time.process_time() - start)
print([name for name in ("click", "pandas", "scenarios", "scipy", "distbench.cli", "distbench.records.run_file",
    "distbench.torch_private") if name in sys.modules])
"""


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_values_forward_backward_and_compiled_on_real_ranks(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    done = ranks.run_forked(4, RANKS / "library_checks.py", tmp_path / "checked", backend)
    assert done.returncode == 0, done.stderr
    checked = json.loads((tmp_path / "checked").read_text())
    kinds = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "cut", "partition", "zero_fill")
    assert all(
        checked[kind] for kind in (*kinds, "calibrated: forward", "direct: forward", "compiled", "dtypes", "transforms")
    )
    assert checked["calibrated: forward"] + checked["direct: forward"] == 240 and checked["backward"] > 120


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shape": "4096"}, "shape '4096' is not valid"),
        ({"shape": 4096}, "shape 4096 is not valid"),
        ({"shape": (4.5, 2)}, "is not valid"),
        ({"shape": (-2, 2)}, "is not valid"),
        ({"mesh": 4}, "mesh 4 is not valid"),
        ({"mesh": "2x2"}, "mesh '2x2' is not valid"),
        ({"mesh": None}, "mesh None is not valid"),
        ({"mesh": (0, 2)}, "is not valid"),
        ({"source": None}, "layout None is unknown"),
        ({"source": [Shard(-3), Replicate()]}, "a 2-D tensor lacks"),
        ({"source": "S(0)"}, "1 placements, but the mesh has 2"),
        ({"source": "P(foo)R"}, "reduce op 'foo'"),
        ({"source": "P(max)P(sum)"}, "mixes the reduce ops max, sum"),
        ({"dtype": "bf16"}, "dtype 'bf16' is not a torch.dtype"),
        ({"profile": {"a": 1}}, "profile {'a': 1} is not valid"),
        ({"profile": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"planner": "greedy"}, "use calibrated or direct"),
        ({"max_bytes": "2GB"}, "max_bytes is '2GB'"),
        ({"max_bytes": 1}, "holds at most 1 bytes"),
    ],
)
def test_bad_arguments_are_rejected_in_a_sentence(changed: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"source": "S(0)R", "target": "RR", "shape": (8, 4), "mesh": (2, 2), **changed}
    with pytest.raises(UserError) as raised:
        redistribute.plan(**given)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_tensors_that_do_not_fit_the_plan_are_rejected_in_a_sentence() -> None:
    with fake_ranks({"dp": 2, "tp": 2}) as mesh:
        plan = redistribute.plan("S(0)R", "RR", (8, 4), mesh)
        sharded = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0), Replicate()])
        wrong: list[tuple[Any, Any, str]] = [
            (torch.ones(8, 4), plan, "has (4, 4) on this rank"),
            (sharded, plan, "local is a DTensor"),
            ([1, 2], plan, "local is a list"),
            (torch.ones(4, 4).to_sparse(), plan, "local is a sparse tensor"),
            (torch.ones(4, 4), "S(0)R", "plan is a str"),
            (torch.ones(4, 4), redistribute.plan("S(0)R", "RR", (8, 4), (2, 2)), "for sizes of a mesh"),
        ]
        for local, planned, words in wrong:
            with pytest.raises(UserError, match=re.escape(words)):
                redistribute.execute(local, planned)
        with pytest.raises(UserError, match="the DTensor has shape"):
            redistribute.plan(sharded, "RR", (8, 5), mesh)
        with pytest.raises(UserError, match="for sizes of a mesh"):
            _ = redistribute.plan("S(0)R", "RR", (8, 4), (2, 2)).backward


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_the_python_code_of_a_small_redistribution_stays_short() -> None:
    """It runs next to each exchange, on the host. With autograd's function it had 330 calls, not about 100."""
    calls: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls.append(event)

    with fake_ranks({"dp": 2, "tp": 2}) as mesh:
        plan = redistribute.plan("S(1)R", "S(0)S(0)", (8, 8), mesh, planner="direct")
        local = torch.zeros(8, 4)
        for _ in range(2):  # the first has more
            calls.clear()
            sys.setprofile(note)
            try:
                moved = redistribute.execute(local, plan)
            finally:
                sys.setprofile(None)
        assert moved.shape == (2, 8) and 20 < len(calls) < 150, len(calls)
        assert redistribute.execute(local.requires_grad_(), plan).requires_grad
        # A derivative that autograd's function lacks must not be dropped without an error.
        with pytest.raises(NotImplementedError):
            torch.func.jvp(lambda x: redistribute.execute(x, plan), (torch.zeros(8, 4),), (torch.ones(8, 4),))


def test_a_rank_outside_of_the_mesh_is_rejected_in_a_sentence() -> None:
    with fake_ranks({"dp": 2, "tp": 2}):
        others = DeviceMesh("cpu", [1, 2, 3], mesh_dim_names=("tp",), _init_backend=False)  # this is rank 0
        plan = redistribute.plan("S(0)", "R", (6, 4), others)
        with pytest.raises(UserError, match="rank 0 is not in the mesh"):
            redistribute.execute(torch.ones(2, 4), plan)
