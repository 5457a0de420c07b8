"""Costs of each step of a redistribution (seconds by a cost model, bytes sent, bytes held), and the exact cheapest path
between two layouts.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from distbench.planning.cost_profile import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    CUT,
    REDUCE_SCATTER,
    ZERO_FILL,
    MeshCost,
)
from distbench.planning.direct_exchange import plan_exchange
from distbench.planning.placement_states import (
    Graph,
    Kind,
    Move,
    NotHandled,
    State,
    graph_of,
    legal_steps,
    local_shape,
    zero_fillable,
)

# A label is one integer, most significant field first: femtoseconds, bytes sent, collectives, peak bytes. The lowest
# bits count labels in a search. One addition then adds three sums, one comparison is lexicographic, and both are exact.
COUNTER_BITS, PEAK_BITS, COLLECTIVE_BITS, SENT_BITS = 24, 64, 12, 64
PEAK_SHIFT = COUNTER_BITS
COLLECTIVE_SHIFT = PEAK_SHIFT + PEAK_BITS
SENT_SHIFT = COLLECTIVE_SHIFT + COLLECTIVE_BITS
TIME_SHIFT = SENT_SHIFT + SENT_BITS
FEMTOSECONDS_PER_S = 1e15
ONE_COLLECTIVE = 1 << COLLECTIVE_SHIFT
FORBIDDEN = 1 << (TIME_SHIFT + 128)
# After these ops a rank holds its previous bytes times the ranks of its group.
GROWING = (ALL_GATHER, ZERO_FILL)


@dataclass(frozen=True)
class Problem:
    """A tensor (elements along each tensor dim, bytes per element) and its mesh (ranks along each mesh dim).

    Raises:
        NotHandled: a size is symbolic, or too large for the labels.
    """

    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int

    def __post_init__(self) -> None:
        for size in (*self.mesh_shape, *self.shape):
            if type(size) is not int:
                raise NotHandled(f"size {size} is not a plain number")
        if math.prod(self.shape) * self.itemsize * math.prod(self.mesh_shape) >= 1 << (PEAK_BITS - 1):
            raise NotHandled(f"a tensor of shape {self.shape} is too large to plan")

    @property
    def is_even(self) -> bool:
        """Return whether every set of mesh dims shards every tensor dim evenly."""
        ranks = math.prod(self.mesh_shape)
        return not any(size % ranks for size in self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.itemsize

    def local_bytes(self, state: State) -> int:
        """Bytes of the largest local tensor of any rank."""
        return math.prod(local_shape(state, self.shape, self.mesh_shape)) * self.itemsize


@dataclass(frozen=True)
class StepPrice:
    """One step's price on the busiest rank."""

    seconds: float
    payload_bytes: int  # the full gathered or scattered buffer, padding included (nccl-tests' size); locally the copy
    sent_bytes: int  # by the ring algorithm
    # Its local tensors before and after the step, together; for a zero-fill also the zeros that the shard is added to,
    # because torch adds out of place.
    held_bytes: int
    is_collective: bool  # whether ranks communicate (over a mesh dim of one rank they do not)


