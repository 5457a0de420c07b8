"""Which pairs the laboratory makes, and how it samples them: plain data against counts and layouts by hand."""

import contextlib
import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distbench.cases.redistribution import (
    SUITES,
    class_of,
    cube,
    groups_of,
    laboratory_cases,
    ordered_layouts,
    pairs_of,
    planners_for,
    sample,
    strided,
    undecodable_layouts,
)
from distbench.planning.cost_profile import Profile
from distbench.planning.placement_states import parse_state
from distbench.ranks.context import RankContext
from distbench.ranks.failure import RankFailed
from distbench.redistribute.expected_shards import (
    Layout,
    Pair,
    parse_placement,
    shard_in_order,
    shard_under,
    strided_shard_of,
    torch_placements,
)
from distbench.spec import Laboratory, Scenario, UserError
from distbench.spec.scenario import LABORATORY_SUITES
from distbench.torch_private import OrderedPlacements, OrderedTensor, Unsupported, fake_mesh, plan_path
from distbench.worker.case_runner import Runner

SQUARE, WIDE, CUBE = (2, 2), (2, 4), (2, 2, 2)
PROFILE = Profile("m", "gloo", "2.13", {"dp_shard": 2, "tp": 2}, ())


def pair(text: str, shape: tuple[int, ...]) -> Pair:
    source, target = text.split("->")
    return Pair.of(source, target, shape)


def flat(suite: str, mesh_shape: tuple[int, ...], numel: int = 4096) -> list[Pair]:
    return [result for group in groups_of(suite, mesh_shape, numel) for result in group]


def test_the_suites_of_a_spec_are_those_that_exist() -> None:
    assert tuple(SUITES) == LABORATORY_SUITES


@pytest.mark.parametrize("mesh_shape", [(4,), SQUARE, WIDE, CUBE])
def test_pairs_are_every_source_with_every_other_target(mesh_shape: tuple[int, ...]) -> None:
    # Sources R, P(sum), S(d) and targets R, S(d) a mesh dim; a target without Partial is its own source once.
    mesh_ndim = len(mesh_shape)
    wanted = sum((ndim + 2) ** mesh_ndim * (ndim + 1) ** mesh_ndim - (ndim + 1) ** mesh_ndim for ndim in (1, 2, 3))
    result = flat("pairs", mesh_shape)
    assert len(result) == len({(str(one), one.shape) for one in result}) == wanted


def test_shard_orders_have_one_side_out_of_turn() -> None:
    # 1-D tensor on 2x2: RR, S(0)R, RS(0), S(0)S(0) and S(0)[1]S(0)[0]: the last one with each of the other four.
    ordered = {str(one) for one in flat("shard_orders", SQUARE) if len(one.shape) == 1}
    assert len(ordered) == 8 and all(("S(0)[1]S(0)[0]" in text) for text in ordered)
    # 3-D mesh, 1-D tensor: subsets of k mesh dims in k! orders: 1 + 3 + 6 + 6.
    assert len(list(ordered_layouts(3, 1))) == 16


def test_uneven_pairs_give_ranks_different_shapes_and_some_an_empty_one() -> None:
    result = {(str(one), one.shape) for one in flat("uneven", SQUARE)}
    assert ("S(0)S(0)->RR", (5,)) in result and ("RS(0)->RR", (3,)) in result
    assert ("S(0)R->RR", (1, 5)) in result, "one row on two ranks leaves one of them empty"
    assert ("S(1)R->RR", (65, 65)) in result and not any(shape == (64, 64) for _, shape in result)
    # 9 rows over two ranks are 5 and 4; 3 columns over none are even.
    assert ("P(sum)R->RR", (9, 3)) not in result


def test_what_torch_is_known_to_get_wrong_has_groups_of_its_own() -> None:
    first, *_ = groups_of("flattened", SQUARE, 4096)
    assert [str(one) for one in first] == ["S(0)S(0)->RR", "S(1)S(1)->RR"] and first[0].shape == (5, 3)
    groups = groups_of("partials", SQUARE, 4096)
    to_partial = [group for group in groups if all("P(" in str(one.target) for one in group)]
    assert len(to_partial) == 2 and "S(0)R->P(sum)R" in {str(one) for one in to_partial[0]}
    assert {op for one in flat("partials", SQUARE) for op in ("sum", "avg", "max", "min") if op in str(one.source)} == {
        "sum",
        "avg",
        "max",
        "min",
    }


def test_a_suite_that_a_mesh_is_too_small_for_is_empty() -> None:
    assert groups_of("flattened", (4,), 4096) == [] and groups_of("shard_orders", (4,), 4096) == []


