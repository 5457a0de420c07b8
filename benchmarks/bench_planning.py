"""Planning speed against torch's min-cost planner: same process, same cost constants, medians over random pairs.

    python benchmarks/bench_planning.py

Both planners keep between plans what they keep in a training process (torch its planner of the tensor, ours the state
graph and the tensor's prices); pairs are never repeated before they are timed. Thread CPU seconds.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as module
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from distbench.planning import Problem, State, TorchCost, cheapest_route
from distbench.worker.torch_internals.calibrated import planning_under

Row = tuple[str, float, float]
Pair = tuple[Problem, State, State]

# name, mesh, tensor ndim, pairs that torch plans, pairs that we plan, required speed-up
CASES = (
    ("4x4x4/3-D", (4, 4, 4), 3, 60, 600, 200.0),
    ("4x4x4x4/4-D", (4, 4, 4, 4), 4, 12, 300, 500.0),
    ("2x2x2x2x2/4-D", (2, 2, 2, 2, 2), 4, 3, 300, 1500.0),
)
NUM_TENSORS = 8
ALL_PAIRS_LIMIT_S, HOOK_REQUIRED = 1.0, 80.0


def main() -> list[Row]:
    """(name, measured, minus what is required) of each speed-up; the time of all pairs is its limit over it."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=256)
    rows: list[Row] = []
    for name, mesh_shape, tensor_ndim, few, many, required in CASES:
        mesh, model = mesh_of(mesh_shape), TorchCost(mesh_shape, devices_per_host=1)
        pairs = random_pairs(mesh_shape, tensor_ndim, max(few, many) * 2)
        theirs = [timed(torch_plan(mesh, pair)) for pair in pairs[:few]]
        gc.collect()
        warm_up = pairs[many:]
        _ = [cheapest_route(*problem_first(pair, model)) for pair in warm_up]
        ours = [timed(our_plan(pair, model)) for pair in pairs[:many]]
        rows.append((f"speed-up, {name}", median(theirs) / median(ours), -required))
        if tensor_ndim == 3:
            fresh = [timed(our_plan(pair, TorchCost(mesh_shape, 1))) for pair in pairs[:many]]
            rows.append((f"speed-up on a tensor's first plan, {name}", median(theirs) / median(fresh), -80.0))
            rows.append(("1 s over all pairs, 4x4x4/3-D", ALL_PAIRS_LIMIT_S / all_pairs_seconds(mesh_shape), -1.0))
            rows.append((f"speed-up through DTensor, {name}", through_dtensor(mesh, model, pairs, few), -HOOK_REQUIRED))
    return rows


def all_pairs_seconds(mesh_shape: tuple[int, ...]) -> float:
    """Seconds to plan every ordered pair of placements (shards of 3 tensor dims, replicas, Partial sources), cold."""
    problem, model = Problem(mesh_shape, (256, 512, 1024), 2), TorchCost(mesh_shape, devices_per_host=1)
    sources = list(default_states(len(mesh_shape), 3, with_partial=True))
    targets = list(default_states(len(mesh_shape), 3, with_partial=False))
    gc.collect()
    start = time.thread_time()
    for source in sources:
        for target in targets:
            cheapest_route(problem, model, source, target)
    return time.thread_time() - start


def through_dtensor(mesh: DeviceMesh, model: TorchCost, pairs: Iterable[Pair], few: int) -> float:
    """Speed-up of everything that DTensor does for a plan that it has not cached, hook and translation included."""
    specs = [specs_of(mesh, pair) for pair in pairs]
    theirs = [timed(partial(module._gen_transform_infos_non_cached, *pair, True)) for pair in specs[:few]]
    with planning_under(lambda mesh: model):
        ours = [timed(partial(module._gen_transform_infos_non_cached, *pair, True)) for pair in specs]
    return median(theirs) / median(ours)