class Pricing:
    """The prices of one problem under one cost model, computed on demand.

    The model's prices must never fall with more bytes; steps that hold more than `peak_cap_bytes` are forbidden. `rows`
    maps a kind of state and a move's number to (packed price, held bytes shifted into place).
    """

    def __init__(self, graph: Graph, problem: Problem, model: MeshCost, peak_cap_bytes: int | None) -> None:
        self.graph, self.problem, self.model, self.peak_cap_bytes = graph, problem, model, peak_cap_bytes
        self.counts, self.even = [1], graph.even  # of ranks in every set of mesh dims, indexed by the set's bits
        for size in problem.mesh_shape:
            self.counts += [count * size for count in self.counts]
        self.mesh_shape, self.num_bytes = problem.mesh_shape, problem.num_bytes
        self.rows: defaultdict[Kind, dict[int, tuple[int, int]]] = defaultdict(dict)
        self._labels: dict[tuple[str, int, int, int], int] = {}

    def label(self, node: int, number: int) -> tuple[int, int]:
        """Return (packed price, held bytes shifted into place) of a step; the price is FORBIDDEN above the cap."""
        graph = self.graph
        mask = graph.sharded_masks[node]
        if self.even:
            op, mesh_dim, num_copies = graph.move_facts[number]
            before, size = self.num_bytes // self.counts[mask], self.mesh_shape[mesh_dim]
            held_bytes = _even_held_bytes(op, before, size)
            key = op, mesh_dim, mask, num_copies
            packed = self._labels.get(key) or self._even_label(*key)
        else:
            price = self.price(mask, graph.dim_masks[node], graph.moves[number])
            held_bytes, packed = price.held_bytes, pack(price.seconds, price.sent_bytes, price.is_collective)
        if self.peak_cap_bytes is not None and held_bytes > self.peak_cap_bytes:
            return FORBIDDEN, 0
        return packed, held_bytes << PEAK_SHIFT

    def price(self, sharded_mask: int, dim_masks: Sequence[int], move: Move) -> StepPrice:
        """Return the price of a step out of a state whose tensor dims are sharded by these mesh dims."""
        op, mesh_dim = move.op, move.mesh_dim
        size = self.mesh_shape[mesh_dim]
        before, after, payload = self._step_bytes(dim_masks, move, size)
        timed: float = payload
        if not self.model.pads:
            timed = self.num_bytes / self.counts[sharded_mask] * (size if op in GROWING else 1)
        seconds = self.model.seconds(op, mesh_dim, timed, move.num_copies)
        is_collective = op in COLLECTIVES and size > 1
        held_bytes = before + after * (2 if op == ZERO_FILL else 1)
        return StepPrice(seconds, payload, _sent_bytes(op, payload, size), held_bytes, is_collective)

    def share_label(self, op: str, mesh_dim: int, mask: int) -> int:
        """Return a packed lower bound of a collective from a state whose sharding mesh dims are `mask`.

        The bound is the price of an unpadded share without copies, for any sharded tensor dim.
        """
        if self.even:
            return self._labels.get((op, mesh_dim, mask, 0)) or self._even_label(op, mesh_dim, mask, 0)
        size = self.mesh_shape[mesh_dim]
        payload = self.num_bytes / self.counts[mask] * (size if op == ALL_GATHER else 1) * (1 - 1e-12)
        return pack(self.model.seconds(op, mesh_dim, payload, 0), _sent_bytes(op, int(payload), size), size > 1)

    def _even_label(self, op: str, mesh_dim: int, mask: int, num_copies: int) -> int:
        size = self.mesh_shape[mesh_dim]
        payload = self.num_bytes // self.counts[mask]
        if op in GROWING:
            payload *= size
        elif op == CUT:
            payload //= size
        seconds = self.model.seconds(op, mesh_dim, payload, num_copies)
        packed = pack(seconds, _sent_bytes(op, payload, size), size > 1 and op in COLLECTIVES)
        self._labels[op, mesh_dim, mask, num_copies] = packed
        return packed

    def _step_bytes(self, dim_masks: Sequence[int], move: Move, size: int) -> tuple[int, int, int]:
        shape, itemsize, bit = self.problem.shape, self.problem.itemsize, 1 << move.mesh_dim
        sizes = [-(-n // self.counts[mask]) for n, mask in zip(shape, dim_masks, strict=True)]
        after_sizes, padded = list(sizes), list(sizes)
        if move.source_dim >= 0:
            source_count = self.counts[dim_masks[move.source_dim] & ~bit]
            after_sizes[move.source_dim] = -(-shape[move.source_dim] // source_count)
        if move.target_dim >= 0:
            target_count = self.counts[dim_masks[move.target_dim] | bit]
            after_sizes[move.target_dim] = -(-shape[move.target_dim] // target_count)
            padded[move.target_dim] = after_sizes[move.target_dim] * size
        before, after, payload = (math.prod(lengths) * itemsize for lengths in (sizes, after_sizes, padded))
        if move.op == ALL_GATHER:
            payload = before * size
        elif move.op in (CUT, ZERO_FILL):
            payload = after
        return before, after, payload


class PricedStep(NamedTuple):
    """One step of a path: states before and after, move, and price."""

    source: State
    target: State
    move: Move
    price: StepPrice


def priced_steps(problem: Problem, model: MeshCost, states: Sequence[State]) -> list[PricedStep]:
    """Price a path's steps on the busiest rank; ValueError if neighbours are not one legal step apart."""
    # This is a separate graph: `price` needs no shared numbers, and prices of uneven shards are also right for even
    # shards.
    graph = Graph(len(problem.mesh_shape), len(problem.shape))
    pricing = Pricing(graph, problem, model, None)
    steps = []
    for source, target in pairwise(states):
        ops = tuple(sorted({op for _, op in target.partials}))
        legal = legal_steps(source, ops, zero_fillable(target))
        move = next((move for following, move in legal if following == target), None)
        if move is None:
            raise ValueError(f"no single step leads from {source} to {target}")
        masks = [sum(1 << mesh_dim for mesh_dim in order) for order in source.orders]
        steps.append(PricedStep(source, target, move, pricing.price(sum(masks), masks, move)))
    return steps


def least_received_bytes(problem: Problem, source: State, target: State) -> int:
    """Return the receive lower bound: bytes of the target minus the source, on the rank with most missing bytes.

    Raises NotHandled if one side has a partial.
    """
    if source.partials:
        raise NotHandled("the least received bytes of partial sums depend on the ranks that add them")
    return max(plan_exchange(source, target, problem.shape, problem.mesh_shape).received) * problem.itemsize


def pack(seconds: float, sent_bytes: int, is_collective: bool) -> int:
    """Pack everything except the peak into one label."""
    label = int(seconds * FEMTOSECONDS_PER_S + 0.5) << TIME_SHIFT
    return label + (sent_bytes << SENT_SHIFT) + ONE_COLLECTIVE if is_collective else label


def unpack(label: int) -> tuple[float, int, int, int]:
    """Return (seconds, bytes sent, collectives, peak bytes) of a search's label."""
    sent = label >> SENT_SHIFT & (1 << SENT_BITS) - 1
    num_collectives = label >> COLLECTIVE_SHIFT & (1 << COLLECTIVE_BITS) - 1
    return (label >> TIME_SHIFT) / FEMTOSECONDS_PER_S, sent, num_collectives, label >> PEAK_SHIFT & (1 << PEAK_BITS) - 1


def _even_held_bytes(op: str, before: int, size: int) -> int:
    if op in GROWING:
        return before + before * size * (2 if op == ZERO_FILL else 1)
    if op in (REDUCE_SCATTER, CUT):
        return before + before // size
    return before * 2


def _sent_bytes(op: str, payload: int, size: int) -> int:
    if op not in COLLECTIVES:
        return 0
    return payload * (size - 1) // size * (2 if op == ALL_REDUCE else 1)


class Bounds(dict[int, int]):
    """Lower bounds of the remaining price for A*: least packed prices by pending bits (see `Graph`) to any state that
    the target's mesh dims shard.

    A bound ignores the sharded tensor dims and their shard orders. The target's mesh dims count as sharding from the
    start. Mesh dims that a zero-fill may release at any time count as sharding too, here at no cost. Every real path
    maps to an abstract path that costs no more (a pattern database, Culberson and Schaeffer 1998), so the bound is
    admissible and consistent. Bytes are unpadded shares, because padding depends on the ignored tensor dim and could
    exceed the bytes of the cheapest path.
    """

    def __init__(self, pricing: Pricing, target: int) -> None:
        super().__init__()
        graph = pricing.graph
        self.mesh_ndim, self.share_label = graph.mesh_ndim, pricing.share_label
        self.zero_filled = sum(1 << mesh_dim for mesh_dim in graph.zero_filled)
        self.target = target | self.zero_filled
        self.others = ((1 << graph.mesh_ndim) - 1) & ~self.target
        self.leaving_ops = (ALL_GATHER, ALL_TO_ALL) if graph.tensor_ndim > 1 else (ALL_GATHER,)
        self._gathers = {0: 0}

    def __missing__(self, bits: int) -> int:
        gathered = bits & self.others
        least = self._gather(gathered)
        if rest := (bits ^ gathered) & ~self.zero_filled:
            least += self._leave(rest, self.target | gathered)
        # One more shard makes all other steps smaller, but must be gathered again.
        unsharded = self.others & ~gathered
        while unsharded:
            bit = unsharded & -unsharded
            unsharded ^= bit
            alternative = self[bits | bit]
            if alternative < least:
                least = alternative
        self[bits] = least
        return least

    def _gather(self, sharding: int) -> int:
        """Return the price of all-gathers of these mesh dims, in the best order, while the target's mesh dims shard."""
        if sharding not in self._gathers:
            self._gathers[sharding] = min(
                self.share_label(ALL_GATHER, mesh_dim, self.target | sharding) + self._gather(sharding ^ 1 << mesh_dim)
                for mesh_dim in range(self.mesh_ndim)
                if sharding >> mesh_dim & 1
            )
        return self._gathers[sharding]

    def _leave(self, bits: int, sharded: int) -> int:
        """Return the price of moving each of these mesh dims out of its shard or partial while `sharded` shard."""
        total = 0
        for mesh_dim in range(self.mesh_ndim):
            if bits >> mesh_dim & 1:
                total += min([self.share_label(op, mesh_dim, sharded) for op in self.leaving_ops])
            elif bits >> mesh_dim + self.mesh_ndim & 1:
                mask = sharded & ~(1 << mesh_dim)
                total += min([self.share_label(op, mesh_dim, mask) for op in (ALL_REDUCE, REDUCE_SCATTER)])
        return total


_COUNTER = (1 << COUNTER_BITS) - 1


class NoPath(Exception):
    """No path fits the memory cap, or no path exists: no step converts a shard or a partial to another partial."""


@dataclass(frozen=True)
class Route:
    """A cheapest path, source and target included; bytes are of the busiest rank.

    `peak_bytes` is the largest size of a step's local tensors before and after; for no steps, the source's size.
    """

    states: tuple[State, ...]
    seconds: float
    sent_bytes: int
    num_collectives: int
    peak_bytes: int


def cheapest_route(
    problem: Problem,
    model: MeshCost,
    source: State,
    target: State,
    peak_cap_bytes: int | None = None,
    zero_fill: bool = False,
) -> Route:
    """Return the path of least time, then fewest bytes sent, fewest collectives and least peak; equal on all ranks.

    The search is A* (Hart, Nilsson, Raphael 1968). The model's prices must never fall with more bytes, and no step may
    hold more than `peak_cap_bytes`. `zero_fill`: torch can convert a shard to the target's P(sum).

    Raises:
        NoPath: no path exists, or the cap forbids every path.
    """
    searcher = _searcher_for(problem, model, source, target, peak_cap_bytes, zero_fill)
    graph = searcher.graph
    start, end = graph.number(source), graph.number(target)
    if start == end:
        return Route((source,), 0.0, 0, 0, problem.local_bytes(source))
    label, parents = searcher.search(start, end)
    path = [end]
    while path[-1] != start:
        path.append(parents[path[-1]])
    return Route(tuple([graph.states[node] for node in reversed(path)]), *unpack(label))


def least_peak_route(problem: Problem, model: MeshCost, source: State, target: State, zero_fill: bool = False) -> Route:
    """Return the cheapest of the paths with the least peak; NoPath if no path exists.

    The peak is found by Dijkstra's search with the larger of two peaks instead of their sum.
    """
    if source == target:
        return cheapest_route(problem, model, source, target)
    searcher = _searcher_for(problem, model, source, target, None, zero_fill)
    least_bytes = searcher.least_peak_bytes(searcher.graph.number(source), searcher.graph.number(target))
    return cheapest_route(problem, model, source, target, least_bytes, zero_fill)


def _searcher_for(
    problem: Problem, model: MeshCost, source: State, target: State, cap: int | None, zero_fill: bool
) -> "_Searcher":
    # As in torch, a path splits replicas into parts only if the target has a partial.
    ops = {op for _, op in (*source.partials, *target.partials)} if target.partials else set()
    return _searcher(problem, model, tuple(sorted(ops)), cap, zero_fillable(target) if zero_fill else ())


@lru_cache(maxsize=256)
def _searcher(
    problem: Problem, model: MeshCost, partial_ops: tuple[str, ...], cap: int | None, zero_filled: tuple[int, ...]
) -> "_Searcher":
    graph = graph_of(len(problem.mesh_shape), len(problem.shape), partial_ops, problem.is_even, zero_filled)
    return _Searcher(Pricing(graph, problem, model, cap))


def forget_prices() -> None:
    """Drop cached data of single tensors, so that the next plan takes as long as a tensor's first plan."""
    _searcher.cache_clear()


class _Searcher:
    """One problem's prices and bounds, cached for later plans."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing, self.graph = pricing, pricing.graph
        self._bounds: dict[int, Bounds] = {}

    def bounds(self, end: int) -> Bounds:
        mask = self.graph.sharded_masks[end]
        if mask not in self._bounds:
            self._bounds[mask] = Bounds(self.pricing, mask)
        return self._bounds[mask]

    def search(self, start: int, end: int) -> tuple[int, dict[int, int]]:
        """Return (the target's label, each reached state's predecessor)."""
        graph, price, rows = self.graph, self.pricing.label, self.pricing.rows
        edges_of, kinds, end_entries, bounds = graph.edges, graph.kinds, graph.wanted_entries(end), self.bounds(end)
        best = {start: 0}
        parents: dict[int, int] = {}
        queue = [(start, graph.pending(start, end), 0, 0)]
        heap = [0]
        known_path = FORBIDDEN
        while heap:
            node, pending, cost, peak = queue[heappop(heap) & _COUNTER]
            if node == end:
                return cost + peak, parents
            if best[node] < cost + peak:
                continue
            row = rows[kinds[node]]
            for following, move, leaves, adds, entered in edges_of[node] or graph.expand(node):
                step_price = row.get(move)
                if step_price is None:
                    step_price = row[move] = price(node, move)
                total, next_peak = step_price
                total += cost
                if next_peak < peak:
                    next_peak = peak
                label = total + next_peak
                if following in best and best[following] <= label:
                    continue
                bits = pending & leaves
                if entered not in end_entries:
                    bits |= adds
                entry = label + bounds[bits] + len(queue)
                if entry > known_path:
                    continue
                if following == end:
                    known_path = entry
                best[following] = label
                parents[following] = node
                heappush(heap, entry)
                queue.append((following, bits, total, next_peak))
        raise self._no_path(start, end)

    def least_peak_bytes(self, start: int, end: int) -> int:
        """Return the least peak bytes of any path."""
        graph, price, rows = self.graph, self.pricing.label, self.pricing.rows
        best, heap = {start: 0}, [(0, start)]
        while heap:
            peak, node = heappop(heap)
            if node == end:
                return peak >> PEAK_SHIFT
            if best[node] < peak:
                continue
            row = rows[graph.kinds[node]]
            for following, move, *_ in graph.edges[node] or graph.expand(node):
                step_price = row.get(move)
                if step_price is None:
                    step_price = row[move] = price(node, move)
                next_peak = max(peak, step_price[1])
                if following not in best or next_peak < best[following]:
                    best[following] = next_peak
                    heappush(heap, (next_peak, following))
        raise self._no_path(start, end)

    def _no_path(self, start: int, end: int) -> NoPath:
        cap, states = self.pricing.peak_cap_bytes, self.graph.states
        limit = "" if cap is None else f" holds at most {cap} bytes per rank at every step; allow more"
        return NoPath(f"no path from {states[start]} to {states[end]}{limit}")
