"""`distbench plan` as plain data: prices worked by hand, advice, diagrams, errors. torch's answers are given here."""

import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch.distributed.tensor import DTensor, Shard

import distbench
from distbench.planning import recommendation, redistribution_plans
from distbench.planning import recommendation_text as advice_module
from distbench.planning.cost_profile import Line, load_profile
from distbench.planning.direct_exchange import plan_exchange
from distbench.planning.layout_drawing import check_picture, diagram_of, drawing_of
from distbench.planning.placement_states import NotHandled
from distbench.planning.recommendation import Advice, advise, chosen_pairs, ranking_of, times_longer, verdict
from distbench.planning.recommendation_text import pair_text, ranking_text
from distbench.planning.redistribution_plans import Setting, plan_redistribution
from distbench.planning.redistribution_request import TorchAnswers, TorchPath, every_pair, pair_of, setting_of
from distbench.spec.errors import UserError
from distbench.spec.placements import PLANNERS
from distbench.torch_private import fake_mesh

MIB = 2**20
H100, A100 = (ROOT / "profiles" / f"{name}_8x_ib.json" for name in ("h100", "a100"))


def answers(greedy: str, min_cost: str | None = None) -> TorchAnswers:
    return TorchAnswers("2.x", {"greedy": (TorchPath(greedy),), "min_cost": (TorchPath(min_cost or greedy),)})


def advice_of(setting: Setting, source: str, target: str, torch: TorchAnswers) -> Advice:
    return advise(setting, *pair_of(source, target, setting), torch)


SWAP = answers("S(0)S(1)->S(0)R->S(1)R->S(1)S(0)", "S(0)S(1)->RS(1)->RS(0)->S(1)S(0)")


def test_a_swap_on_2x4_has_the_bytes_and_times_worked_by_hand() -> None:
    """32 MiB. greedy gathers 16 MiB over m1, swaps halves of 16 MiB over m0; every host has 1 device."""
    setting = setting_of("4096,4096", "bf16", "2x4")
    advice = advice_of(setting, "S(0)S(1)", "S(1)S(0)", SWAP)
    greedy, direct = advice.plans["greedy"], advice.plans["direct"]
    assert [step.sent_bytes for step in greedy.steps] == [12 * MIB, 8 * MIB, 0]
    assert [step.held_bytes for step in greedy.steps] == [20 * MIB, 32 * MIB, 20 * MIB]
    gib_per_s = 87.7 * 0.22
    gather_s = (6.6 + 3 * 2.7) * 1e-6 + 16 / 1024 * 3 / 4 / gib_per_s
    swap_s = (6.6 + 2.7 + 1.0) * 1e-6 + 16 / 1024 / 2 / gib_per_s
    assert [step.seconds for step in greedy.steps] == pytest.approx([gather_s, swap_s, 0])
    # Rank (0, 2) has columns 2048 to 3071 and wants columns 0 to 2047: all its 4 MiB are lacking.
    assert advice.least_bytes == direct.received_bytes == 4 * MIB
    assert advice.received_ratio(greedy) == 5.0 and advice.received_ratio(direct) == 1.0
    assert direct.peak_bytes == 8 * MIB and direct.num_collectives == 1
    assert advice.use is direct


