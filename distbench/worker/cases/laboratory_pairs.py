"""Which pairs each suite of the laboratory redistributes, all of them or a sample by symmetry. Plain data, no torch."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from distbench.planning import State
from distbench.spec.layouts import Placement
from distbench.worker.cases.laboratory_layouts import ordered_layouts, plain_layouts, strided, undecodable_layouts
from distbench.worker.redistribute.tensor_layout import Layout, Pair

PARTIAL_OPS = ("sum", "avg", "max", "min")
TENSOR_NDIMS = (1, 2, 3)
Group = list[Pair]


def groups_of(suite: str, mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    """All pairs of a suite, in groups that are sampled apart so that a rare kind is never left out.

    None where a mesh is too small for a suite. The full tensor has about `numel` elements; suites on awkward shapes
    choose their own.
    """
    return [group for group in SUITES[suite](mesh_shape, numel) if group]


def cube(numel: int, ndim: int, multiple: int) -> tuple[int, ...]:
    """The shape nearest to `numel` elements whose sides are equal and divisible by `multiple`."""
    side = max(round(numel ** (1 / ndim) / multiple), 1) * multiple
    return (side,) * ndim


def _crossed(sources: Iterable[Layout], targets: Iterable[Layout], shape: tuple[int, ...]) -> Iterator[Pair]:
    """Every source with every target that is another layout."""
    kept = list(targets)
    for source in sources:
        for target in kept:
            if source.placements != target.placements and (source.is_strided or source.state != target.state):
                yield Pair(source, target, shape)


def _every_pair(mesh_shape: tuple[int, ...], shape: tuple[int, ...], op: str = "sum") -> list[Pair]:
    mesh_ndim, ndim = len(mesh_shape), len(shape)
    return list(_crossed(plain_layouts(mesh_ndim, ndim, op), plain_layouts(mesh_ndim, ndim), shape))


def _pairs(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    shapes = [cube(numel, ndim, math.prod(mesh_shape)) for ndim in TENSOR_NDIMS]
    every = [_every_pair(mesh_shape, shape) for shape in shapes]
    # Pairs with Partial outnumber the others, which alone can go direct.
    return [
        [pair for pair in pairs if pair.source.has_partial == partial] for partial in (False, True) for pairs in every
    ]


def _partials(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    """Sources with each reduce op, and targets with a sum: torch's greedy planner has no way from S to P (F3)."""
    mesh_ndim, shape = len(mesh_shape), cube(numel, 2, math.prod(mesh_shape))
    by_op = [[pair for pair in _every_pair(mesh_shape, shape, op) if pair.source.has_partial] for op in PARTIAL_OPS]
    to_sum = [target for target in plain_layouts(mesh_ndim, 2, "sum") if target.has_partial]
    to_partial = list(_crossed(plain_layouts(mesh_ndim, 2), to_sum, shape))
    sharded = [pair for pair in to_partial if _from_shard_to_partial(pair)]
    return [sharded, *by_op, [pair for pair in to_partial if not _from_shard_to_partial(pair)]]


def _from_shard_to_partial(pair: Pair) -> bool:
    sides = zip(pair.source.placements, pair.target.placements, strict=True)
    return any(before.tensor_dim is not None and after.reduce_op for before, after in sides)


