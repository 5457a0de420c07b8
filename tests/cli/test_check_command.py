"""`distbench check`: plans on meshes of any size, every problem at once, without ranks."""

import contextlib
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import DATA, Cli
from processes import Children

import distbench.cli.check
from distbench.cli.main import main

BROKEN = '''
import torch
import torch.nn.functional as F
from torch import nn
from distbench.spec import FsdpPlan, ParallelPlan, Scenario, scenario


def refuse(model, mesh):
    raise RuntimeError("no such layer")


@scenario(mesh={"dp_shard": 2, "tp": 2}, axes={"microbatches": (1, 3)})
def broken(*, microbatches: int = 1) -> Scenario:
    """A plan that torch refuses only when it is applied, and one whose batch does not fit."""
    return Scenario(
        build_model=lambda: nn.Linear(8, 8),
        make_batch=lambda: (torch.ones(4, 8), torch.ones(4, 8)),
        loss=F.mse_loss,
        plan=ParallelPlan(tp=refuse, fsdp=FsdpPlan(), microbatches=microbatches),
    )


def explode():
    raise KeyError("a weight\\nand more")


@scenario(mesh={"tp": 2})
def raises() -> Scenario:
    """A model that cannot be built."""
    return Scenario(build_model=explode, make_batch=lambda: (torch.ones(4, 8), torch.ones(4, 8)), loss=F.mse_loss)


@scenario(mesh={"tp": 2})
def forgets() -> Scenario:
    """No return."""
    print("3")
'''


def asked_here(verb: str, *, given: Any, timeout_s: float, failure: str) -> Any:
    """What the child process would answer, without what a second import of torch costs."""
    from distbench.worker.plan_rehearsal import all_plan_problems

    assert verb == "plan_problems"
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        result = all_plan_problems(json.loads(json.dumps(given)))
    return json.loads(json.dumps(result))


@pytest.fixture
def here(known_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distbench.cli.check, "ask_child", asked_here)


