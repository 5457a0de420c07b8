"""torch's two planners on a fake process group: which one plans, and that neither is served the other's cache."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from distbench.planning.placement_states import local_shape, parse_state
from distbench.torch_private import OrderedPlacements, OrderedTensor, OwnPlans, plan_path, planner


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_shard", "tp"))
    dist.destroy_process_group()


def sharded_over_tp(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(torch.zeros(256, 1024), mesh, [Replicate(), Shard(0)], run_check=False)


def test_each_planner_gives_torchs_own_path(mesh: DeviceMesh) -> None:
    """Expected: what torch plans when asked for this planner by argument, past every cache."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    source = sharded_over_tp(mesh)
    target = (Shard(1), Replicate())
    spec = DTensorSpec(mesh, target, tensor_meta=source._spec.tensor_meta)
    paths = {}
    for name in ("greedy", "min_cost", "greedy"):
        infos = _redistribute._gen_transform_infos_non_cached(source._spec, spec, name == "min_cost")
        wanted = _redistribute.DTensorRedistributePlanner.stringify_transform_infos(
            mesh, infos, source._spec.placements, source._spec.shard_order
        )
        with planner(name):
            path, _ = plan_path(source, target)
        assert path == wanted
        paths[name] = path
    assert paths["greedy"] != paths["min_cost"], "a pair on which both agree would not notice a shared cache"


def test_cases_that_take_turns_keep_the_paths_that_each_planned(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor import _redistribute

    requested, plain = [], _redistribute._gen_transform_infos_non_cached

    def counting(*args: object) -> object:
        requested.append(args)
        return plain(*args)

    monkeypatch.setattr(_redistribute, "_gen_transform_infos_non_cached", counting)
    source, result = sharded_over_tp(mesh), []
    plans = {name: OwnPlans() for name in ("greedy", "min_cost")}
    for name in (*plans, *plans, *plans):
        with planner(name), plans[name].used():
            result.append(plan_path(source, (Shard(1), Replicate()))[0])
    assert result == result[:2] * 3 and result[0] != result[1] and len(requested) == 2
    with planner("greedy"):
        assert plan_path(source, (Shard(1), Replicate()))[0] == result[0] and len(requested) == 3


def test_what_was_cut_on_the_way_is_smaller_in_the_steps_after(mesh: DeviceMesh) -> None:
    """P(sum)P(sum) -> S(1)R: the second sum is of the half that the first one left, whoever planned it."""
    given = DTensor.from_local(torch.zeros(1024, 1024), mesh, [Partial(), Partial()], run_check=False)
    for name in ("greedy", "min_cost"):
        with planner(name):
            text, result = plan_path(given, [Shard(1), Replicate()])
        assert text == "P(sum)P(sum)->S(1)P(sum)->S(1)R"
        assert [(step.op, step.logical_numel) for step in result] == [("reduce_scatter", 2**20), ("all_reduce", 2**19)]


def test_what_became_partial_is_as_large_as_the_sum(mesh: DeviceMesh) -> None:
    """A replica's part is as large as itself, a filled shard as all of its group's; what follows is of that."""
    full = torch.empty(1024, 512, device="meta")
    steps = {}
    for source, target in (("S(1)S(0)", "S(1)P(sum)"), ("RP(sum)", "P(sum)R")):
        state = parse_state(source, 2)
        local = torch.empty(local_shape(state, (1024, 512), (2, 4)))
        given = OrderedTensor(local, mesh, state, full)
        with planner("greedy"):
            _, result = plan_path(given, OrderedPlacements.of(parse_state(target, 2)))
        steps[target] = [(step.does, step.payload_numel, step.num_copies, step.held_after) for step in result]
    assert steps["S(1)P(sum)"] == [("zero_fill", 1024 * 256, 0, 1024 * 256)]
    assert steps["P(sum)R"] == [("partition", 1024 * 512, 0, 1024 * 512), ("all_reduce", 1024 * 512, 0, 1024 * 512)]


def test_a_planner_that_is_none_of_torchs_is_refused() -> None:
    """It would plan as greedy does, and be reported under its own name."""
    with pytest.raises(ValueError, match="'replicate' is unknown; use greedy or min_cost"), planner("replicate"):
        pass


def test_the_switch_leaves_torch_as_it_was(mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import _redistribute

    before = _redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN
    with pytest.raises(RuntimeError, match="inside"), planner("min_cost"):
        raise RuntimeError("inside")
    assert before == _redistribute._FORCE_MIN_COST_REDISTRIBUTION_PLAN


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ([Shard(0), Replicate()], [Replicate(), Replicate()], [("all_gather", 2, 1024 * 1024)]),
        ([Replicate(), Shard(0)], [Replicate(), Shard(1)], [("all_to_all", 4, 1024 * 1024)]),
        ([Partial(), Replicate()], [Shard(0), Replicate()], [("reduce_scatter", 2, 1024 * 1024)]),
        ([Replicate(), Partial()], [Replicate(), Replicate()], [("all_reduce", 4, 1024 * 1024)]),
        ([Replicate(), Replicate()], [Shard(0), Replicate()], [(None, 2, 1024 * 1024)]),
    ],
)
def test_a_path_of_one_step_has_its_collective_group_and_size(mesh: DeviceMesh, source, target, steps) -> None:
    shape = [1024, 1024]
    for size, placement in zip((2, 4), source, strict=True):
        if placement.is_shard():
            shape[placement.dim] //= size
    given = DTensor.from_local(torch.zeros(shape), mesh, source, run_check=False)
    with planner("greedy"):
        _, result = plan_path(given, target)
    assert [(step.op, step.group_size, step.logical_numel) for step in result] == steps


def test_a_path_over_mesh_dims_of_one_rank_is_written_although_torch_cannot(mesh: DeviceMesh) -> None:
    """On one GPU every mesh dim has one rank; the path is then its placements in order, no collective."""
    single = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_shard", "tp"))
    given = DTensor.from_local(torch.zeros(8, 8), single, [Shard(0), Shard(0)], run_check=False)
    with planner("greedy"):
        path, steps = plan_path(given, [Replicate(), Replicate()])
    assert path in ("S(0)S(0)->S(0)R->RR", "S(0)S(0)->RS(0)->RR")
    assert all(step.group_size == 1 for step in steps)
