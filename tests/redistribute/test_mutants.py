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
from distbench.spec.placements import PLANNERS

MUTANT = (str(ROOT / "tests" / "ranks" / "no_communication.py"),)


def mutant(ranks: Ranks, tmp_path: Path, target: str, *choices: str, **more: Any) -> list[dict[str, Any]]:
    request = Request(
        targets=(target,),
        choices=choices,
        device="cpu",
        quick=True,
        out=tmp_path,
        timeout_s=60,
        started_at=time.time(),
        **more,
    )
    (job,) = jobs_of(request, None)
    job = replace(job, settings=replace(job.settings, warmup_iterations=1, min_samples=1, budget_s=0.1, passes=1))
    outcome = ranks.launch(job, MUTANT)
    assert outcome.status == "complete" and outcome.exit_code == 1, outcome.message
    return read_run(Path(job.run_file)).cases


def test_every_collective_is_wrong(ranks: Ranks, tmp_path: Path) -> None:
    cases = mutant(ranks, tmp_path, "collectives", "max_bytes=65536")
    assert len(cases) == 20
    assert {record["status"] for record in cases} == {"wrong"}
    assert all("was expected" in record["error"] for record in cases)


def test_every_redistribution_that_communicates_is_wrong_and_no_other(ranks: Ranks, tmp_path: Path) -> None:
    profile_of().save(tmp_path / "profile.json")
    cases = mutant(ranks, tmp_path, str(DATA / "moves.py"), profile=tmp_path / "profile.json")
    # Unsupported: direct from Partial. Raised: greedy from a shard to Partial, which torch 2.13 does not plan.
    moved = [record for record in cases if record["status"] not in ("unsupported", "raised")]
    communicating = [record for record in moved if record["counters"]["num_collectives"]]
    found = {(record["case"]["params"].get("suite"), record["case"]["params"]["planner"]) for record in communicating}
    planners = [f"{name}{native}" for name in PLANNERS for native in ("", "+native")]
    assert found >= {(None, planner) for planner in planners}
    assert {suite for suite, _ in found} == {None, "pairs", "partials", "shard_orders", "backward"}
    assert len(communicating) > 100
    for record in moved:
        assert record["status"] == ("wrong" if record in communicating else "ok"), record["case"]["id"]


@pytest.mark.parametrize(
    ("target", "choices", "removed"),
    [
        ("llama_2d", ("num_layers=1",), "all_gather"),
        ("llama_2d", ("num_layers=1",), "reduce_scatter"),
        ("tp_mlp", (), None),
        ("cp_attention", ("load_balance=False",), None),
    ],
)
def test_every_step_without_one_kind_of_collective_is_wrong(
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    choices: tuple[str, ...],
    removed: str | None,
) -> None:
    if removed:
        monkeypatch.setenv("REMOVED", removed)
    cases = mutant(ranks, tmp_path, target, *choices)
    assert cases and {record["case"]["kind"] for record in cases} == {"step"}
    assert {record["status"] for record in cases} == {"wrong"}, [record["case"]["id"] for record in cases]
    assert all("off one device's" in record["error"] for record in cases)
