"""DTensor redistributions over the whole mesh: pairs and the suites of the planner study, each by every planner."""

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distbench.planning.cheapest_path import Problem, least_received_bytes
from distbench.planning.cost_profile import DIRECT, Profile
from distbench.planning.placement_states import State
from distbench.ranks.case_protocol import CaseSpec, OpenedCase, first_difference
from distbench.ranks.context import RankContext, shape_text
from distbench.ranks.dtypes import TORCH_DTYPES
from distbench.records.run_file import DTYPE_BYTES, Case
from distbench.redistribute.expected_shards import (
    Layout,
    Pair,
    dtensor_under,
    parse_placement,
    rounding_of,
    shard_under,
    tagged,
    torch_placements,
)
from distbench.redistribute.planners import (
    PlannedRedistribution,
    check_planners,
    exchange_between,
    planned_redistribution,
)
from distbench.spec import Laboratory, Redistributions, Scenario, UserError
from distbench.spec.placements import NATIVE, PLANNERS, TORCH_PLANNERS, Placement, format_placements
from distbench.spec.scenario import LABORATORY_SUITES
from distbench.torch_private import OrderedPlacements, OrderedTensor, Unsupported, flatten_mesh

PARTIAL_OPS = ("sum", "avg", "max", "min")
TENSOR_NDIMS = (1, 2, 3)
REDUCTIONS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# Suites that also compare speed run at every size. The other suites run at the first size.
AT_EVERY_SIZE = ("pairs", "backward")
Group = list[Pair]


def plain_layouts(mesh_ndim: int, tensor_ndim: int, partial_op: str | None = None) -> Iterator[Layout]:
    """Yield every layout of R and S(d), and of Partial if a reduce op is given."""
    choices = ["R", *(f"S({dim})" for dim in range(tensor_ndim)), *([f"P({partial_op})"] if partial_op else [])]
    for placements in itertools.product(choices, repeat=mesh_ndim):
        yield Layout.of("".join(placements), tensor_ndim)


def ordered_layouts(mesh_ndim: int, tensor_ndim: int) -> Iterator[Layout]:
    """Yield every layout of R and S(d) in every shard order."""
    for layout in plain_layouts(mesh_ndim, tensor_ndim):
        assert layout.state is not None
        for orders in itertools.product(*(itertools.permutations(order) for order in layout.state.orders)):
            state = State(mesh_ndim, tuple(orders))
            yield Layout(state.placements(), state)


def strided(layout: Layout, mesh_shape: Sequence[int]) -> Layout:
    """Return the same layout with strided shards instead of shard orders, as in FSDP2 over TP.

    A mesh dim's split factor is the product of the mesh dims to its right that shard the same tensor dim before it.
    """
    assert layout.state is not None
    placements = list(layout.placements)
    for tensor_dim, order in enumerate(layout.state.orders):
        for turn, mesh_dim in enumerate(order):
            factor = math.prod(mesh_shape[earlier_dim] for earlier_dim in order[:turn] if earlier_dim > mesh_dim)
            placements[mesh_dim] = Placement(tensor_dim, split_factor=None if factor == 1 else factor)
    return Layout(tuple(placements), layout.state)


def undecodable_layouts(mesh_shape: Sequence[int], tensor_ndim: int, factor: int = 2) -> Iterator[Layout]:
    """Yield layouts of R, S(d) and strided shards of one split factor that correspond to no shard order."""
    mesh_ndim = len(mesh_shape)
    decodable = {strided(layout, mesh_shape).placements for layout in ordered_layouts(mesh_ndim, tensor_ndim)}
    shards = [Placement(dim, split_factor=pieces) for pieces in (None, factor) for dim in range(tensor_ndim)]
    for placements in itertools.product([Placement(), *shards], repeat=mesh_ndim):
        layout = Layout(placements, None)
        if layout.is_strided and placements not in decodable:
            yield layout


