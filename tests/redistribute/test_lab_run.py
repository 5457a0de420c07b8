"""The laboratory on four gloo ranks: what torch gets wrong is told, what we do is right; and its profile."""

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import run_files
from processes import Ranks

from distbench.cli.main import main
from distbench.launch import Request, jobs_of
from distbench.planning.cost_profile import Line, Profile
from distbench.planning.placement_states import parse_state
from distbench.records.run_file import read_run
from distbench.spec.scenario import LABORATORY_SUITES

Rows = dict[tuple[str, str], dict[str, dict[str, Any]]]


def profile_of(backend: str = "gloo", tp: int = 2) -> Profile:
    lines = [Line("direct", "dp_shardxtp", 2 * tp, 1e-4, 1e-9)]
    for name, size in (("dp_shard", 2), ("tp", tp)):
        for op in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"):
            lines.append(Line(op, name, size, 1e-4, 1e-9))
    return Profile("test", backend, "2.13", {"dp_shard": 2, "tp": tp}, tuple(lines))


@pytest.fixture(scope="module")
def rows(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """(suite, "source->target shape") to planner to record."""
    folder = tmp_path_factory.mktemp("laboratory")
    profile_of().save(folder / "profile.json")
    sizes = ("--set", "max_pairs=3", "--set", "small_bytes=4096", "--set", "large_bytes=16384")
    small = ("--budget", "0.5", "--passes", "1", *sizes)
    done = ranks.run_here("run", "redistribute_lab", "--quick", "--device", "cpu", *small, cwd=folder)
    assert done.exit_code == 1, done.stderr
    assert "redistribute_lab: plans and predictions use ./profile.json" in done.stderr
    (file,) = run_files(folder / "results")
    run = read_run(file)
    assert run.footer is not None and run.footer["status"] == "complete" and run.footer["num_not_run"] == 0
    assert len({record["case"]["id"] for record in run.cases}) == len(run.cases)
    result: Rows = defaultdict(dict)
    for record in run.cases:
        params = record["case"]["params"]
        key = params["suite"], f"{params['source']}->{params['target']} {params['shape']}"
        result[key][params["planner"]] = record
    return result


# What torch's planners get wrong or lack, seen on every version: (suite, pair), then planner to its status below a
# version and since then. Our planners are right on all of them.
ALWAYS = (0, 0)
KNOWN: dict[tuple[str, str], dict[str, tuple[str, tuple[int, int], str]]] = {
    ("flattened", "S(0)S(0)->RR"): {"greedy": ("", ALWAYS, "wrong"), "min_cost": ("", ALWAYS, "wrong")},
    ("partials", "S->P(sum)"): {"greedy": ("unsupported", (2, 14), "ok"), "min_cost": ("", ALWAYS, "ok")},
}
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


def known(suite: str, pair: str) -> dict[str, str]:
    """Each planner of torch's to the status that it has with this torch."""
    return {
        planner: since if changed <= RELEASE else before
        for planner, (before, changed, since) in KNOWN[suite, pair].items()
    }


@pytest.mark.long
def test_every_suite_runs_and_says_what_it_did(rows: Rows) -> None:
    assert {suite for suite, _ in rows} == set(LABORATORY_SUITES)
    for (suite, _), by_planner in rows.items():
        for record in by_planner.values():
            params = record["case"]["params"]
            assert params["mesh_shape"] == [2, 2]
            assert params["direction"] == ("backward" if suite == "backward" else "forward")
            assert params.get("flattened") == (["dp_shard", "tp"] if suite == "flattened" else None)
            assert f"/{suite}/" in record["case"]["id"]


@pytest.mark.long
def test_our_planners_are_right_on_every_pair_they_move(rows: Rows) -> None:
    tried = set()
    for (suite, pair), by_planner in rows.items():
        for planner in ("calibrated", "direct"):
            if planner in by_planner:
                tried.add((suite, planner))
                assert by_planner[planner]["status"] == "ok", (suite, pair, planner, by_planner[planner]["error"])
    assert {suite for suite, planner in tried if planner == "calibrated"} == set(LABORATORY_SUITES)
    assert {suite for suite, planner in tried if planner == "direct"} >= {"pairs", "shard_orders", "flattened"}


@pytest.mark.long
def test_torchs_wrong_values_over_a_flattened_mesh_are_told(rows: Rows) -> None:
    """F1: (5, 3) cut twice along 5, gathered over the flattened mesh; so in torch 2.11 to 2.15."""
    by_planner = rows["flattened", "S(0)S(0)->RR [5, 3]"]
    for planner, status in known("flattened", "S(0)S(0)->RR").items():
        assert by_planner[planner]["status"] == status and "6 of 15 elements" in by_planner[planner]["error"]
    assert by_planner["direct"]["status"] == by_planner["calibrated"]["status"] == "ok"


@pytest.mark.long
def test_a_shard_becomes_partial_by_zero_fill_since_torch_2_14(rows: Rows) -> None:
    """F3: below, greedy plans it although torch raises, and the graph planner goes by way of a replica."""
    result = {
        pair: by for (suite, pair), by in rows.items() if suite == "partials" and from_shard_to_partial(pair.split()[0])
    }
    assert result
    for pair, by_planner in result.items():
        for planner, status in known("partials", "S->P(sum)").items():
            record = by_planner[planner]
            assert record["status"] == status, (pair, record["error"])
            if status == "unsupported":
                assert "needs torch 2.14 or newer" in record["error"]
        for planner in ("min_cost", "calibrated"):
            record = by_planner[planner]
            assert record["status"] == "ok"
            # Of one reason to communicate, none is left where a shard is all that there is.
            if pair.startswith(("S(0)R", "S(1)R", "RS(0)", "RS(1)")) and "S" not in pair.partition("->")[2]:
                assert record["counters"]["num_collectives"] == (0 if RELEASE >= (2, 14) else 1), (pair, planner)


def from_shard_to_partial(pair: str) -> bool:
    source, target = (parse_state(text, 3) for text in pair.split("->"))
    sharded = {mesh_dim for order in source.orders for mesh_dim in order}
    return bool(sharded & {mesh_dim for mesh_dim, _ in target.partials})


@pytest.mark.long
def test_all_else_that_torch_does_is_right(rows: Rows) -> None:
    for (suite, pair), by_planner in rows.items():
        if suite in ("pairs", "shard_orders", "uneven", "backward"):
            assert {record["status"] for record in by_planner.values()} == {"ok"}, (suite, pair)


@pytest.mark.long
def test_a_shard_order_is_really_asked_for(rows: Rows) -> None:
    """torch's own path begins and ends in the orders of the pair; it numbers default orders too."""
    for (suite, pair), by_planner in rows.items():
        if suite == "shard_orders":
            ends, path = pair.partition(" ")[0].split("->"), by_planner["greedy"]["counters"]["path"].split("->")
            wanted, result = ([parse_state(text, 3) for text in texts] for texts in (ends, (path[0], path[-1])))
            assert result == wanted, (pair, path)


@pytest.mark.long
def test_backward_moves_the_gradient_from_the_target_to_the_source(rows: Rows) -> None:
    for (suite, pair), by_planner in rows.items():
        if suite == "backward":
            source, _, target = pair.partition(" ")[0].partition("->")
            path = by_planner["min_cost"]["counters"]["path"]
            assert path.startswith(target) and path.endswith(source.replace("P(sum)", "R")), (pair, path)


def job_here(**more: Any) -> Any:
    (job,) = jobs_of(Request(targets=("redistribute_lab",), device="cpu", started_at=time.time(), **more), None)
    return job


@pytest.mark.long
def test_the_profile_of_this_folder_is_used_only_where_it_fits(
    known_host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert job_here().profile is None and "this folder has no profile.json" in job_here().note
    profile_of().save(tmp_path / "profile.json")
    assert job_here().profile == str(tmp_path / "profile.json")
    assert "use ./profile.json" in job_here().note
    for misfit in ({"mesh": {"dp_shard": 2, "tp": 4}}, {"mesh": {"cp": 2}}):
        assert job_here(**misfit).profile is None
        assert "is not valid for the run" in (message := job_here(**misfit).note) and "\n" not in message
    (tmp_path / "profile.json").write_text("{")
    assert job_here().profile is None and "distbench calibrate" in job_here().note
    profile_of().save(tmp_path / "other.json")
    assert job_here(profile=tmp_path / "other.json").profile == str(tmp_path / "other.json")
    assert job_here(profile=tmp_path / "other.json").note == "", "a profile that was asked for goes without saying"


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_run_tells_the_note_once(
    known_host: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    lines: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("distbench.cli.run.run_all", lambda jobs, joined, silent, prints_first: 0)
    environment = {"RANK": rank, "WORLD_SIZE": "4"}
    done = CliRunner().invoke(main, ["run", "redistribute_lab", "--device", "cpu"], env=environment)
    assert done.exit_code == 0
    assert done.stderr.count("redistribute_lab: no profile was given, and this folder has no profile.json") == lines
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("target", "mesh"), [("redistribute_lab", {"cp": 4}), ("calibrate", {"cp": 4})])
def test_a_mesh_that_is_itself_measured_has_the_dims_asked_for_and_no_others(
    known_host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, mesh: dict[str, int]
) -> None:
    monkeypatch.chdir(tmp_path)
    (job,) = jobs_of(Request(targets=(target,), mesh=mesh, device="cpu", started_at=time.time()), None)
    assert job.mesh == mesh


def test_other_scenarios_do_not_look_for_a_profile(
    known_host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile_of().save(tmp_path / "profile.json")
    (job,) = jobs_of(Request(targets=("redistribute",), device="cpu", started_at=time.time()), None)
    assert job.profile is None and job.note == ""