def test_a_profile_prices_steps_and_the_direct_exchange_by_its_lines() -> None:
    """128 MiB on 2 nodes of 4: a rank gets 8 MiB from the other node, 6 MiB within its own; one side cuts columns."""
    setting = setting_of("8192,8192", "bf16", "2x4", H100)
    assert dict(setting.mesh) == {"dp_shard": 2, "tp": 4} and setting.devices_per_host == 8
    advice = advice_of(setting, "S(0)S(0)", "S(1)S(1)", answers("S(0)S(0)->S(0)R->S(1)R->S(1)S(1)"))
    gather_s = 10.5e-6 + 64 * MIB * 3 / 4 / 370e9
    copy_s_per_byte = 2 / 3.35e12
    swap_s = 19e-6 + 64 * MIB * (1 / 2 / 47e9 + copy_s_per_byte)
    greedy = advice.plans["greedy"]
    assert [step.seconds for step in greedy.steps] == pytest.approx([gather_s, swap_s, 0], rel=1e-3)
    between_s = 19e-6 + 8 * MIB / 47e9 + 16 * MIB * copy_s_per_byte
    within_s = 10.5e-6 + 6 * MIB / 370e9 + 8 * MIB * copy_s_per_byte
    direct = advice.plans["direct"]
    assert direct.seconds == pytest.approx(between_s + within_s, rel=1e-3)
    assert direct.error == pytest.approx(0.25) and greedy.error == pytest.approx(0.25)


def test_a_profile_with_a_line_for_the_exchange_prices_it_by_that(tmp_path: Path) -> None:
    """6 MiB within the node and 8 MiB from the other one: 14 MiB both ways, 16 MiB of target written."""
    profile = load_profile(H100)
    line = Line("direct", "dp_shardxtp", 8, 1e-5, 1e-11, 1e-12, error=0.1)
    replace(profile, lines=(*profile.lines, line)).save(tmp_path / "profile.json")
    setting = setting_of("8192,8192", "bf16", "2x4", tmp_path / "profile.json")
    path = answers("S(0)S(0)->S(0)R->S(1)R->S(1)S(1)")
    advice = advice_of(setting, "S(0)S(0)", "S(1)S(1)", path)
    direct = advice.plans["direct"]
    assert direct.seconds == pytest.approx(1e-5 + 14 * MIB * 1e-11 + 16 * MIB * 1e-12)
    assert direct.error == pytest.approx(0.1)
    assert "an estimate" not in " ".join(pair_text(setting, advice, path, "").split())


@pytest.mark.parametrize(("path", "busbw", "all_reduce_8", "nic"), [(H100, 370, 480, 47), (A100, 230, 230, 24)])
def test_the_shipped_profiles_are_the_published_bus_bandwidths(
    path: Path, busbw: float, all_reduce_8: float, nic: float
) -> None:
    profile = load_profile(path)
    assert len(profile.lines) == 24 and profile.backend == "nccl"
    for line in profile.lines:
        size, per_byte = line.group_size, line.per_byte_s
        factor = (size - 1) / size * (2 if line.op == "all_reduce" else 1)
        within = all_reduce_8 if line.op == "all_reduce" and size == 8 else busbw
        assert factor / per_byte / 1e9 == pytest.approx(nic if line.mesh_dim == "dp_shard" else within, rel=1e-3)
    for cited in ("https://github.com/NVIDIA/nccl-tests/issues/150", "SOURCES", "DERIVED", "NOT MEASURED"):
        assert cited in profile.source


def test_a_partial_source_goes_direct_at_once_or_after_a_reduce_scatter() -> None:
    setting = setting_of("16,16", "f32", "2x4")
    advice = advice_of(setting, "P(sum)S(1)", "S(0)S(1)", answers("P(sum)S(1)->S(0)S(1)"))
    direct = advice.plans["direct"]
    # A rank lacks the other part of its 8 x 4 elements of 4 bytes.
    assert (direct.path, direct.received_bytes, direct.num_collectives) == ("P(sum)S(1)->S(0)S(1)", 128, 1)
    assert advice.least_bytes is None and advice.plans["calibrated"].path == "P(sum)S(1)->S(0)S(1)"
    setting = setting_of("4096,4096", "f32", "2x4")
    direct = advice_of(setting, "RP(sum)", "RR", answers("RP(sum)->RR")).plans["direct"]
    # Each rank sums an eighth, of which it has one part of four, and receives the seven others: less than twice three
    # quarters, as where both replicas of a part sum the same.
    assert direct.num_collectives == 2 and direct.received_bytes == (3 + 7) * 4096 * 4096 * 4 // 8
    assert direct.path in ("RP(sum)->S(0)[1]S(0)[0]->RR", "RP(sum)->S(1)[1]S(1)[0]->RR")


