"""Calls of people's own that do more than forward and loss: what becomes of them, and of the cases next to them."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA
from processes import Ranks

from distbench.launch import Request, jobs_of
from distbench.records.run_file import read_run
from distbench.spec import Job

FILE = DATA / "own_calls.py"
ROWS = {
    "right": ("ok", ""),
    "own_optimizer": ("wrong", f"steps an optimizer (AdamW, {FILE}:"),
    "own_collective": ("raised", "it issues all_reduce, but no other rank computes this step"),
    "noise": ("wrong", f"call ({FILE}:"),
    "contrastive": ("wrong", "couples the samples of a batch"),
    "router": ("wrong", "couples the samples of a batch"),
    "whitened": ("wrong", "couples the samples of a batch"),
    "other_dtype": ("ok", ""),
    "right again": ("ok", ""),
}


def job_of(name: str, out: Path, passes: int = 1, **parameters: Any) -> Job:
    request = Request(
        targets=(f"{FILE}::{name}",), device="cpu", quick=True, out=out, timeout_s=60, started_at=time.time()
    )
    (job,) = jobs_of(request, None)
    job = replace(job, variants=[variant | parameters for variant in job.variants])
    settings = replace(job.settings, warmup_iterations=1, min_samples=1, budget_s=0.1, passes=passes)
    return replace(job, settings=settings)


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both scenarios, of one launch and what is launched after it."""
    jobs = [job_of(name, tmp_path_factory.mktemp(name)) for name in ("own_collectives", "own_calls_ddp", "own_calls")]
    jobs.append(job_of("own_collectives", tmp_path_factory.mktemp("late"), passes=3, late=True))
    outcomes = ranks.launch_all(jobs)
    assert {outcome.status for outcome in outcomes} == {"complete"}, outcomes
    return {Path(job.run_file).parents[1].name.rstrip("0"): read_run(Path(job.run_file)) for job in jobs}


@pytest.mark.long
def test_a_case_has_the_same_outcome_whatever_runs_before_it_and_its_cause_is_named(runs: dict[str, Any]) -> None:
    run = runs["own_calls"]
    result = {row["case"]["params"]["variant"].removeprefix("how="): row for row in run.cases}
    assert {name: row["status"] for name, row in result.items()} == {name: status for name, (status, _) in ROWS.items()}
    for name, (_, message) in ROWS.items():
        assert message in (result[name]["error"] or ""), name
    assert "even in eval mode" in result["noise"]["error"]
    assert run.footer["num_relaunches"] == 0


@pytest.mark.parametrize("name", ["own_collectives", "late"])
@pytest.mark.long
def test_a_case_that_leaves_ranks_out_of_step_is_the_one_that_ends_the_launch(runs: dict[str, Any], name: str) -> None:
    run = runs[name]
    assert [(row["case"]["params"]["call"], row["status"]) for row in run.cases] == [
        ("begins", "raised"),
        ("sums", "ok"),
    ]
    assert "ranks have issued different collectives" in run.cases[0]["error"] and run.footer["num_relaunches"] == 1


@pytest.mark.long
def test_a_call_that_ddp_does_not_see_is_told_so_and_not_to_replicate(runs: dict[str, Any]) -> None:
    row, own = runs["own_calls_ddp"].cases
    assert row["status"] == "wrong" and "bypasses the model's forward" in row["error"]
    assert "replicate(model)" not in row["error"]
    assert own["status"] == "wrong" and f"runs backward ({FILE}:" in own["error"]
