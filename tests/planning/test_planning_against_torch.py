"""The planner against torch's own, under torch's constants: the same legal steps, and never a dearer path.

With torch 2.14 and newer a shard becomes P(sum) where the target has it; below, torch has no such step and neither have
we.
"""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as torch_planning
from torch.distributed.tensor._collective_utils import one_step_redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.random_states import random_state
from distbench.planning.cheapest_path import Problem, cheapest_route, priced_steps
from distbench.planning.cost_profile import TorchCost
from distbench.planning.placement_states import State, legal_steps, zero_fillable

WORLD_SIZE = 64
# (mesh shape, tensor ndim, pairs): 570 in all, most where a torch plan is cheap.
SAMPLES = (
    ((4,), 1, 50),
    ((2, 4), 2, 200),
    ((3, 2), 3, 120),
    ((1, 4), 2, 50),
    ((2, 2, 2), 2, 80),
    ((4, 4, 4), 2, 40),
    ((4, 4, 4), 3, 30),
)
REDUCE_OPS = ("sum", "avg", "max", "min")
ZERO_FILL = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


@pytest.fixture(scope="module", autouse=True)
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    count = int(torch.tensor(shape).prod())
    return DeviceMesh("cpu", torch.arange(count).reshape(shape))


def any_state(rng: random.Random, mesh_ndim: int, tensor_ndim: int, partial: bool) -> State:
    """Any placement on each mesh dim, the shard order shuffled, one reduce op or sum with avg."""
    ops = rng.choice([(op,) for op in REDUCE_OPS] + [("sum", "avg")])
    return random_state(rng, mesh_ndim, tensor_ndim, ops if partial else ())


def to_torch(state: State) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """torch's placements and shard order of a state, not by the hook's own translation."""
    placements: list[Any] = [Replicate()] * state.mesh_ndim
    for tensor_dim, order in enumerate(state.orders):
        for mesh_dim in order:
            placements[mesh_dim] = Shard(tensor_dim)
    for mesh_dim, reduce_op in state.partials:
        placements[mesh_dim] = Partial(reduce_op)
    shard_order: Any = tuple(ShardOrderEntry(dim, cuts) for dim, cuts in enumerate(state.orders) if cuts)
    return tuple(placements), shard_order


def meta_of(shape: tuple[int, ...]) -> TensorMeta:
    empty = torch.empty(shape, device="meta")
    return TensorMeta(empty.shape, empty.stride(), torch.float32)


def zero_fills(planner: Any, before: Any, target: Any) -> dict[Any, float]:
    """torch's steps from shards of one of its states to partials of the target, with what its search takes each for."""
    steps: Any = getattr(planner, "_get_shard_to_partial_target_states", lambda before, target: {})
    return dict(steps(before, target))


def torch_cost_us(mesh: DeviceMesh, meta: TensorMeta, source: State, target: State) -> float:
    """What torch's cheapest path costs by torch's own count, microseconds."""
    planner: Any = torch_planning.DTensorRedistributePlanner(mesh, meta)
    planner.partial_reduce_ops_in_target.update(op for _, op in (*source.partials, *target.partials))
    start, end = (planner.DistState(*to_torch(state)) for state in (source, target))
    total = 0.0
    for before, after in pairwise(planner.find_min_cost_path(start, end)):
        filled = zero_fills(planner, before, end)
        total += filled[after] if after in filled else planner.cost_function(before, after)
    return total


@pytest.mark.parametrize(("mesh_shape", "tensor_ndim", "pairs"), SAMPLES)
@pytest.mark.long
def test_our_cheapest_path_costs_what_torchs_does(mesh_shape: tuple[int, ...], tensor_ndim: int, pairs: int) -> None:
    rng = random.Random(f"{mesh_shape}/{tensor_ndim}")
    mesh, model = mesh_of(mesh_shape), TorchCost(mesh_shape, devices_per_host=1)
    for _ in range(pairs):
        source = any_state(rng, len(mesh_shape), tensor_ndim, partial=True)
        target = any_state(rng, len(mesh_shape), tensor_ndim, partial=False)
        unit = rng.choice((1, 64, 1024))
        shape = tuple(rng.randrange(1, 9) * unit for _ in range(tensor_ndim))
        route = cheapest_route(Problem(mesh_shape, shape, 4), model, source, target)
        expected = torch_cost_us(mesh, meta_of(shape), source, target)
        assert route.seconds * 1e6 == pytest.approx(expected, rel=1e-9), f"{source} -> {target} of {shape}"