def check(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", *arguments])


def test_every_problem_of_every_scenario_is_listed_with_what_would_work(here: None) -> None:
    done = check(str(DATA / "bad_plans.py"))
    assert done.exit_code == 2 and "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "unmatched on tp=2 (2 ranks): 1 problem" and "(nearest: up_proj" in lines[1]
    at = lines.index("undividable on tp=2 (2 ranks): 1 problem")
    message = " ".join(" ".join(lines[at + 1 : -2]).split())
    assert message.startswith(
        "- mesh dim 'tp' of size 2 does not divide 15 (sizes that work: 1, 3, 5, 15), as required"
    )
    assert (
        message.endswith(" by {up_proj,down_proj}.weight; up_proj.bias")
        and lines[-2] == "  --mesh tp=1 works (checked)"
    )
    assert lines[-1] == "error: 2 problems in 2 of 2 variants. Change the plan"


@pytest.mark.long
def test_the_mesh_that_a_problem_names_does_work(here: None) -> None:
    refused = check("tp_mlp", "--mesh", "tp=12", "--set", "sequence_parallel=False")
    assert refused.exit_code == 2
    (named,) = re.findall(r"Use --mesh (\S+) \(checked\)", refused.stdout)
    assert check("tp_mlp", "--mesh", named).exit_code == 0


@pytest.mark.long
def test_the_problems_of_many_layers_fit_a_screen(here: None) -> None:
    sizes = ("dim=64", "hidden=256", "num_layers=2", "rotate=allgather,alltoall")
    small = (word for size in sizes for word in ("--set", size))
    refused = check("llama_3d", *small, "--mesh", "dp_shard=2,tp=3", "--width", "80")
    lines = refused.stdout.splitlines()
    assert refused.exit_code == 2 and len(lines) <= 12 and max(map(len, lines)) <= 80
    message = " ".join(refused.stdout.split())
    assert "layers.*.attention.{wq,wk,wv,wo}.weight: 2 layers" in message
    assert "Use --mesh dp_replicate=1,dp_shard=2,cp=1,tp=2 (checked), or change the plan" in message


def test_what_torch_refuses_is_told_for_the_variant_it_concerns(here: None, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(BROKEN)
    done = check(str(file), "--width", "200")
    assert done.exit_code == 2

    def line_of(text: str) -> int:
        return next(number for number, line in enumerate(BROKEN.splitlines(), start=1) if text in line)

    assert done.stdout.splitlines() == [
        "broken on dp_shard=2,tp=2 (4 ranks): 2 problems",
        f"  - parallelize raises RuntimeError: no such layer ({file}:{line_of('no such layer')}); fix it "
        "[microbatches=1]",
        "  - a batch of 2 per rank cannot be split into 3 micro-batches; use a divisor of 2 [microbatches=3]",
        "raises on tp=2 (2 ranks): 1 problem",
        f"  - build_model raises KeyError: 'a weight\\nand more' ({file}:{line_of('a weight')}); fix it",
        "forgets on tp=2 (2 ranks): 1 problem",
        f"  - the scenario ({file}:{line_of('def forgets') - 1}) returns NoneType; return a Scenario",
        "error: 4 problems in 4 of 4 variants. Change the plan",
    ]


def test_a_load_of_another_model_is_a_problem(here: None, tmp_path: Path) -> None:
    load = tmp_path / "load.json"
    load.write_text("[1, 2, 3]")
    result = check("expert_exchange", "--set", f"load={load}")
    assert result.exit_code == 2 and "it has counts of 3 experts, but the model has 16" in " ".join(
        result.stdout.split()
    )


def test_bad_input_is_one_sentence(cli: Cli) -> None:
    for arguments in (("nosuch",), ("llama_2d", "--mesh", "tp=x"), ("llama_2d", "--set", "nosuch=1")):
        done = cli("check", *arguments)
        assert done.returncode == 2 and done.stderr.startswith("distbench: ") and done.stderr.count("\n") == 1


@pytest.mark.long
def test_4096_ranks_are_checked_as_fast_as_4_and_in_little_memory(children: Children) -> None:
    code = (
        "import resource, subprocess, sys\n"
        "def check(*words):\n"
        "    done = subprocess.run([sys.executable, '-m', 'distbench', 'check', 'llama_2d', *words],"
        " capture_output=True, text=True)\n"
        "    used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "    return done, used.ru_maxrss, used.ru_utime + used.ru_stime\n"
        "_, _, few_s = check('--mesh', 'dp_shard=2,tp=2')\n"
        "done, peak, both_s = check('--mesh', 'dp_shard=512,tp=8', '--set', 'batch=512')\n"
        "print(done.returncode, peak, (both_s - few_s) / few_s)\n"
        "print(done.stdout)"
    )
    done = children.python("-c", code, check=True)
    first, *rest = done.stdout.splitlines()
    returncode, peak_kib, ratio = (float(word) for word in first.split())
    assert returncode == 0 and "(4,096 ranks)" in rest[0] and rest[1].endswith("; forward, loss and backward run")
    assert rest[2].startswith("OK: ") and rest[3].startswith(
        "Next: distbench simulate llama_2d --mesh dp_shard=512,tp=8"
    )
    # CPU seconds relative to those of 4 ranks: neither this machine's speed nor its load must decide.
    assert peak_kib * 1024 < 1e9 and ratio < 1.5


@pytest.mark.long
def test_all_shipped_plans_pass(cli: Cli) -> None:
    names = ("fsdp_knobs", "fsdp_stack", "llama_2d", "llama_3d", "tp_styles", "shard_params", "recompute")
    # Some variants of those that have many; which of them fit their meshes is told before any test of ranks, too.
    chosen = (
        "knob=plain,hybrid,bf16_params,cpu_offload,uneven",
        "style=embedding_rows,vocabulary,sequence,prepare_both,callable",
        *("layout=rows_then_columns", "rotate=allgather"),
    )
    some = ("--quick", *(word for one in chosen for word in ("--set", one)))
    done = cli("check", *names, "tp_mlp", "tp_attention", "cp_attention", "collectives", *some)
    assert done.returncode == 0, done.stdout
    assert "llama_3d on dp_replicate=1,dp_shard=1,cp=2,tp=2 (4 ranks)" in done.stdout
    assert "knob=cpu_offload: skipped: CPU offload" in done.stdout
    message = " ".join(done.stdout.split())
    assert message.count(" per rank; forward, loss and backward run") >= 20 and "no step was tried" not in message
    assert "OK: " in message and "Next: distbench run fsdp_knobs" in message


def test_a_step_that_cannot_run_names_a_mesh_on_which_it_does(cli: Cli) -> None:
    refused = cli("check", str(DATA / "bad_steps.py"), "--set", "fault=heads,loss,none")
    assert refused.returncode == 2
    lines = refused.stdout.splitlines()
    assert lines[1].startswith("  - attention, given ") and lines[-2].endswith("; forward, loss and backward run")
    assert [line for line in lines if "--mesh" in line] == ["  --mesh tp=3 works (checked) [fault=heads]"]


def test_bytes_of_a_rank_are_those_of_its_shards(here: None) -> None:
    done = check("tp_mlp", "--quick", "--mesh", "tp=4", "--set", "sequence_parallel=False")
    # Three matrices of 256 x 1024, a quarter of each on a rank, 4 bytes an element.
    expected = 3 * 256 * 1024
    assert f"{expected / 1e3:.0f} k parameters, 768 KiB per rank" in done.stdout
