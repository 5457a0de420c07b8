"""With communication replaced by local copies, every case that communicates must come out `wrong`: on real ranks."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, ROOT
from processes import Ranks
from test_planners_run import profile_of

from distbench.launch import Request, jobs_of
from distbench.records.run_file import read_run
from distbench.spec import Job
from distbench.spec.placements import PLANNERS

MUTANT = (str(ROOT / "tests" / "ranks" / "no_communication.py"),)


def job_of(folder: Path, target: str, *choices: str, **more: Any) -> Job:
    request = Request(
        targets=(target,),
        choices=choices,
        device="cpu",
        quick=True,
        out=folder,
        timeout_s=60,
        started_at=time.time(),
        **more,
    )
    (job,) = jobs_of(request, None)
    return replace(job, settings=replace(job.settings, warmup_iterations=1, min_samples=1, budget_s=0.1, passes=1))


def mutants(ranks: Ranks, jobs: list[Job]) -> dict[str, list[dict[str, Any]]]:
    """Scenario to its cases, all of one launch."""
    outcomes = ranks.launch_all(jobs, MUTANT)
    assert {(one.status, one.exit_code) for one in outcomes} == {("complete", 1)}, [one.message for one in outcomes]
    return {job.scenario: read_run(Path(job.run_file)).cases for job in jobs}


@pytest.fixture(scope="module")
def without_any(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Without any communication."""
    folder = tmp_path_factory.mktemp("mutants")
    profile_of().save(folder / "profile.json")
    jobs = [
        job_of(folder, "collectives", "max_bytes=65536"),
        job_of(folder, str(DATA / "moves.py"), profile=folder / "profile.json"),
        job_of(folder, "tp_mlp"),
        job_of(folder, "cp_attention", "load_balance=False"),
    ]
    return mutants(ranks, jobs)


@pytest.mark.long
def test_every_collective_is_wrong(without_any: dict[str, list[dict[str, Any]]]) -> None:
    cases = without_any["collectives"]
    assert len(cases) == 20
    assert {record["status"] for record in cases} == {"wrong"}
    assert all("expected" in record["error"] for record in cases)


@pytest.mark.long
def test_every_redistribution_that_communicates_is_wrong_and_no_other(
    without_any: dict[str, list[dict[str, Any]]],
) -> None:
    # Unsupported: direct from Partial. Raised: greedy from a shard to Partial, which torch 2.13 does not plan.
    moved = [record for record in without_any["moves"] if record["status"] not in ("unsupported", "raised")]
    communicating = [record for record in moved if record["counters"]["num_collectives"]]
    result = {(record["case"]["params"].get("suite"), record["case"]["params"]["planner"]) for record in communicating}
    planners = [f"{name}{native}" for name in PLANNERS for native in ("", "+native")]
    assert result >= {(None, planner) for planner in planners}
    assert {suite for suite, _ in result} == {None, "pairs", "partials", "shard_orders", "backward"}
    assert len(communicating) > 100
    for record in moved:
        assert record["status"] == ("wrong" if record in communicating else "ok"), record["case"]["id"]


def all_steps_are_wrong(cases: list[dict[str, Any]]) -> None:
    assert cases and {record["case"]["kind"] for record in cases} == {"step"}
    assert {record["status"] for record in cases} == {"wrong"}, [record["case"]["id"] for record in cases]
    assert all("differs from one device's" in record["error"] for record in cases)


@pytest.mark.parametrize("name", ["tp_mlp", "cp_attention"])
@pytest.mark.long
def test_every_step_without_collectives_is_wrong(without_any: dict[str, list[dict[str, Any]]], name: str) -> None:
    all_steps_are_wrong(without_any[name])


@pytest.mark.parametrize("removed", ["all_gather", "reduce_scatter"])
@pytest.mark.long
def test_every_step_without_one_kind_of_collective_is_wrong(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    monkeypatch.setenv("REMOVED", removed)
    all_steps_are_wrong(mutants(ranks, [job_of(tmp_path, "llama_2d", "num_layers=1")])["llama_2d"])
