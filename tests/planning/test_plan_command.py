"""`distbench plan` end to end: torch's own paths from its child process, pictures, profiles, exit codes. No ranks."""

import contextlib
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, Cli
from processes import Children

from distbench.planning.recommendation import ranking_of
from distbench.planning.redistribution_request import ask_torch, every_pair, pair_of, setting_of

PAIRS = (
    ("S(0)S(1)", "S(1)S(0)"),
    ("S(0)S(0)", "S(1)S(1)"),
    ("P(sum)S(1)", "S(1)S(0)"),
    ("P(avg)P(sum)", "RS(1)"),
    ("S(0)[1]S(0)[0]", "S(1)R"),
    ("RS(0)", "S(0)[1]S(0)[0]"),
)
SWAP = ("S(0)S(1)", "S(1)S(0)", "--shape", "4096,4096")


def test_the_child_gives_the_paths_that_torch_itself_plans(forked_children: None) -> None:
    """Expected: torch's planner called by argument, past every cache, on specs made here."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
    from torch.testing._internal.distributed.fake_pg import FakeStore

    setting = setting_of("4096,4096", "bf16", "2x4")
    answers = ask_torch(setting, [pair_of(*pair, setting) for pair in PAIRS])
    assert answers.torch == torch.__version__
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (2, 4))
        meta = TensorMeta(torch.Size((4096, 4096)), (4096, 1), torch.bfloat16)
        backwards: Any = (ShardOrderEntry(0, (1, 0)),)
        s0, s1, r = Shard(0), Shard(1), Replicate()
        layouts = {
            "S(0)S(1)": (s0, s1), "S(1)S(0)": (s1, s0), "S(0)S(0)": (s0, s0), "S(1)S(1)": (s1, s1),
            "P(sum)S(1)": (Partial(), s1), "P(avg)P(sum)": (Partial("avg"), Partial()), "RS(1)": (r, s1),
            "S(0)[1]S(0)[0]": (s0, s0), "S(1)R": (s1, r), "RS(0)": (r, s0),
        }  # fmt: skip
        for number, pair in enumerate(PAIRS):
            specs: list[Any] = [
                DTensorSpec(mesh, layouts[text], tensor_meta=meta, shard_order=backwards if "[" in text else None)
                for text in pair
            ]
            for name in ("greedy", "min_cost"):
                infos = _redistribute._gen_transform_infos_non_cached(*specs, name == "min_cost")
                wanted = _redistribute.DTensorRedistributePlanner.stringify_transform_infos(
                    mesh, infos, specs[0].placements, specs[0].shard_order
                )
                assert answers.paths[name][number].path == wanted, f"{name} {pair}"
    finally:
        dist.destroy_process_group()


def test_a_shard_to_partial_is_planned_by_all_or_says_which_torch_it_needs(cli: Cli) -> None:
    """Expected of torch itself: 2.14 is the first whose `DTensor.redistribute` takes it."""
    done = cli("redistribute", "S(0)S(1)", "P(sum)S(1)", "--shape", "64,64", "--mesh", "2x4", "--format", "json")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
        assert f"needs torch 2.14 or newer, but this is {torch.__version__}" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)["plans"]
    assert {planner: plan["path"].count("->") for planner, plan in plans.items()} == dict.fromkeys(
        ("greedy", "min_cost", "calibrated"), 1
    )
    assert {step["op"] for plan in plans.values() for step in plan["steps"]} == {"zero_fill"}


@pytest.mark.parametrize("devices_per_host", [1, 4])
def test_min_cost_costs_what_ours_does_under_torchs_constants(forked_children: None, devices_per_host: int) -> None:
    """Two planners that share no code, over all pairs of a mesh; with hosts of 4, m1 stays inside a host."""
    setting = setting_of("512,96", "f32", "2x4", devices_per_host=devices_per_host)
    pairs = list(every_pair(setting))
    ranking = ranking_of(setting, pairs, ask_torch(setting, pairs))
    assert len(ranking.advices) == 4**2 * 3**2 - 3**2 and ranking.num_unasked == 0
    for advice in ranking.advices:
        ours, torchs, default = (advice.plans[name].seconds for name in ("calibrated", "min_cost", "greedy"))
        assert ours == pytest.approx(torchs, rel=1e-9) and ours <= default * (1 + 1e-9), str(advice.source)


def test_where_torch_cannot_be_imported_the_rest_still_prints(children: Children, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no torch here')")
    command = ("-m", "distbench", "redistribute", *SWAP, "--mesh", "2x4")
    done = children.python(*command, variables={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no torch here") == 2
    assert "Use direct: predicted 330 us" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


@pytest.mark.parametrize("profile", ["h100_8x_ib.json", "a100_8x_ib.json"])
def test_a_shipped_profile_plans_prints_and_draws(cli: Cli, tmp_path: Path, profile: str) -> None:
    picture = tmp_path / ("path.png" if profile.startswith("h") else "path.svg")
    done = cli("redistribute", *SWAP, "--mesh", "2x4", "--profile", f"profiles/{profile}", "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    for message in ("dp_shard=2,tp=4", profile, "+-25 %", "<- use", "\nUse ", "| 0 | 1 | 2 | 3 |", "Picture: "):
        assert message in done.stdout, message
    assert max(map(len, done.stdout.splitlines())) <= 120
    if picture.suffix == ".png":
        assert picture.read_bytes().startswith(b"\x89PNG")
    else:
        drawn = picture.read_text()
        assert all(message in drawn for message in ("all_gather over tp", "all_to_all over dp_shard", "S(1)S(0)"))


def test_all_pairs_as_json_are_whole(cli: Cli) -> None:
    done = cli("redistribute", "--all-pairs", "--shape", "64,64", "--mesh", "2x2", "--format", "json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["num_all"] == len(record["pairs"]) == 135
    assert sum(record["num_used"].values()) == 135 and record["torch"] == torch.__version__
    assert "135" in done.stderr, "progress"
    times = [[plan["predicted_s"] for plan in pair["plans"].values()] for pair in record["pairs"]]
    longer = [result[0] / min(result) if min(result) else (float("inf") if result[0] else 1.0) for result in times]
    assert all(a >= b for a, b in pairwise(longer))


@pytest.mark.long
def test_torch_works_out_the_steps_out_of_a_layout_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes the same paths. It took 65 ms of CPU time a pair of 4x4x4 when each pair worked them out anew."""
    from torch.distributed.tensor import _redistribute

    from distbench.worker import child_verbs

    states = ["RRR", "S(0)S(1)R", "S(1)RS(0)", "P(sum)S(0)R", "S(0)S(0)S(1)", "RP(avg)S(1)"]
    request = {"mesh_shape": [2, 2, 2], "shape": [8, 8], "dtype": "f32", "devices_per_host": 1, "budget_s": 60.0}
    request["pairs"] = [[a, b] for a in states for b in states if a != b and "P" not in b]
    worked_out: Counter[object] = Counter()
    plain = _redistribute.DTensorRedistributePlanner.get_next_state

    def counted(self: Any, placements: Any, order: Any) -> Any:
        worked_out[placements, order, frozenset(self.partial_reduce_ops_in_target)] += 1
        return plain(self, placements, order)

    monkeypatch.setattr(_redistribute.DTensorRedistributePlanner, "get_next_state", counted)
    kept = child_verbs.plan_paths(request)
    assert set(worked_out.values()) == {1}
    monkeypatch.setattr(child_verbs, "remembered_steps", contextlib.nullcontext)
    assert child_verbs.plan_paths(request) == kept and max(worked_out.values()) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["S(0)", "R", "--shape", "8", "--mesh", "2x2"], "has 1 placements"),
        (["S(0)R", "--shape", "8", "--mesh", "2x2"], "needs two layouts"),
        (["S(0)R", "RR", "--all-pairs", "--shape", "8", "--mesh", "2x2"], "--all-pairs cannot be combined with SOURCE"),
        (["S(0)R", "RR", "--shape", "8", "--mesh", "2x2", "--profile", "/nowhere.json"], "cannot be read"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(cli: Cli, arguments: list[str], message: str) -> None:
    done = cli("redistribute", *arguments)
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.startswith("distbench: ") and len(done.stderr.strip().splitlines()) == 1