def test_a_shard_that_becomes_partial_is_filled_up_with_zeros(tmp_path: Path) -> None:
    """A rank holds 1024 of 2048 rows of 4 KiB, then zeros for all rows, then their sum: 4 + 8 + 8 MiB."""
    setting = setting_of("2048,1024", "f32", "2x4")
    advice = advice_of(setting, "S(0)R", "P(sum)R", answers("S(0)R->P(sum)R"))
    for planner in ("greedy", "min_cost", "calibrated"):
        plan = advice.plans[planner]
        assert [(step.text, step.seconds, step.held_bytes) for step in plan.steps] == [("local zero_fill", 0, 20 * MIB)]
    assert "Partial" in advice.missing["direct"] and advice.least_bytes is None
    lines = (*load_profile(H100).lines, Line("zero_fill", "dp_shard", 2, 1e-5, 2e-10, 3e-10, error=0.1))
    replace(load_profile(H100), lines=lines).save(tmp_path / "profile.json")
    setting = setting_of("2048,1024", "f32", "2x4", tmp_path / "profile.json")
    # The second tensor dim's elements do not lie together.
    for source, per_byte_s in (("S(0)R", 2e-10), ("S(1)R", 5e-10)):
        plan = advice_of(setting, source, "P(sum)R", answers(f"{source}->P(sum)R")).plans["greedy"]
        assert plan.seconds == pytest.approx(1e-5 + 8 * MIB * per_byte_s) and plan.error == pytest.approx(0.1)


def test_with_a_torch_that_fills_no_shards_none_of_our_paths_does() -> None:
    setting = setting_of("2048,1024", "f32", "2x4")
    old = replace(answers("P(sum)S(0)->P(sum)R"), no_zero_fill="needs a newer torch")
    for answered, path in ((old, "P(sum)S(0)->P(sum)R"), (answers("P(sum)S(0)->P(sum)R"), "P(sum)S(0)->S(1)S(0)->")):
        plan = advice_of(setting, "P(sum)S(0)", "P(sum)R", answered).plans["calibrated"]
        assert plan.path.startswith(path), plan.path


def test_without_torch_its_rows_say_why_and_the_rest_stands() -> None:
    setting = setting_of("16,16", "f32", "2x4")
    none = TorchAnswers(None, dict.fromkeys(("greedy", "min_cost"), (TorchPath(None, "torch moved"),)))
    advice = advice_of(setting, "S(0)R", "RS(0)", none)
    assert dict(advice.missing) == {"greedy": "torch moved", "min_cost": "torch moved"}
    assert set(advice.plans) == {"calibrated", "direct"}
    assert "the shortest of all plans" in verdict(setting, advice)


def test_a_planner_that_only_ranks_can_try_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recommendation, advice_module):
        monkeypatch.setattr(module, "PLANNERS", (*PLANNERS, "replicate"))
    setting, torch = setting_of("8,8", "bf16", "2x2"), answers("RR->S(0)R")
    advice = advice_of(setting, "RR", "S(0)R", torch)
    assert list(advice.plans) == list(PLANNERS)
    (row,) = (line for line in pair_text(setting, advice, torch, "").splitlines() if line.startswith("replicate"))
    assert row.endswith("not priced without ranks")


def test_a_path_with_an_unknown_step_is_shown_but_not_priced() -> None:
    setting = setting_of("16,16", "f32", "2x4")
    advice = advice_of(setting, "S(0)S(0)", "RS(1)", answers("S(0)S(0)->RS(1)"))
    assert advice.missing["greedy"].startswith("uses S(0)S(0)->RS(1), which has no price")