def test_renaming_equal_dims_makes_no_new_class() -> None:
    def same(one: str, other: str, mesh_shape: tuple[int, ...], shape: tuple[int, ...] = (8, 8)) -> bool:
        return class_of(pair(one, shape), mesh_shape) == class_of(pair(other, shape), mesh_shape)

    assert same("S(0)R->RR", "RS(0)->RR", SQUARE) and not same("S(0)R->RR", "RS(0)->RR", WIDE)
    assert same("S(0)R->RS(1)", "RS(1)->S(0)R", SQUARE)
    assert same("S(0)R->RR", "S(1)R->RR", WIDE) and not same("S(0)R->RR", "S(1)R->RR", WIDE, (8, 4))
    # Renamed, the first mesh dim shards after the second: that is the other shard order.
    assert same("S(0)S(0)->RR", "S(0)[1]S(0)[0]->RR", SQUARE)
    assert not same("S(0)S(0)->S(0)R", "S(0)S(0)->RS(0)", SQUARE)
    assert not same("P(sum)R->RR", "P(avg)R->RR", SQUARE)


def test_a_sample_has_one_of_each_class_before_a_second_of_any() -> None:
    groups = groups_of("backward", SQUARE, 4096)
    classes = Counter(class_of(one, SQUARE) for one in groups[0])
    for cap in (10, len(classes), len(classes) + 5):
        chosen = sample(groups, cap, SQUARE, "seed")
        result = Counter(class_of(one, SQUARE) for one in chosen)
        assert len(chosen) == len(set(chosen)) == cap and len(result) == min(cap, len(classes))
    assert sample(groups, 10, SQUARE, "seed") == sample(groups, 10, SQUARE, "seed")
    assert sample(groups, 10, SQUARE, "seed") != sample(groups, 10, SQUARE, "another")
    assert sample(groups, 0, SQUARE, "seed") == groups[0]


@pytest.mark.long
def test_every_group_is_in_a_sample_that_has_room_for_all() -> None:
    for suite, mesh_shape in itertools.product(LABORATORY_SUITES, (SQUARE, CUBE)):
        groups = groups_of(suite, mesh_shape, 4096)
        chosen = set(sample(groups, len(groups), mesh_shape, "seed"))
        if len(groups) < sum(map(len, groups)):
            assert [len(chosen & set(group)) for group in groups] == [1] * len(groups)


def test_the_same_pairs_run_at_every_size_and_shapes_are_as_large_as_asked() -> None:
    lab = Laboratory("pairs", sizes_bytes=(262144, 8388608), max_pairs=12)
    result = pairs_of(lab, WIDE, seed=1)
    small, large = result[:12], result[12:]
    assert [str(one) for one in small] == [str(one) for one in large]
    for one in small:
        assert 0.9 < 4 * torch.Size(one.shape).numel() / 262144 < 1.1
    assert {len(set(one.shape)) for one in result} == {1}, "equal sides, so that tensor dims are alike"
    assert cube(1000, 3, 8) == (8, 8, 8) and cube(1, 2, 8) == (8, 8)


def test_a_split_factor_says_how_many_shards_of_later_mesh_dims_came_first() -> None:
    # torch's own examples: FSDP2 over TP on 2x4, and mesh (4, 3, 2) sharded in the order 2, 0, 1.
    assert str(strided(Layout.of("S(0)[1]S(0)[0]", 1), WIDE)) == "_S(0,4)S(0)"
    assert str(strided(Layout.of("S(0)[1]S(0)[2]S(0)[0]", 1), (4, 3, 2))) == "_S(0,2)_S(0,2)S(0)"


@pytest.mark.parametrize("mesh_shape", [SQUARE, WIDE, CUBE])
def test_a_decodable_strided_shard_is_the_same_rows_as_its_shard_order(mesh_shape: tuple[int, ...]) -> None:
    """Two rules of sharding, each written from its own definition, agree on every rank."""
    full = torch.arange(64 * 64).reshape(64, 64)
    for layout in ordered_layouts(len(mesh_shape), 2):
        placements = torch_placements(strided(layout, mesh_shape))
        assert layout.state is not None
        for cell in itertools.product(*map(range, mesh_shape)):
            by_order = shard_in_order(full, layout.state.orders, mesh_shape, cell)
            assert torch.equal(strided_shard_of(full, placements, mesh_shape, cell), by_order), (layout, cell)


def test_undecodable_strided_shards_are_those_that_torch_cannot_decode() -> None:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    class Sizes:
        def size(self, mesh_dim: int) -> int:
            return WIDE[mesh_dim]

    result = {str(layout) for layout in undecodable_layouts(WIDE, 2)}
    for texts in itertools.product(("R", "S(0)", "S(1)", "_S(0,2)", "_S(1,2)"), repeat=2):
        if any(text.startswith("_S") for text in texts):
            placements = tuple(parse_placement(text) for text in texts)
            order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, Sizes())
            assert (order is None) == ("".join(texts) in result), texts


