"""`distbench.watch`: own work by hand, error rates of simulated loops, and gloo ranks of which one sleeps."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import ROOT
from processes import Ranks

import distbench
from distbench.cli.main import main
from distbench.judge.late_ranks import LatenessVerdict, judge_arrivals
from distbench.loop_watch import Sample, TimedCall, arrivals_of, own_work
from distbench.torch_private import fake_ranks

ALL, TP = (0, 1, 2, 3), (0, 1)


def test_own_work_leaves_out_the_time_in_collectives_and_adds_the_end_of_the_step_to_the_first() -> None:
    calls = [TimedCall(TP, 2.0, 5.0), TimedCall(ALL, 6.0, 9.0), TimedCall((), 9.5, 11.0), TimedCall(TP, 11.25, 12.0)]
    assert own_work(calls, 1.0, 14.0) == {TP: 1.0 + 0.25 + 2.0, ALL: 1.0}
    assert own_work([], 0.0, 1.0) == {}


def test_buckets_of_ddp_overlap_with_own_work_and_are_waited_for_after_backward() -> None:
    buckets = [TimedCall(ALL, 2.0, 3.0, overlaps=True), TimedCall(ALL, 5.0, 8.0, overlaps=True)]
    assert own_work(buckets, 0.0, 9.0) == {ALL: 2.0 + 3.0 + 1.0}
    clipping = TimedCall(ALL, 8.5, 8.75)
    assert own_work([*buckets, clipping], 0.0, 9.0) == {ALL: 2.0 + 3.0 + 0.5 + 0.25}
    assert own_work([TimedCall(ALL, 1.0, None)], 0.0, 3.0) == {ALL: 1.0 + 2.0}  # the end was not seen


def simulated(late_s: Callable[[int, str, int], float], seed: int, num_steps: int = 20) -> LatenessVerdict:
    """The verdict on 2 x 2 ranks that reduce over tp, then over dp, per step; `late_s(rank, mesh dim, step)`."""
    draw = np.random.default_rng(seed)
    groups = {"tp": [(0, 1), (2, 3)], "dp": [(0, 2), (1, 3)]}
    now, samples = [0.0] * 4, []
    for step in range(num_steps):
        starts, calls = list(now), [[] for _ in ALL]
        for dim in ("tp", "dp", "tp"):
            for rank in ALL:
                now[rank] += draw.lognormal(np.log(0.03), 0.15) + late_s(rank, dim, step)
            for ranks in groups[dim]:
                end = max(now[rank] for rank in ranks) + 0.001
                for rank in ranks:
                    calls[rank].append(TimedCall(ranks, now[rank], end))
                    now[rank] = end
        names = {ranks: dim for dim, of_dim in groups.items() for ranks in of_dim}
        samples.append(
            {
                rank: Sample.of(
                    Sample(
                        now[rank] - starts[rank],
                        {
                            ranks: (names[ranks], work)
                            for ranks, work in own_work(calls[rank], starts[rank], now[rank]).items()
                        },
                    ).to_text()
                )
                for rank in ALL
            }
        )
    return judge_arrivals(arrivals_of(samples, ["a"] * 4), "sampled steps", "")


def test_on_a_mesh_the_late_ranks_are_named_and_not_the_ranks_that_waited_for_them() -> None:
    for seed in range(40):
        verdict = simulated(lambda rank, dim, _: 0.06 * ((rank, dim) in {(1, "tp"), (2, "dp")}), seed)
        assert {(late.rank, late.group) for late in verdict.late} == {("rank 1", "tp 0-1"), ("rank 2", "dp 0,2")}


@pytest.mark.long
def test_without_a_late_rank_at_most_one_simulated_launch_in_twenty_names_one() -> None:
    assert sum(bool(simulated(lambda *_: 0.0, seed).late) for seed in range(200)) <= 10


@pytest.fixture
def fake_group() -> Any:
    with fake_ranks({"dp": 4}) as mesh:
        yield mesh


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "100"])
def test_a_wrong_every_is_refused(fake_group: Any, every: Any) -> None:
    refused = pytest.raises(distbench.UserError, match=r"is not valid; give a positive integer such as every=100")
    with refused, distbench.watch(every):
        pass


def test_without_a_process_group_it_is_refused() -> None:
    with pytest.raises(distbench.UserError, match="needs a process group"), distbench.watch():
        pass


def test_on_a_fake_group_it_is_refused(fake_group: Any) -> None:
    with pytest.raises(distbench.UserError, match="not a fake process group"):
        distbench.watch()


def test_on_an_accelerator_the_files_are_recommended(fake_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    refused = pytest.raises(distbench.UserError, match=r"nccl runs them on cuda devices; .* `distbench watch FILE")
    with refused, distbench.watch():
        pass


@pytest.fixture(scope="module")
def watched(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("watched") / "found.json"
    done = ranks.torchrun(4, ROOT / "tests" / "ranks" / "watched_loops.py", out)
    assert done.returncode == 0, done.stderr
    return {**json.loads(out.read_text()), "folder": out.parent}


def named(watched: Any, name: str) -> set[tuple[str, str]]:
    return {(rank, group) for rank, group, *_ in watched[name]["late"]}


@pytest.mark.long
def test_the_sleeping_rank_is_named_while_the_loop_runs_and_at_its_end(watched: Any) -> None:
    assert named(watched, "sleeper") == {("rank 2", "0-3")}
    ((*_, late_s),) = watched["sleeper"]["late"]
    assert 0.03 < late_s < 0.3
    first, *_ = watched["sleeper"]["printed"].splitlines()
    assert re.match(r"watch: step (16|18|20|22): FAIL: rank 2 \(host ", first)  # when the others have sent 8 samples


@pytest.mark.long
def test_late_ranks_of_two_mesh_dims_are_named_and_their_partners_are_not(watched: Any) -> None:
    assert named(watched, "2-D") == {("rank 1", "tp 0-1"), ("rank 2", "dp 0,2")}


@pytest.mark.long
def test_work_after_the_last_collective_of_ddp_makes_a_rank_late(watched: Any) -> None:
    assert named(watched, "ddp") == {("rank 2", "0-3")}


@pytest.mark.long
def test_an_exception_on_a_rank_ends_its_watch_and_no_rank_waits(watched: Any) -> None:
    assert "watch: FAIL: rank 1" in watched["raised"]["printed"] and watched["raised"]["took_s"] < 8


@pytest.mark.long
def test_rank_0_does_not_wait_long_for_a_rank_that_stays_in_the_block(watched: Any) -> None:
    assert named(watched, "leaves late") == {("rank 1", "0-3")} and watched["leaves late"]["took_s"] < 5


@pytest.mark.long
def test_a_model_that_outlives_its_process_group_ends_without_a_deadlock(ranks: Ranks) -> None:
    done = ranks.torchrun(2, ROOT / "tests" / "ranks" / "late_stamps.py")
    assert (done.returncode, done.stdout.count("ended")) == (0, 2), done.stderr


@pytest.mark.long
def test_ranks_that_step_less_often_are_compared_over_the_common_steps(watched: Any) -> None:
    ((*_, num_samples, _),) = watched["uneven"]["late"]
    assert named(watched, "uneven") == {("rank 0", "0-3")} and num_samples == 7


@pytest.mark.long
def test_a_step_after_the_block_is_refused(watched: Any) -> None:
    assert watched["after"].startswith("watch.step() was called outside of its `with distbench.watch(...)` block")


@pytest.mark.long
def test_too_few_steps_are_unknown(watched: Any) -> None:
    assert "UNKNOWN: 2 sampled steps of group 0-3 are too few; 4 are needed" in watched["few"]["printed"]
    assert "UNKNOWN: no group of ranks has sampled steps." in watched["no step"]["printed"]


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.long
def test_the_command_names_the_late_rank_of_real_dumps_of_flight_recorder(watched: Any, form: str) -> None:
    done = CliRunner().invoke(main, ["watch", str(watched["folder"] / form), "--ranks-per-host", "4", "--json"])
    assert done.exit_code == 1, done.output
    late = {(each["rank"], each["group"]): each["late_s"] for each in json.loads(done.output)["late"]}
    assert 0.005 < late["rank 3", "recorded 0-3"] < 0.05
    unknown = CliRunner().invoke(main, ["watch", str(watched["folder"] / form)])
    assert unknown.exit_code == 3 and "the files have no hosts, whose clocks differ" in unknown.output
    quiet = CliRunner().invoke(main, ["watch", str(watched["folder"] / form), "-q"])
    assert (quiet.exit_code, quiet.output) == (3, "")