def test_equal_plans_go_to_the_simplest_and_close_ones_come_with_a_doubt() -> None:
    setting = setting_of("1024,1024", "bf16", "2x8", H100)
    same = advice_of(setting, "RS(0)", "RR", answers("RS(0)->RR"))
    assert same.use.planner == "greedy" and "more than 10 % faster" in verdict(setting, same)
    nothing = advice_of(setting, "RS(0)", "RS(0)", answers("RS(0)"))
    assert verdict(setting, nothing).startswith("Nothing to do")
    local = advice_of(setting, "RR", "RS(0)", answers("RR->RS(0)"))
    assert local.use.planner == "greedy" and "without communication" in verdict(setting, local)
    # 1 MiB: a gather of 10.5 + 2.5 us against an all_to_all of 10.5 + 0.4 us.
    small = setting_of("512,1024", "bf16", "2x8", H100)
    close = advice_of(small, "RS(0)", "RS(1)", answers("RS(0)->RR->RS(1)", "RS(0)->RS(1)"))
    ratio = close.plans["min_cost"].seconds / close.plans["greedy"].seconds
    assert 0.75 < ratio < 0.98 and "measure both" in verdict(small, close)


def test_the_text_diagram_shows_blocks_replicas_and_parts_of_sums() -> None:
    setting = setting_of("8,8", "f32", "2x2")
    advice = advice_of(setting, "P(sum)S(1)", "RS(0)", answers("P(sum)S(1)->RS(1)->RR->RS(0)"))
    drawing = drawing_of(setting, advice.plans["greedy"], 16)
    assert not isinstance(drawing, str)
    expected = """
P(sum)S(1)                   RS(1)
+-----+-----+  all_reduce    +-----+-----+
| 0+2 | 1+3 |  --------->    | 0 2 | 1 3 |
+-----+-----+   over m0      +-----+-----+
"""
    text = diagram_of(drawing)
    lines = [line.split() for line in text.splitlines()]
    for line in expected.strip().splitlines():
        assert any(result[: len(line.split())] == line.split() for result in lines), line
    assert "| 0-3 |" in text and "local cut" in text
    assert max(map(len, text.splitlines())) <= 120


def test_uneven_and_empty_shards_are_drawn_as_they_lie() -> None:
    """5 rows over 2 x 3: rows 0 to 2 and 3 to 4, each in single rows; rank 5 holds nothing."""
    setting = setting_of("5,4", "f32", "2x3")
    advice = advice_of(setting, "S(0)S(0)", "RS(0)", answers("S(0)S(0)->S(0)R->RR->RS(0)"))
    drawing = drawing_of(setting, advice.plans["greedy"], 16)
    assert not isinstance(drawing, str)
    rows = [box[0] for box in drawing.scenes[0].boxes]
    assert rows == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 5)]


@pytest.mark.parametrize(
    ("shape", "mesh", "source", "target", "message"),
    [
        ("8,8,8", "2x2x2", "S(0)S(1)S(2)", "RRR", "shards 3 tensor dims"),
        ("64,64", "8x8", "S(0)R", "RR", "64 ranks, but at most 16 fit"),
    ],
)
def test_what_does_not_fit_is_said_to_be_left_out(
    shape: str, mesh: str, source: str, target: str, message: str
) -> None:
    setting = setting_of(shape, "f32", mesh)
    plan = advice_of(setting, source, target, answers(source)).plans["calibrated"]
    assert message in str(drawing_of(setting, plan, 16))


def test_a_whole_tensor_dim_of_three_is_left_out_by_name() -> None:
    setting = setting_of("8,8,8", "f32", "2x2")
    plan = advice_of(setting, "RS(2)", "S(1)R", answers("RS(2)")).plans["calibrated"]
    drawing = drawing_of(setting, plan, 16)
    assert not isinstance(drawing, str) and drawing.dims == (1, 2) and drawing.left_out == (0,)