def planners(
    text: str, suite: str = "pairs", profile: Profile | None = PROFILE, asked: tuple[str, ...] = ()
) -> list[str]:
    return planners_for(Laboratory(suite, planners=asked), pair(text, (8, 8)), profile)


def test_only_planners_that_can_move_a_pair_are_tried() -> None:
    assert planners("S(0)R->RR") == ["greedy", "min_cost", "calibrated", "direct"]
    assert planners("S(0)R->RR", profile=None) == ["greedy", "min_cost", "direct"]
    assert planners("P(sum)R->RR") == ["greedy", "min_cost", "calibrated", "direct"]
    assert planners("S(0)R->P(sum)R") == ["greedy", "min_cost", "calibrated"]
    assert planners("S(0)R->RR", suite="backward") == ["greedy", "min_cost", "calibrated"]
    assert planners("S(0)R->P(sum)R", asked=("greedy", "direct")) == ["greedy"]
    lost = pair("_S(0,2)R->S(0)R", (8, 8))
    assert planners_for(Laboratory("strided"), lost, PROFILE) == ["greedy"]


@pytest.mark.parametrize(
    ("lab", "message"),
    [
        (Laboratory("pear"), "suite 'pear' is unknown; use pairs"),
        (Laboratory("pairs", dtype="f8"), "dtype 'f8' is unknown"),
        (Laboratory("pairs", planners=("best",)), "planner 'best' is unknown"),
        (Laboratory("pairs", planners=("calibrated",)), "distbench calibrate"),
    ],
)
def test_a_laboratory_that_cannot_be_is_one_sentence(lab: Laboratory, message: str) -> None:
    with fake_mesh(SQUARE, devices_per_host=1) as mesh, pytest.raises(UserError, match=message):
        assert dist.group.WORLD is not None
        context = RankContext(0, torch.device("cpu"), mesh, "gloo", dist.group.WORLD, 1)
        list(laboratory_cases(Scenario(laboratories=(lab,)), context))


def test_shard_orders_are_planned_from_where_they_are_or_unsupported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On ranks that are not there; torch's own path begins and ends in the orders that were asked for."""
    from torch.distributed.tensor import _redistribute

    full = torch.zeros(8, 8)
    source, target = parse_state("S(0)[1]S(0)[0]", 2), parse_state("S(1)[1]S(1)[0]", 2)
    with fake_mesh(SQUARE, devices_per_host=1) as mesh:
        tensor = OrderedTensor(full[:2], mesh, source, full)
        states = plan_path(tensor, OrderedPlacements.of(target))[0].split("->")
        assert (parse_state(states[0], 2), parse_state(states[-1], 2)) == (source, target)
        monkeypatch.delattr(_redistribute, "redistribute_local_tensor")
        with pytest.raises(Unsupported, match=r"redistribution paths.*redistribute_local_tensor"):
            OrderedTensor(full[:2], mesh, source, full)


class Connections:
    """A rank's groups after a case that raised everywhere, in three conditions."""

    mesh_dims = ("dp_shard", "tp")

    def __init__(self, condition: str) -> None:
        self.condition, self.asked = condition, []

    def group_works(self, mesh_dim: str) -> bool:
        self.asked.append(mesh_dim)
        if self.condition == "broken":
            raise RuntimeError("Connection closed by peer")
        return self.condition == "sound"

    def any(self, flag: bool) -> bool:
        return flag


@pytest.mark.parametrize("condition", ["sound", "broken", "out of step"])
def test_a_case_that_raised_everywhere_ends_the_launch_only_if_it_broke_the_groups(condition: str) -> None:
    runner = object.__new__(Runner)
    context: Any = Connections(condition)
    runner._context, runner._agreement = context, SimpleNamespace(require_all_failed=lambda what, message: None)
    with pytest.raises(RankFailed, match="why") if condition != "sound" else contextlib.nullcontext():
        runner._require_harmless("0", "why")
    assert context.asked == (["dp_shard"] if condition == "broken" else ["dp_shard", "tp"])


@pytest.mark.parametrize(
    ("text", "shards"),
    [
        ("S(0)S(1)", [[[0, 1], [3, 4]], [[2], [5]], [[6, 7], [9, 10]], [[8], [11]]]),
        ("RS(0)", [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]] * 2),
        ("S(0)[1]S(0)[0]", [[[0, 1, 2]], [[6, 7, 8]], [[3, 4, 5]], [[9, 10, 11]]]),
    ],
)
def test_a_rank_holds_its_shard_of_a_layout(text: str, shards: list[Any]) -> None:
    """4 x 3 numbers on 2 x 2 ranks."""
    full, held = torch.arange(12.0).reshape(4, 3), []
    for coordinate in itertools.product(range(2), range(2)):
        context: Any = SimpleNamespace(mesh_shape=(2, 2), coordinate=coordinate)
        held.append(shard_under(full, Layout.of(text, 2), context).tolist())
    assert held == shards
