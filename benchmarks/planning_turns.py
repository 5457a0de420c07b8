"""torch's min-cost planner and ours on the same pairs, taking turns in one process, under the same cost constants.

Each pair is planned five times, in an order drawn for it; thread CPU seconds:

    warm    either side has planned NUM_OTHERS other pairs of this tensor: we know our graph and the tensor's prices
    first   the first plan of a tensor: the same of another tensor, so that we know our graph, but no prices
    cold    the first plan of a process

No pair has been planned before it is timed (in training DTensor itself keeps whole plans). torch's planner keeps
nothing of other pairs but an object for each tensor, so that it has two of the five times: with it, and without.
What either side knows of the mesh itself (link speeds) stays. Garbage is collected after each pair.
"""

import gc
import itertools
import math
import random
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as module
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from distbench.planning.cheapest_path import Problem, cheapest_route, forget_prices
from distbench.planning.cost_profile import TorchCost
from distbench.planning.placement_states import State, graph_of
from distbench.torch_private import clear_redistribution_caches
from distbench.torch_private.calibrated_planner import planning_under

Pair = tuple[Problem, State, State]
NUM_TENSORS, NUM_OTHERS, NUM_RANKS, SEED = 8, 100, 256, 0


def ratios(mesh_shape: tuple[int, ...], tensor_ndim: int, num_pairs: int) -> dict[str, list[float]]:
    """torch's time over ours of each pair: "warm", "first", "cold"."""
    mesh, model = mesh_of(mesh_shape), TorchCost(mesh_shape, devices_per_host=1)
    order = random.Random(SEED)
    result: dict[str, list[float]] = {"warm": [], "first": [], "cold": []}
    for pair in random_pairs(mesh_shape, tensor_ndim, num_pairs):
        plans = {
            "torch warm": partial(torch_warm, mesh, pair),
            "torch empty": partial(torch_empty, mesh, pair),
            "warm": partial(ours_warm, model, pair),
            "first": partial(ours_first, model, pair),
            "cold": partial(ours_cold, model, pair),
        }
        gc.collect()
        seconds = {name: plans[name]() for name in order.sample(list(plans), len(plans))}
        for state, values in result.items():
            values.append(seconds["torch warm" if state == "warm" else "torch empty"] / seconds[state])
    return result


def ratios_through_dtensor(mesh_shape: tuple[int, ...], tensor_ndim: int, num_pairs: int) -> list[float]:
    """The same, warm, of all that DTensor does for a plan that it does not have, our hook and translation included."""
    mesh, model = mesh_of(mesh_shape), TorchCost(mesh_shape, devices_per_host=1)
    order = random.Random(SEED)
    result = []
    for pair in random_pairs(mesh_shape, tensor_ndim, num_pairs):
        specs = specs_of(mesh, pair)

        def plan(specs: Any = specs) -> object:
            # Looked up anew: our context puts another in its place.
            source, target = specs
            return module._gen_transform_infos_non_cached(source, target, True)

        sides = {"torch": partial(dtensor_plan, mesh, pair, plan), "ours": partial(our_hook, mesh, model, pair, plan)}
        gc.collect()
        seconds = {name: sides[name]() for name in order.sample(list(sides), len(sides))}
        result.append(seconds["torch"] / seconds["ours"])
    return result


def all_pairs_seconds(mesh_shape: tuple[int, ...], tensor_ndim: int) -> float:
    """CPU seconds of our plans of every ordered pair of placements in the default shard order, nothing known before."""
    problem, model = Problem(mesh_shape, (256, 512, 1024, 2048)[:tensor_ndim], 2), TorchCost(mesh_shape, 1)
    sources, targets = (default_states(len(mesh_shape), tensor_ndim, partial) for partial in (True, False))
    pairs = [(problem, *ends) for ends in itertools.product(sources, targets)]
    forget_all()
    return timed(lambda: [our_plan(model, pair) for pair in pairs])


def default_states(mesh_ndim: int, tensor_ndim: int, with_partial: bool) -> list[State]:
    """Every combination of placements in the default shard order."""
    choices = range(tensor_ndim + (2 if with_partial else 1))
    return [state_of(list(one), tensor_ndim) for one in itertools.product(choices, repeat=mesh_ndim)]


def torch_warm(mesh: DeviceMesh, pair: Pair) -> float:
    """Seconds of torch's plan, its planner of this tensor made before."""
    source, target = specs_of(mesh, pair)
    planner = planner_of(mesh, source)
    return timed(partial(planner.find_min_cost_path, *(dist_state(planner, spec) for spec in (source, target))))


def torch_empty(mesh: DeviceMesh, pair: Pair) -> float:
    """Seconds of torch's plan, its planner of this tensor included."""
    source, target = specs_of(mesh, pair)
    states = [dist_state(module.DTensorRedistributePlanner, spec) for spec in (source, target)]
    clear_redistribution_caches()
    return timed(lambda: planner_of(mesh, source).find_min_cost_path(*states))