def test_all_pairs_are_counted_sorted_and_capped() -> None:
    """On 2x2 with one tensor dim: 3 x 3 sources of R, S, P and 2 x 2 targets of R, S, less the 4 equal ones."""
    setting = setting_of("64", "f32", "2x2")
    pairs = list(every_pair(setting))
    assert len(pairs) == 3**2 * 2**2 - 2**2 and chosen_pairs(setting, pairs) == pairs
    far = setting_of("4096,4096", "f32", "3x3")
    pairs = list(every_pair(far))
    silent = TorchAnswers(None, dict.fromkeys(("greedy", "min_cost"), (TorchPath(None, "not here"),) * len(pairs)))
    ranking = ranking_of(far, pairs, silent)
    text = ranking_text(far, ranking, silent)
    assert len(pairs) == 135 and "... 95 more rows: --format json" in text and "135 pairs have no path" in text
    assert max(map(len, text.splitlines())) <= 120
    gathered = TorchAnswers("2.x", dict.fromkeys(("greedy", "min_cost"), tuple(_by_gathering(*pair) for pair in pairs)))
    longer = [times_longer(advice) for advice in ranking_of(far, pairs, gathered).advices]
    assert longer == sorted(longer, reverse=True) and longer[0] > longer[-1] >= 1


@pytest.mark.parametrize("planner", ["min_cost", "calibrated", "direct"])
def test_what_a_recommendation_says_to_write_runs(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user would paste it, on a fake process group; nothing of ours is imported past `distbench` itself."""
    setting = setting_of("8,4", "f32", "2x2")
    advice = advice_of(setting, "S(0)S(1)", "S(1)S(0)", SWAP)
    monkeypatch.setattr(recommendation, "how", partial(_how_with, recommendation.how, planner))
    text = verdict(replace(setting, profile_path=H100), advice).partition(". How: ")[2].removesuffix(".")
    text = text.replace("redistribute.execute(", "result = redistribute.execute(")
    code = f"{text}:\n    result = x.redistribute(mesh, after).to_local()" if text.startswith("with ") else text
    assert not re.search(r"distbench\.\w+\.", code)
    with fake_mesh((2, 2), 1) as mesh:
        x = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0), Shard(1)])
        names = {"x": x, "mesh": mesh, "after": [Shard(1), Shard(0)], "distbench": distbench, "torch": torch}
        exec(code, names)
    assert tuple(names["result"].shape) == (4, 2)  # type: ignore[attr-defined]


def _how_with(how: Callable[[Setting, Advice], str], planner: str, setting: Setting, advice: Advice) -> str:
    return how(setting, replace(advice, plans={planner: advice.plans[planner]}))


@pytest.mark.long
def test_a_large_mesh_takes_milliseconds_a_pair() -> None:
    """64 ranks: 147 ms of CPU time a pair as long as each transfer was an object of its own, 4 ms since."""
    setting = setting_of("1024,1024,1024", "bf16", "4x4x4")
    pairs = chosen_pairs(setting, list(every_pair(setting)))
    assert len(pairs) == 976
    silent = TorchAnswers(None, dict.fromkeys(("greedy", "min_cost"), (TorchPath(None, "not here"),) * 60))
    before = time.process_time()
    assert len(ranking_of(setting, pairs[:60], silent).advices) == 60
    assert time.process_time() - before < 2.4, "40 ms a pair"


def test_what_crosses_a_mesh_dim_is_counted_at_the_outermost_that_differs() -> None:
    """Expected: transfer by transfer."""
    setting = setting_of("30,7", "f32", "2x3x2")
    for source, target in random.Random(3).sample(list(every_pair(setting)), 40):
        exchange = plan_exchange(source, target, setting.problem.shape, setting.problem.mesh_shape)
        most = dict.fromkeys(range(3), 0)
        for mesh_dim in most:
            ends: Counter[tuple[str, int]] = Counter()
            for one in exchange.transfers:
                cells = (np.unravel_index(rank, (2, 3, 2)) for rank in (one.sender, one.receiver))
                if [a == b for a, b in zip(*cells, strict=True)].index(False) == mesh_dim:
                    size = 4 * math.prod(stop - start for start, stop in one.box)
                    ends.update({("out", one.sender): size, ("in", one.receiver): size})
            most[mesh_dim] = max(ends.values(), default=0)
        assert redistribution_plans._crossing_bytes(setting, exchange) == list(most.values())


def _by_gathering(source: object, target: object) -> TorchPath:
    """Through RR and nothing else, innermost mesh dim first."""
    first, second = _halves(str(source))
    third, fourth = _halves(str(target))
    path = [f"{first}{second}", f"{first}R", "RR", f"{third}R", f"{third}{fourth}"]
    return TorchPath("->".join(state for at, state in enumerate(path) if at == 0 or state != path[at - 1]))


def _halves(text: str) -> tuple[str, str]:
    cut = 1 if text[0] == "R" else text.index(")") + 1
    return text[:cut], text[cut:]


@pytest.mark.parametrize(
    ("shape", "dtype", "mesh", "message"),
    [
        ("4096x4096", "bf16", "2x4", "--shape 4096,4096"),
        ("0,4", "bf16", "2x4", "not a list of sizes above 0"),
        ("4,4", "int3", "2x4", "use f64, f32, bf16, f16"),
        ("4,4", "bf16", "2by4", "--mesh 2x4 or --mesh dp_shard=2,tp=4"),
        ("4,4", "bf16", "dp=2", "'dp' is unknown"),
        (f"{2**60},64", "f64", "2x4", "smaller --shape"),
    ],
)
def test_what_cannot_be_read_says_what_to_write(shape: str, dtype: str, mesh: str, message: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]+$") as raised:
        setting_of(shape, dtype, mesh)
    assert message in str(raised.value)


def test_a_mesh_that_the_profile_does_not_price_is_refused_with_those_it_does() -> None:
    with pytest.raises(UserError, match=r"dp_shard of 2, .*not for all_gather over m0 of 3 .*--mesh dp_shard=2,tp=8"):
        setting_of("4,4", "bf16", "3x4", H100)
    with pytest.raises(UserError, match="cannot be read"):
        setting_of("4,4", "bf16", "2x4", Path("/nowhere.json"))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("S(0)", "RR", "1 placements, but mesh m0=2,m1=4 has 2 mesh dims"),
        ("S(2)R", "RR", "a 2-D tensor lacks"),
        ("X(0)R", "RR", "write R"),
        ("S(0)[1]R", "RR", "number the shards"),
        ("P(norm)R", "RR", "'norm'"),
        ("RR", "P(sum)R", "converts R to P(sum)"),
        ("S(0)R", "P(max)R", "converts S(0) to P(max)"),
        ("P(avg)S(0)", "P(sum)S(0)", "converts P(avg) to P(sum)"),
        ("P(sum)P(max)", "RR", "mixes the reduce ops max, sum"),
    ],
)
def test_layouts_that_are_none_are_refused_with_what_to_write(source: str, target: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        pair_of(source, target, setting_of("4,4", "bf16", "2x4"))
    assert message in str(raised.value)


def test_a_planner_without_a_plan_here_does_not_get_the_plan_of_another() -> None:
    setting = setting_of("4,4", "f32", "2x4")
    with pytest.raises(NotHandled, match="replicate plans on ranks only"):
        plan_redistribution(setting, *pair_of("S(0)R", "RR", setting), "replicate")


def test_a_picture_that_cannot_be_written_is_refused_before_planning(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"give a \.png or \.svg file"):
        check_picture(tmp_path / "path.gif")
    with pytest.raises(UserError, match=r"does not exist|is not a folder"):
        check_picture(tmp_path / "none" / "path.png")