def test_torchs_constants_are_reproduced_step_by_step() -> None:
    for mesh_shape in ((4,), (2, 4), (1, 3), (4, 4, 4)):
        mesh, model = mesh_of(mesh_shape), TorchCost(mesh_shape, devices_per_host=1)
        meta = meta_of((96, 40))
        for seed in range(40):
            state = any_state(random.Random(seed), len(mesh_shape), 2, partial=True)
            before = DTensorSpec(mesh, to_torch(state)[0], meta, shard_order=to_torch(state)[1])
            for following, move in legal_steps(state):
                after = DTensorSpec(mesh, to_torch(following)[0], meta, shard_order=to_torch(following)[1])
                gathered = mesh_shape[move.mesh_dim] if move.op == "all_gather" else 1
                payload = 96 * 40 * 4 / before.num_shards * gathered
                seconds = model.seconds(move.op, move.mesh_dim, payload, 0)
                assert seconds * 1e6 == pytest.approx(one_step_redistribute_cost(before, after), rel=1e-12)


def test_hosts_of_several_devices_are_priced_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import _collective_utils

    utils: Any = _collective_utils

    monkeypatch.setattr(utils._mesh_resources, "num_devices_per_host", lambda device_type: 8, raising=False)
    mesh, model = mesh_of((4, 2, 4)), TorchCost((4, 2, 4), devices_per_host=8)
    topology = utils.MeshTopoInfo.build_from_mesh.__wrapped__(mesh)
    for mesh_dim in range(3):
        expected = utils.allgather_cost(0.25, topology, mesh_dim)
        assert model.seconds("all_gather", mesh_dim, 0.25 * 2**30, 0) * 1e6 == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("mesh_ndim", "tensor_ndim"), [(1, 1), (2, 2), (3, 2), (2, 3)])
def test_the_legal_steps_are_torchs(mesh_ndim: int, tensor_ndim: int) -> None:
    mesh, meta = mesh_of((2,) * mesh_ndim), meta_of((8,) * tensor_ndim)
    num_filled = 0
    for seed in range(60):
        rng = random.Random(seed)
        state, target = (any_state(rng, mesh_ndim, tensor_ndim, partial=True) for _ in range(2))
        ops = tuple(sorted({op for _, op in state.partials})) if seed % 2 else ("max",)
        planner = torch_planning.DTensorRedistributePlanner(mesh, meta)
        planner.partial_reduce_ops_in_target.update(ops)
        before, end = (planner.DistState(*to_torch(one)) for one in (state, target))
        filled = zero_fills(planner, before, end)
        steps = [*planner.get_next_state(*to_torch(state)), *filled]
        expected = {(step.placements, step.tensor_dim_to_mesh_dim) for step in steps}
        fillable = zero_fillable(target) if ZERO_FILL else ()
        assert {to_torch(following) for following, _ in legal_steps(state, ops, fillable)} == expected
        num_filled += len(filled)
    assert bool(num_filled) == ZERO_FILL


@pytest.mark.parametrize(("mesh_shape", "shape"), [((4,), (64,)), ((2, 4), (64, 24)), ((2, 2, 2), (16, 9))])
@pytest.mark.long
def test_targets_with_partial_cost_what_torch_says_too(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    rng = random.Random(5)
    mesh, model = mesh_of(mesh_shape), TorchCost(mesh_shape, devices_per_host=1)
    compared = num_filled = 0
    while compared < 60:
        source, target = (any_state(rng, len(mesh_shape), len(shape), partial=True) for _ in range(2))
        if not target.partials or source == target:
            continue
        compared += 1
        route = cheapest_route(Problem(mesh_shape, shape, 4), model, source, target, zero_fill=ZERO_FILL)
        expected = torch_cost_us(mesh, meta_of(shape), source, target)
        assert route.seconds * 1e6 == pytest.approx(expected, rel=1e-9), f"{source} -> {target}"
        steps = priced_steps(Problem(mesh_shape, shape, 4), model, route.states)
        num_filled += any(step.move.op == "zero_fill" for step in steps)
    assert (num_filled > 5) == ZERO_FILL, num_filled