def ours_warm(model: TorchCost, pair: Pair) -> float:
    """Seconds of our plan after other pairs of its tensor."""
    know_others(model, pair)
    return timed(partial(our_plan, model, pair))


def ours_first(model: TorchCost, pair: Pair) -> float:
    """Seconds of our plan after the same pairs of another tensor, of which no prices are known."""
    know_others(model, pair)
    forget_prices()
    return timed(partial(our_plan, model, pair))


def ours_cold(model: TorchCost, pair: Pair) -> float:
    """Seconds of our plan, nothing planned before."""
    forget_all()
    return timed(partial(our_plan, model, pair))


def know_others(model: TorchCost, pair: Pair) -> None:
    """Leave in our caches what plans of other pairs of the same tensor do, and nothing of this pair."""
    forget_all()
    for other in others_of(pair):
        our_plan(model, other)


def forget_all() -> None:
    """Empty our caches: prices and the graph."""
    forget_prices()
    graph_of.cache_clear()


def our_plan(model: TorchCost, pair: Pair) -> object:
    """Our plan, the problem built anew as a caller would."""
    problem, source, target = pair
    return cheapest_route(Problem(problem.mesh_shape, problem.shape, problem.itemsize), model, source, target)


def dtensor_plan(mesh: DeviceMesh, pair: Pair, plan: Callable[[], object]) -> float:
    """Seconds of what DTensor does for a plan by torch."""
    planner_of(mesh, specs_of(mesh, pair)[0])
    return timed(plan)


def our_hook(mesh: DeviceMesh, model: TorchCost, pair: Pair, plan: Callable[[], object]) -> float:
    """Seconds of the same in our context, entered before."""
    with planning_under(lambda mesh: model):
        forget_all()
        for other in others_of(pair):
            module._gen_transform_infos_non_cached(*specs_of(mesh, other), True)
        return timed(plan)


def timed(plan: Callable[[], object]) -> float:
    """Thread CPU seconds of one call."""
    start = time.thread_time()
    plan()
    return time.thread_time() - start


@contextmanager
def fake_ranks() -> Any:
    """A process group without ranks, and no garbage collection: one side's plan would pay for the other's garbage."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        dist.destroy_process_group()


def random_pairs(mesh_shape: tuple[int, ...], tensor_ndim: int, count: int) -> list[Pair]:
    """Pairs in the default shard order, Partial only in sources, on a few tensors that divide evenly."""
    rng = random.Random(SEED)
    sizes = [math.prod(mesh_shape) * factor for factor in (1, 2, 3)]
    tensors = [tuple(rng.choice(sizes) for _ in range(tensor_ndim)) for _ in range(NUM_TENSORS)]
    result: list[Pair] = []
    while len(result) < count:
        problem = Problem(mesh_shape, rng.choice(tensors), 2)
        source, target = random_ends(rng, problem)
        if source != target:
            result.append((problem, source, target))
    return result


def others_of(pair: Pair) -> list[Pair]:
    """Other pairs of the same tensor, always the same."""
    rng = random.Random(SEED + 1)
    drawn = ((pair[0], *random_ends(rng, pair[0])) for _ in range(NUM_OTHERS))
    return [other for other in drawn if other[1] != other[2] and other != pair]


def random_ends(rng: random.Random, problem: Problem) -> tuple[State, State]:
    """A source and a target, which may be the same."""
    ndims = len(problem.mesh_shape), len(problem.shape)
    return random_state(rng, *ndims, True), random_state(rng, *ndims, False)


def random_state(rng: random.Random, mesh_ndim: int, tensor_ndim: int, partial: bool) -> State:
    """One placement a mesh dim, each as likely as the others."""
    return state_of([rng.randrange(tensor_ndim + (2 if partial else 1)) for _ in range(mesh_ndim)], tensor_ndim)


def state_of(choices: list[int], tensor_ndim: int) -> State:
    """Choice d below the tensor's dims cuts dim d, the next replicates, the one after is partial."""
    orders = tuple(tuple(m for m, choice in enumerate(choices) if choice == d) for d in range(tensor_ndim))
    return State(len(choices), orders, tuple((m, "sum") for m, choice in enumerate(choices) if choice > tensor_ndim))


def planner_of(mesh: DeviceMesh, spec: DTensorSpec) -> Any:
    """torch's planner of this tensor, kept by torch."""
    assert spec.tensor_meta is not None
    return module.get_redistribute_planner(mesh, spec.tensor_meta)


def dist_state(planner: Any, spec: DTensorSpec) -> Any:
    """A spec as torch's planner has it."""
    return planner.DistState(spec.placements, spec.shard_order)


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