def random_pairs(mesh_shape: tuple[int, ...], tensor_ndim: int, count: int) -> list[Pair]:
    """Pairs in the default shard order, Partial only in sources, on a few tensors that divide evenly."""
    rng = random.Random(0)
    sizes = [math.prod(mesh_shape) * factor for factor in (1, 2, 3)]
    tensors = [tuple(rng.choice(sizes) for _ in range(tensor_ndim)) for _ in range(NUM_TENSORS)]
    found: list[Pair] = []
    while len(found) < count:
        problem = Problem(mesh_shape, rng.choice(tensors), 2)
        source, target = (random_state(rng, len(mesh_shape), tensor_ndim, partial) for partial in (True, False))
        if source != target:
            found.append((problem, source, target))
    return found


def random_state(rng: random.Random, mesh_ndim: int, tensor_ndim: int, partial: bool) -> State:
    """One placement a mesh dim, each as likely as the others."""
    return state_of([rng.randrange(tensor_ndim + (2 if partial else 1)) for _ in range(mesh_ndim)], tensor_ndim)


def default_states(mesh_ndim: int, tensor_ndim: int, with_partial: bool) -> Iterable[State]:
    """Every combination of placements in the default shard order."""
    base = tensor_ndim + (2 if with_partial else 1)
    for number in range(base**mesh_ndim):
        yield state_of([number // base**mesh_dim % base for mesh_dim in range(mesh_ndim)], tensor_ndim)


def state_of(choices: list[int], tensor_ndim: int) -> State:
    """Choice d below the tensor's dims cuts dim d, the next replicates, the one after is partial."""
    orders = tuple(tuple(m for m, choice in enumerate(choices) if choice == d) for d in range(tensor_ndim))
    return State(len(choices), orders, tuple((m, "sum") for m, choice in enumerate(choices) if choice > tensor_ndim))


def timed(plan: Callable[[], object]) -> float:
    """Thread CPU seconds of one call."""
    start = time.thread_time()
    plan()
    return time.thread_time() - start


def problem_first(pair: Pair, model: TorchCost) -> tuple[Problem, TorchCost, State, State]:
    """Arguments of `cheapest_route`."""
    return pair[0], model, pair[1], pair[2]


def our_plan(pair: Pair, model: TorchCost) -> Callable[[], object]:
    """Our plan of a pair, the problem built anew as a caller would."""
    problem, source, target = pair
    return lambda: cheapest_route(Problem(problem.mesh_shape, problem.shape, 2), model, source, target)


def torch_plan(mesh: DeviceMesh, pair: Pair) -> Callable[[], object]:
    """torch's plan of the same pair."""
    source, target = specs_of(mesh, pair)
    assert source.tensor_meta is not None
    planner: Any = module.get_redistribute_planner(mesh, source.tensor_meta)
    states = [planner.DistState(spec.placements, spec.shard_order) for spec in (source, target)]
    return lambda: planner.find_min_cost_path(*states)


def specs_of(mesh: DeviceMesh, pair: Pair) -> tuple[DTensorSpec, DTensorSpec]:
    """The pair as DTensor has it, bf16."""
    problem, *states = pair
    empty = torch.empty(problem.shape, device="meta")
    meta = TensorMeta(empty.shape, empty.stride(), torch.bfloat16)
    first, second = (DTensorSpec(mesh, placements_of(s), meta, shard_order=order_of(s)) for s in states)
    return first, second


def placements_of(state: State) -> tuple[Any, ...]:
    """torch's placements."""
    others: dict[str, Any] = {"R": Replicate(), "P(sum)": Partial("sum")}
    return tuple(others.get(text) or Shard(int(text[2])) for text in map(str, state.placements()))


def order_of(state: State) -> Any:
    """torch's shard order."""
    return tuple(ShardOrderEntry(dim, mesh_dims) for dim, mesh_dims in enumerate(state.orders) if mesh_dims)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh of the first ranks."""
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape))


if __name__ == "__main__":
    for row_name, measured, required in main():
        print(f"{row_name:55} {measured:10.1f} {'>=' if measured >= -required else '< '} {-required:g}")
