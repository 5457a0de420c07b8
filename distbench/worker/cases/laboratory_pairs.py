"""Which layouts each suite of the laboratory redistributes, all pairs or a sample by symmetry. Plain data, no torch."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from distbench.planning import State
from distbench.spec.layouts import Placement
from distbench.worker.redistribute.tensor_layout import Layout, Pair

PARTIAL_OPS = ("sum", "avg", "max", "min")
TENSOR_NDIMS = (1, 2, 3)
Group = list[Pair]


def plain_layouts(mesh_ndim: int, tensor_ndim: int, partial_op: str | None = None) -> Iterator[Layout]:
    """Every layout of R and S(d), and of Partial with one reduce op where one is given."""
    choices = ["R", *(f"S({dim})" for dim in range(tensor_ndim)), *([f"P({partial_op})"] if partial_op else [])]
    for placements in itertools.product(choices, repeat=mesh_ndim):
        yield Layout.of("".join(placements), tensor_ndim)


def ordered_layouts(mesh_ndim: int, tensor_ndim: int) -> Iterator[Layout]:
    """Every layout of R and S(d) in every shard order."""
    for layout in plain_layouts(mesh_ndim, tensor_ndim):
        assert layout.state is not None
        for orders in itertools.product(*(itertools.permutations(order) for order in layout.state.orders)):
            state = State(mesh_ndim, tuple(orders))
            yield Layout(state.placements(), state)


def strided(layout: Layout, mesh_shape: Sequence[int]) -> Layout:
    """The same layout with strided shards in the place of shard orders, as FSDP2 over TP writes it.

    A mesh dim's split factor is the product of the mesh dims to its right that shard the same tensor dim before it.
    """
    assert layout.state is not None
    placements = list(layout.placements)
    for tensor_dim, order in enumerate(layout.state.orders):
        for turn, mesh_dim in enumerate(order):
            factor = math.prod(mesh_shape[earlier] for earlier in order[:turn] if earlier > mesh_dim)
            placements[mesh_dim] = Placement(tensor_dim, split_factor=None if factor == 1 else factor)
    return Layout(tuple(placements), layout.state)


def undecodable_layouts(mesh_shape: Sequence[int], tensor_ndim: int, factor: int = 2) -> Iterator[Layout]:
    """Every layout of R, S(d) and strided shards of one split factor that no shard order gives."""
    mesh_ndim = len(mesh_shape)
    known = {strided(layout, mesh_shape).placements for layout in ordered_layouts(mesh_ndim, tensor_ndim)}
    shards = [Placement(dim, split_factor=pieces) for pieces in (None, factor) for dim in range(tensor_ndim)]
    for placements in itertools.product([Placement(), *shards], repeat=mesh_ndim):
        layout = Layout(placements, None)
        if layout.is_strided and placements not in known:
            yield layout


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
    # Pairs with Partial outnumber the others.
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
    gathered = [pair for pair in odd if pair.target.placements[0] == Placement() and _is_uneven(pair, mesh_shape)]
    even = [pair for pair in _every_pair(mesh_shape, cube(numel, 2, ranks)) if _go_together(pair)]
    return [gathered, [pair for pair in odd if pair not in gathered], even]


def _go_together(pair: Pair) -> bool:
    sides = list(zip(pair.source.placements, pair.target.placements, strict=True))
    return len(sides) > 1 and len(set(sides)) == 1


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
    "backward": lambda mesh_shape, numel: [_every_pair(mesh_shape, cube(numel, 2, math.prod(mesh_shape)))],
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
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    chosen = itertools.islice((pair for pair in in_turn if pair is not None), max_pairs)
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
    every = itertools.permutations(range(len(sizes)))
    return [names for names in every if tuple(sizes[name] for name in names) == sizes]


def _renamed(state: State, mesh_names: tuple[int, ...], tensor_names: tuple[int, ...]) -> tuple[object, ...]:
    orders: list[tuple[int, ...]] = [()] * state.tensor_ndim
    for tensor_dim, order in enumerate(state.orders):
        orders[tensor_names[tensor_dim]] = tuple(mesh_names[mesh_dim] for mesh_dim in order)
    partials = sorted((mesh_names[mesh_dim], op) for mesh_dim, op in state.partials)
    return tuple(orders), tuple(partials)