def _shard_orders(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    groups = []
    for ndim in TENSOR_NDIMS:
        layouts = list(ordered_layouts(len(mesh_shape), ndim))
        pairs = _crossed(layouts, layouts, cube(numel, ndim, math.prod(mesh_shape)))
        groups.append([pair for pair in pairs if pair.source.has_own_order or pair.target.has_own_order])
    return groups


def _uneven(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    """Dims that do not divide, sharded once and twice, and dims of fewer elements than ranks."""
    ranks = math.prod(mesh_shape)
    side = cube(numel, 2, ranks)[0] + 1
    shapes = [(ranks + 1,), (2 * ranks + 1, 3), (ranks + 1, 3, 2), (side, side), (max(ranks - 1, 1),), (1, ranks + 1)]
    return [[pair for pair in _every_pair(mesh_shape, shape) if _is_uneven(pair, mesh_shape)] for shape in shapes]


def _is_uneven(pair: Pair, mesh_shape: tuple[int, ...]) -> bool:
    """Whether ranks hold shards of different shapes, empty ones included, before or after."""
    orders = [(length, order) for side in _states(pair) for length, order in zip(pair.shape, side.orders, strict=True)]
    return any(length % math.prod(mesh_shape[mesh_dim] for mesh_dim in order) for length, order in orders)


def _states(pair: Pair) -> list[State]:
    return [side.state for side in (pair.source, pair.target) if side.state is not None]


def _flattened(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    """Pairs that torch may move in one collective over the flattened mesh: all mesh dims go the same way.

    The first group is what it gets wrong (F1): a dim that does not divide, sharded by several mesh dims and gathered.
    """
    ranks = math.prod(mesh_shape)
    odd = [pair for pair in _every_pair(mesh_shape, (ranks + 1, 3)) if _go_together(pair)]
    gathered = [pair for pair in odd if _is_gathered(pair) and _is_uneven(pair, mesh_shape)]
    even = [pair for pair in _every_pair(mesh_shape, cube(numel, 2, ranks)) if _go_together(pair)]
    return [gathered, [pair for pair in odd if pair not in gathered], even]


def _go_together(pair: Pair) -> bool:
    sides = list(zip(pair.source.placements, pair.target.placements, strict=True))
    return len(sides) > 1 and len(set(sides)) == 1


def _is_gathered(pair: Pair) -> bool:
    return pair.source.placements[0].tensor_dim is not None and pair.target.placements[0] == Placement()


def _backward(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    return [_every_pair(mesh_shape, cube(numel, 2, math.prod(mesh_shape)))]


def _strided(mesh_shape: tuple[int, ...], numel: int) -> list[Group]:
    """Strided sources that a shard order gives, and those that none gives, on dims that divide and not (F2)."""
    mesh_ndim, ranks = len(mesh_shape), math.prod(mesh_shape)
    decodable: Group = []
    undecodable: Group = []
    for ndim in (1, 2):
        shape, targets = cube(numel, ndim, 4 * ranks), list(plain_layouts(mesh_ndim, ndim))
        ordered = [layout for layout in ordered_layouts(mesh_ndim, ndim) if layout.has_own_order]
        decodable += _crossed([strided(layout, mesh_shape) for layout in ordered], targets, shape)
        undecodable += _crossed(undecodable_layouts(mesh_shape, ndim), targets, shape)
    odd = (ranks + 2, 2 * ranks - 1)
    uneven = list(_crossed(undecodable_layouts(mesh_shape, 2, factor=ranks), plain_layouts(mesh_ndim, 2), odd))
    nested = [pair for pair in uneven if _shards_again(pair.source)]
    return [decodable, undecodable, nested, [pair for pair in uneven if not _shards_again(pair.source)]]


def _shards_again(layout: Layout) -> bool:
    """Whether two mesh dims shard one tensor dim: there torch's ranks may disagree on sizes, and gloo kills them."""
    dims = [placement.tensor_dim for placement in layout.placements if placement.tensor_dim is not None]
    return len(set(dims)) < len(dims)


SUITES: dict[str, Callable[[tuple[int, ...], int], list[Group]]] = {
    "pairs": _pairs,
    "partials": _partials,
    "shard_orders": _shard_orders,
    "uneven": _uneven,
    "flattened": _flattened,
    "backward": _backward,
    "strided": _strided,
}


def sample(groups: Sequence[Group], max_pairs: int, mesh_shape: tuple[int, ...], seed: str) -> list[Pair]:
    """Every pair, or at most `max_pairs`: one of each class of equal pairs first, groups in turn.

    Two pairs are equal if they differ only by the names of mesh dims of one size, and of tensor dims of one size.
    `max_pairs` of 0 takes all; the seed must be the same on every rank.
    """
    if not max_pairs or sum(map(len, groups)) <= max_pairs:
        return [pair for group in groups for pair in group]
    queues = [_drawn(group, mesh_shape, random.Random(f"{seed}/{number}")) for number, group in enumerate(groups)]
    chosen: list[Pair] = []
    while len(chosen) < max_pairs:
        for queue in list(queues):
            pair = next(queue, None)
            if pair is None:
                queues.remove(queue)
            elif len(chosen) < max_pairs:
                chosen.append(pair)
    ranked = {pair: number for number, pair in enumerate(itertools.chain.from_iterable(groups))}
    return sorted(chosen, key=ranked.__getitem__)


def _drawn(group: Group, mesh_shape: tuple[int, ...], draw: random.Random) -> Iterator[Pair]:
    """The pairs of a group in random order, the first of each class before all others."""
    seen, later = set(), []
    for pair in draw.sample(group, len(group)):
        key = class_of(pair, mesh_shape)
        if key in seen:
            later.append(pair)
        else:
            seen.add(key)
            yield pair
    yield from later


def class_of(pair: Pair, mesh_shape: tuple[int, ...]) -> object:
    """The same for pairs that differ only by renaming; a pair with strided shards is a class of its own."""
    if pair.source.is_strided or pair.target.is_strided:
        return str(pair), pair.shape
    images = [
        tuple(_renamed(state, mesh_names, tensor_names) for state in _states(pair))
        for mesh_names in _renamings(mesh_shape)
        for tensor_names in _renamings(pair.shape)
    ]
    return min(images), pair.shape


def _renamings(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every way to number the dims anew that leaves their sizes in place."""
    numbers = range(len(sizes))
    return [
        names for names in itertools.permutations(numbers) if all(sizes[names[dim]] == sizes[dim] for dim in numbers)
    ]


def _renamed(state: State, mesh_names: tuple[int, ...], tensor_names: tuple[int, ...]) -> tuple[object, ...]:
    orders: list[tuple[int, ...]] = [()] * state.tensor_ndim
    for tensor_dim, order in enumerate(state.orders):
        orders[tensor_names[tensor_dim]] = tuple(mesh_names[mesh_dim] for mesh_dim in order)
    partials = sorted((mesh_names[mesh_dim], op) for mesh_dim, op in state.partials)
    return tuple(orders), tuple(partials)