def groups_of(suite: str, mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    """Return all pairs of a suite, in groups that are sampled separately so that every kind of pair is included.

    The list is empty if the mesh is too small for the suite. Full tensors have about `numel` elements, except in suites
    of uneven shapes.
    """
    return [group for group in SUITES[suite](mesh_shape, numel) if group]


def cube(numel: int, ndim: int, multiple: int) -> tuple[int, ...]:
    """Return the shape of about `numel` elements with equal sides that are divisible by `multiple`."""
    side = max(round(numel ** (1 / ndim) / multiple), 1) * multiple
    return (side,) * ndim


def _crossed(sources: Iterable[Layout], targets: Iterable[Layout], shape: tuple[int, ...]) -> list[Pair]:
    return [
        Pair(source, target, shape)
        for source, target in itertools.product(sources, targets)
        if source.placements != target.placements and (source.is_strided or source.state != target.state)
    ]


def _every_pair(mesh_shape: tuple[int, ...], shape: tuple[int, ...], op: str = "sum") -> list[Pair]:
    mesh_ndim, ndim = len(mesh_shape), len(shape)
    return _crossed(plain_layouts(mesh_ndim, ndim, op), plain_layouts(mesh_ndim, ndim), shape)


def _pairs(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    suites = [_every_pair(mesh_shape, cube(numel, ndim, math.prod(mesh_shape))) for ndim in TENSOR_NDIMS]
    # There are many more pairs with Partial than others.
    groups = itertools.product((False, True), suites)
    return [[pair for pair in pairs if pair.source.has_partial == partial] for partial, pairs in groups]


def _partials(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    """Return pairs of sources with each reduce op and targets with a sum. torch's greedy planner has no path from S to
    P (F3).
    """
    mesh_ndim, shape = len(mesh_shape), cube(numel, 2, math.prod(mesh_shape))
    by_op = [[pair for pair in _every_pair(mesh_shape, shape, op) if pair.source.has_partial] for op in PARTIAL_OPS]
    to_sum = [target for target in plain_layouts(mesh_ndim, 2, "sum") if target.has_partial]
    from_shard, others = _split(_crossed(plain_layouts(mesh_ndim, 2), to_sum, shape), _from_shard_to_partial)
    return [from_shard, *by_op, others]


def _split(pairs: Iterable[Pair], condition: Callable[[Pair], bool]) -> tuple[Group, Group]:
    groups: tuple[Group, Group] = [], []
    for pair in pairs:
        groups[not condition(pair)].append(pair)
    return groups


def _from_shard_to_partial(pair: Pair) -> bool:
    return any(before.tensor_dim is not None and after.reduce_op for before, after in _moves(pair))


def _moves(pair: Pair) -> set[tuple[Placement, Placement]]:
    """Return the placements before and after of each mesh dim, without duplicates."""
    return set(zip(pair.source.placements, pair.target.placements, strict=True))


def _shard_orders(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    groups = []
    for ndim in TENSOR_NDIMS:
        layouts = list(ordered_layouts(len(mesh_shape), ndim))
        pairs = _crossed(layouts, layouts, cube(numel, ndim, math.prod(mesh_shape)))
        groups.append([pair for pair in pairs if pair.source.has_own_order or pair.target.has_own_order])
    return groups


def _uneven(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    """Pairs on tensor dims that the mesh does not divide, sharded once and twice, or with fewer elements than ranks."""
    ranks = math.prod(mesh_shape)
    side = cube(numel, 2, ranks)[0] + 1
    shapes = [(ranks + 1,), (2 * ranks + 1, 3), (ranks + 1, 3, 2), (side, side), (max(ranks - 1, 1),), (1, ranks + 1)]
    return [[pair for pair in _every_pair(mesh_shape, shape) if _is_uneven(pair, mesh_shape)] for shape in shapes]


def _is_uneven(pair: Pair, mesh_shape: tuple[int, ...]) -> bool:
    """Return whether ranks hold shards of different shapes, including empty ones, before or after."""
    return any(
        length % math.prod(mesh_shape[mesh_dim] for mesh_dim in order)
        for side in _states(pair)
        for length, order in zip(pair.shape, side.orders, strict=True)
    )


def _states(pair: Pair) -> list[State]:
    return [side.state for side in (pair.source, pair.target) if side.state is not None]


def _flattened(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    """Pairs that torch may move in one collective over the flattened mesh: all mesh dims change in the same way.

    torch computes the first group wrongly (F1): several mesh dims shard an undivided tensor dim, which is then
    gathered.
    """
    ranks = math.prod(mesh_shape)
    odd, even = (
        [pair for pair in _every_pair(mesh_shape, shape) if len(mesh_shape) > 1 and len(_moves(pair)) == 1]
        for shape in ((ranks + 1, 3), cube(numel, 2, ranks))
    )
    return [*_split(odd, lambda pair: pair.target.placements[0] == Placement() and _is_uneven(pair, mesh_shape)), even]


def _strided(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    """Return pairs of strided sources with and without an equal shard order, on tensor dims that divide evenly or
    unevenly (F2).
    """
    mesh_ndim, ranks = len(mesh_shape), math.prod(mesh_shape)
    decodable: Group = []
    undecodable: Group = []
    for ndim in (1, 2):
        shape, targets = cube(numel, ndim, 4 * ranks), list(plain_layouts(mesh_ndim, ndim))
        ordered = [layout for layout in ordered_layouts(mesh_ndim, ndim) if layout.has_own_order]
        decodable += _crossed([strided(layout, mesh_shape) for layout in ordered], targets, shape)
        undecodable += _crossed(undecodable_layouts(mesh_shape, ndim), targets, shape)
    odd = (ranks + 2, 2 * ranks - 1)
    uneven = _crossed(undecodable_layouts(mesh_shape, 2, factor=ranks), plain_layouts(mesh_ndim, 2), odd)
    return [decodable, undecodable, *_split(uneven, lambda pair: _shards_again(pair.source))]


def _shards_again(layout: Layout) -> bool:
    """Return whether two mesh dims shard one tensor dim. Then torch's ranks may disagree on sizes, and gloo aborts."""
    dims = [placement.tensor_dim for placement in layout.placements if placement.tensor_dim is not None]
    return len(set(dims)) < len(dims)


SUITES: dict[str, Callable[[tuple[int, ...], int], list[Group]]] = {
    "pairs": _pairs,
    "partials": _partials,
    "shard_orders": _shard_orders,
    "uneven": _uneven,
    "flattened": _flattened,
    "backward": lambda mesh_shape, numel: [_every_pair(mesh_shape, cube(numel, 2, math.prod(mesh_shape)))],
    "strided": _strided,
}


def sample(groups: Sequence[Group], max_pairs: int, mesh_shape: tuple[int, ...], seed: str) -> list[Pair]:
    """Return every pair, or at most `max_pairs` pairs, as equally as possible from each group. The first pairs of a
    group belong to different classes of equal pairs.

    Two pairs are equal if they differ only by the names of mesh dims of one size, and of tensor dims of one size.
    `max_pairs` 0 means all pairs. The seed must be equal on all ranks.
    """
    if not max_pairs or sum(map(len, groups)) <= max_pairs:
        return [pair for group in groups for pair in group]
    queues = [_drawn(group, mesh_shape, random.Random(f"{seed}/{number}")) for number, group in enumerate(groups)]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    chosen = itertools.islice((pair for pair in in_turn if pair is not None), max_pairs)
    ranked = {pair: number for number, pair in enumerate(itertools.chain.from_iterable(groups))}
    return sorted(chosen, key=ranked.__getitem__)


def _drawn(group: Group, mesh_shape: tuple[int, ...], draw: random.Random) -> Iterator[Pair]:
    """Yield the pairs of a group in random order, the first pair of each class before all other pairs."""
    classes, later = set(), []
    for pair in draw.sample(group, len(group)):
        key = class_of(pair, mesh_shape)
        if key in classes:
            later.append(pair)
        else:
            classes.add(key)
            yield pair
    yield from later


def class_of(pair: Pair, mesh_shape: tuple[int, ...]) -> object:
    """Return a key that is equal for pairs that differ only in names of dims; pairs with strided shards are unique."""
    if pair.source.is_strided or pair.target.is_strided:
        return str(pair), pair.shape
    images = [
        tuple(_renamed(state, mesh_names, tensor_names) for state in _states(pair))
        for mesh_names in _renamings(mesh_shape)
        for tensor_names in _renamings(pair.shape)
    ]
    return min(images), pair.shape


def _renamings(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return every permutation of dims that leaves the sizes unchanged."""
    permutations = itertools.permutations(range(len(sizes)))
    return [names for names in permutations if tuple(sizes[name] for name in names) == sizes]


def _renamed(state: State, mesh_names: tuple[int, ...], tensor_names: tuple[int, ...]) -> tuple[object, ...]:
    orders: list[tuple[int, ...]] = [()] * state.tensor_ndim
    for tensor_dim, order in enumerate(state.orders):
        orders[tensor_names[tensor_dim]] = tuple(mesh_names[mesh_dim] for mesh_dim in order)
    partials = sorted((mesh_names[mesh_dim], op) for mesh_dim, op in state.partials)
    return tuple(orders), tuple(partials)


@dataclass(frozen=True)
class Experiment:
    """One pair and planner of a case; `native` runs all-to-alls unchanged on CPU.

    `context` is called when the case opens. `measured` has results of the first opening for later openings.
    """

    pair: Pair
    planner: str
    dtype: str
    native: bool
    context: Callable[[], RankContext]
    measured: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def full(self) -> torch.Tensor:
        """Return the full tensor to redistribute."""
        return tagged(self.pair.shape, TORCH_DTYPES[self.dtype])


FieldsOf = Callable[[Experiment, PlannedRedistribution, RankContext], dict[str, Any]]


def _case_spec(
    experiment: Experiment, suite: str = "", more: Mapping[str, Any] | None = None, open_case: Any = None
) -> CaseSpec:
    """Return the case of an experiment with its opener, for a suite of the planner study if given."""
    pair, dtype, native = experiment.pair, experiment.dtype, experiment.native
    how = f"{experiment.planner}{NATIVE}" if native else experiment.planner
    params = {
        "source": str(pair.source),
        "target": str(pair.target),
        "planner": how,
        "native_all_to_all": native,
        "dtype": dtype,
        "shape": list(pair.shape),
        **(more or {}),
    }
    where = f"redistribute/{dtype}{shape_text(pair.shape)}/{pair}" + (f"/{suite}" if suite else "")
    case = Case(f"{where}/{how}", "redistribute", params)
    return CaseSpec(case, partial(open_case or open_pair, experiment), group=where)


def row_fields(experiment: Experiment, planned: PlannedRedistribution, context: RankContext) -> dict[str, Any]:
    """Return the row of a redistribution without times; the lower bound is set if neither side has a Partial."""
    pair = experiment.pair
    problem = Problem(context.mesh_shape, pair.shape, TORCH_DTYPES[experiment.dtype].itemsize)
    before, after = pair.source.state, pair.target.state
    bound = None
    if before and after and not (pair.source.has_partial or pair.target.has_partial):
        bound = least_received_bytes(problem, before, after)
    cold_s, warm_s = planned.planning_s
    return {
        "payload_bytes": problem.num_bytes,
        "wire_bytes": planned.wire_bytes,
        "group_size": context.mesh.size(),
        "mesh_dim": "x".join(context.mesh_dims),
        "backend_op": "+".join(planned.executed_as) or "none",
        "counters": {
            "path": planned.path,
            "num_collectives": len(planned.collectives),
            "wire_bytes_executed": planned.wire_bytes_executed,
            "lower_bound_bytes": bound,
            "lower_bound_ratio": planned.wire_bytes_executed / bound if bound else None,
            "planning_cold_s": cold_s,
            "planning_warm_s": warm_s,
            "predicted_s": planned.predicted_s,
            **planned.facts,
        },
    }


@contextlib.contextmanager
def open_pair(experiment: Experiment, fields_of: FieldsOf = row_fields) -> Iterator[OpenedCase]:
    """Time the redistribution itself."""
    context = experiment.context()
    with planned_pair(experiment, context) as planned:
        experiment.measured["planning_s"] = planned.planning_s
        yield opened(experiment, planned, context, fields_of)


def opened(
    experiment: Experiment, planned: PlannedRedistribution, context: RankContext, fields_of: FieldsOf = row_fields
) -> OpenedCase:
    """Return a planned redistribution, ready to run, whose result is checked against the experiment's target."""
    full_bytes = math.prod(experiment.pair.shape) * TORCH_DTYPES[experiment.dtype].itemsize
    return OpenedCase(
        lambda _: planned.call(),
        lambda: difference(planned.local_result(), experiment.full, experiment.pair, context),
        fields=fields_of(experiment, planned, context),
        stays_open=True,
        held_bytes=2 * full_bytes,
        pause=planned.switch.off,
        resume=planned.switch.on,
        starts_on=dist.group.WORLD,
    )


@contextlib.contextmanager
def planned_pair(experiment: Experiment, context: RankContext) -> Iterator[PlannedRedistribution]:
    """Plan an experiment's redistribution; the planner's torch settings remain active until the case has been timed."""
    pair, full, planning_s = experiment.pair, experiment.full, experiment.measured.get("planning_s")
    before, after = pair.source.state, pair.target.state
    source, target = dtensor_under(full, pair.source, context), torch_placements(pair.target)
    if experiment.planner == DIRECT:
        if before is None or after is None:
            raise Unsupported("direct: strided shards")
        yield exchange_between(before, after, pair.shape, source.to_local(), context, planning_s)
        return
    # `DTensor.redistribute` takes no order and no Partial; DTensor's operators do.
    needs_internals = pair.source.has_own_order or pair.target.has_own_order or pair.target.has_partial
    if before and after and not pair.source.is_strided and needs_internals:
        source = OrderedTensor(source.to_local(), context.mesh, before, full)
        target = OrderedPlacements.of(after)
    with planned_redistribution(experiment.planner, source, target, context, experiment.native, planning_s) as planned:
        yield planned


def difference(got: torch.Tensor, full: torch.Tensor, pair: Pair, context: RankContext) -> str | None:
    """Return the error in this rank's local result of redistributing `full`; None if the result is correct.

    Parts of a Partial target are first reduced, one mesh dim at a time, so all ranks must call this function together.
    """
    for mesh_dim, placement in enumerate(pair.target.placements):
        if placement.reduce_op:
            got = got.clone()
            op = REDUCTIONS.get(placement.reduce_op, dist.ReduceOp.SUM)
            dist.all_reduce(got, op, group=context.mesh.get_group(mesh_dim))
            if placement.reduce_op == "avg":
                got /= context.mesh_shape[mesh_dim]
    got, expected = got.cpu(), shard_under(full, pair.target, context)
    sides = torch_placements(pair.source), torch_placements(pair.target)
    rounding = rounding_of(*sides, context.mesh_shape, full.dtype)
    if rounding and got.shape == expected.shape and torch.allclose(got, expected, rtol=0, atol=rounding):
        return None
    return first_difference(got, expected)


def redistribution_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """Yield one case per pair and planner; the planners of a pair are adjacent, in random order.

    Raises UserError for an unknown planner, dtype or placement, or a pair whose length differs from the mesh's.
    """
    order = random.Random(context.seed)
    for sweep in scenario.redistributions:
        check_planners(sweep.planners, sweep.dtype, context.profile)
        for source, target in sweep.pairs:
            for placements in (source, target):
                _check_placements(placements, sweep.shape, context)
            pair = Pair.of("".join(source), "".join(target), sweep.shape)
            planners = planners_of(sweep, pair, context.profile)
            order.shuffle(planners)
            for name in planners:
                yield _case_spec(Experiment(pair, name, sweep.dtype, sweep.native_all_to_all, lambda: context))


def planners_of(sweep: Redistributions, pair: Pair, profile: Profile | None) -> list[str]:
    """Return the requested planners, else torch's and, with a profile, distbench's; direct for supported pairs only."""
    if sweep.planners:
        return list(sweep.planners)
    ours = [] if profile is None else ["calibrated"] if pair.target.has_partial else ["calibrated", "direct"]
    return [*TORCH_PLANNERS, *ours]


def _check_placements(placements: tuple[str, ...], shape: tuple[int, ...], context: RankContext) -> None:
    if len(placements) != len(context.mesh_dims):
        text = "".join(placements)
        raise UserError(
            f"placements {text} have {len(placements)} mesh dims, but the mesh has {len(context.mesh_dims)}"
        )
    for text in placements:
        if getattr(parse_placement(text), "dim", 0) >= len(shape):
            raise UserError(f"placement {text} shards a tensor dim that shape {shape} does not have")


def laboratory_cases(scenario: Scenario, context: RankContext) -> Iterator[CaseSpec]:
    """Yield one case per pair and planner; the planners of a pair are adjacent, in random order.

    Raises UserError for an unknown suite, planner or dtype, or planner calibrated without a profile.
    """
    order = random.Random(context.seed)
    for lab in scenario.laboratories:
        if lab.suite not in LABORATORY_SUITES:
            raise UserError(f"suite {lab.suite!r} is unknown; use {', '.join(LABORATORY_SUITES)}")
        check_planners(lab.planners, lab.dtype, context.profile)
        is_flattened, is_backward = lab.suite == "flattened", lab.suite == "backward"
        more = {
            "suite": lab.suite,
            "direction": "backward" if is_backward else "forward",
            "mesh_shape": list(context.mesh_shape),
            **({"flattened": list(context.mesh_dims)} if is_flattened else {}),
        }
        when_opened = _with_flattened_mesh(context) if is_flattened else lambda: context
        for pair in pairs_of(lab, context.mesh_shape, context.seed):
            planners = planners_for(lab, pair, context.profile)
            order.shuffle(planners)
            for name in planners:
                experiment = Experiment(pair, name, lab.dtype, lab.native_all_to_all, when_opened)
                yield _case_spec(experiment, lab.suite, more, _open_backward if is_backward else open_pair)


def _with_flattened_mesh(context: RankContext) -> Callable[[], RankContext]:
    """Return a function for the context on a mesh that also has a flattened mesh with separate groups.

    All ranks create that mesh when its first case opens, so that no other case uses a flattened mesh.
    """

    @cache
    def made() -> RankContext:
        mesh = init_device_mesh(context.device.type, context.mesh_shape, mesh_dim_names=context.mesh_dims)
        flatten_mesh(mesh, context.mesh_dims)
        return replace(context, mesh=mesh)

    return made


def pairs_of(lab: Laboratory, mesh_shape: tuple[int, ...], seed: int) -> list[Pair]:
    """Return the pairs of a suite at all of its sizes, with the same pairs at each size and on each rank."""
    sizes = lab.sizes_bytes if lab.suite in AT_EVERY_SIZE else lab.sizes_bytes[:1]
    pairs: list[Pair] = []
    for size_bytes in sizes:
        groups = groups_of(lab.suite, mesh_shape, size_bytes // DTYPE_BYTES[lab.dtype])
        pairs += sample(groups, lab.max_pairs, mesh_shape, f"{seed}/{lab.suite}")
    return pairs


def planners_for(lab: Laboratory, pair: Pair, profile: Profile | None) -> list[str]:
    """Return the requested planners, or all planners, that can redistribute a pair.

    calibrated requires a profile; direct produces no Partial and has no backward. Neither supports strided shards
    without an equal shard order. torch plans such pairs greedily with any setting, and may abort ranks, so such pairs
    run once.
    """
    decodable = pair.source.state is not None
    able = {
        "min_cost": decodable,
        "calibrated": profile is not None and decodable,
        "direct": decodable and lab.suite != "backward" and not pair.target.has_partial,
    }
    return [name for name in lab.planners or PLANNERS if able.get(name, True)]


@contextlib.contextmanager
def _open_backward(experiment: Experiment) -> Iterator[OpenedCase]:
    """Time the redistribution of the gradient from the target back to the source, with each Partial as a replica."""
    context, pair, full = experiment.context(), experiment.pair, experiment.full
    placements = (Placement() if placement.reduce_op else placement for placement in pair.source.placements)
    back = Layout.of(format_placements(placements), len(pair.shape))
    gradient = dtensor_under(full, pair.target, context)
    source = dtensor_under(full, pair.source, context).requires_grad_()
    target = torch_placements(back)
    with planned_redistribution(experiment.planner, gradient, target, context, experiment.native) as planned:
        moved = source.redistribute(context.mesh, torch_placements(pair.target))

        def call() -> Any:
            return torch.autograd.grad(moved, source, gradient, retain_graph=True)[0]

        returned = replace(experiment, pair=Pair(pair.target, back, pair.shape))
        yield opened(returned, replace(planned, call=call), context)
