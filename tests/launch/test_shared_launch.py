"""Scenarios of one command share a launch: what is shared, what is not, and what a failure of one costs the others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import DATA, run_files
from processes import Ranks
from test_failures import assert_nothing_runs

from distbench.launch import Request, jobs_of
from distbench.launch.rank_processes import RankProcesses
from distbench.records.run_file import Run, read_run
from distbench.spec import Job

SPOILER = '''
import os
import torch
from distbench.spec import *

torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
torch.manual_seed(7)
torch.Tensor.mul = None
os.environ["SPOILED"] = "yes"


@scenario(mesh={"tp": 2})
def spoiler() -> Scenario:
    """Leaves nothing in this process as it was."""
    return Scenario(collectives=(Collectives(ops=("all_gather",), sizes_bytes=(1024,)),))
'''
WITNESS = '''
import os
import sys
import torch
from distbench.spec import *


@scenario(mesh={"tp": 2})
def witness() -> Scenario:
    """Tells what it finds by the number of its cases."""
    found = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed(), torch.Tensor.mul is None)
    fresh = found == (torch.float32, True, torch.default_generator.initial_seed(), False)
    fresh = fresh and "SPOILED" not in os.environ and "distbench_scenario_spoiler" not in sys.modules
    fresh = fresh and torch.initial_seed() != 7 and torch.get_num_threads() == 1
    ops = ("all_gather", "broadcast") if fresh else ("all_gather",)
    return Scenario(collectives=(Collectives(ops=ops, sizes_bytes=(1024,)),))
'''


def runs_by_scenario(folder: Path) -> dict[str, Run]:
    return {run.scenario: run for run in map(read_run, run_files(folder))}


def statuses(run: Run) -> list[str]:
    return [record["status"] for record in run.cases]


def log_dir(run: Run) -> Path:
    return Path(run.header["job"]["log_dir"])


@pytest.fixture(scope="module")
def shared(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario that kills a rank between two others of its launch, and one on another number of ranks."""
    folder = tmp_path_factory.mktemp("shared")
    for name, text in (("spoiler", SPOILER), ("witness", WITNESS)):
        (folder / f"{name}.py").write_text(text)
    files = [str(folder / "spoiler.py"), str(folder / "witness.py"), f"{DATA / 'misdeeds.py'}::misdeeds"]
    options = (
        "--quick",
        "--passes",
        "1",
        "--budget",
        "0.5",
        "--set",
        "misdeed=kill",
        "--results",
        str(folder / "results"),
    )
    done = ranks.run_here("run", *files, str(DATA / "tiny.py"), *options)
    assert done.exit_code == 1, done.stderr
    return folder / "results"


def test_every_scenario_has_its_run_file_footer_and_logs_and_only_the_first_waited_for_imports(shared: Path) -> None:
    runs = runs_by_scenario(shared)
    assert set(runs) == {"spoiler", "witness", "misdeeds", "tiny"}
    assert all(run.footer and run.footer["status"] == "complete" for run in runs.values())
    assert len({run.header["invocation_id"] for run in runs.values()}) == 1
    # The load that our own scenarios make is no caution for those after them.
    loads = [run.header["environment"]["load_at_start"] for run in runs.values()]
    assert loads == loads[:1] * 4
    assert all(0 < run.footer["measuring_s"] < run.footer["wall_s"] for run in runs.values() if run.footer)
    spent = {name: (run.footer or {})["spent_s"] for name, run in runs.items()}
    assert spent["witness"]["imports"] < 0.01  # a forked process has imported all there is
    for run in runs.values():
        message = [json.loads(line)["event"] for line in (log_dir(run) / "progress.jsonl").read_text().splitlines()]
        assert message[0] == "meeting" and message.count("end") <= 1
        assert sorted(path.name for path in log_dir(run).glob("rank*.log")) == ["rank0.log", "rank1.log"]
        assert (log_dir(run) / "launch.log").exists()
    left = (log_dir(runs["spoiler"]) / "progress.jsonl").read_text().splitlines()[-2:]
    assert [json.loads(line)["event"] for line in left] == ["end", "left"]
    assert_nothing_runs(shared)


def test_what_a_scenario_does_to_its_process_no_other_one_finds(shared: Path) -> None:
    runs = runs_by_scenario(shared)
    assert statuses(runs["spoiler"]) == ["ok"] and statuses(runs["witness"]) == ["ok", "ok"]


def test_a_case_that_kills_a_rank_costs_only_itself_in_a_shared_launch_too(shared: Path) -> None:
    runs = runs_by_scenario(shared)
    assert sorted(statuses(runs["misdeeds"])) == ["aborted", "ok", "ok", "ok", "ok"]
    assert statuses(runs["tiny"]) == ["ok"]
    footers = {name: run.footer or {} for name, run in runs.items()}
    assert {name: footer["num_relaunches"] for name, footer in footers.items()} == {
        **dict.fromkeys(("spoiler", "witness", "tiny"), 0),
        "misdeeds": 1,
    }
    assert "ended with exit code -9" in (log_dir(runs["misdeeds"]) / "launch.log").read_text()
    assert (log_dir(runs["misdeeds"]) / "relaunch1" / "launch.log").exists()
    assert all(footer["foreign_cpu"] is not None for footer in footers.values())


def jobs(tmp_path: Path, *meshes: dict[str, int]) -> list[Job]:
    request = Request((str(DATA / "tiny.py"),), device="cpu", out=tmp_path)
    return [replace(jobs_of(request, None)[0], run_id=str(number), mesh=mesh) for number, mesh in enumerate(meshes)]


def test_only_jobs_that_follow_and_need_as_many_ranks_share_a_launch(tmp_path: Path, known_host: None) -> None:
    two, also_two, four, two_again = jobs(tmp_path, {"tp": 2}, {"cp": 2}, {"tp": 4}, {"tp": 2})
    ranks = RankProcesses([two, also_two, four, two_again], None, ("-c", "pass"))
    assert ranks.after(two) == [also_two]
    assert [ranks.after(job) for job in (also_two, four, two_again)] == [[], [], []]
    on_gpu = replace(also_two, device="cuda")
    assert RankProcesses([two, on_gpu], None, ("-c", "pass")).after(two) == []
