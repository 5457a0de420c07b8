"""The exact cheapest path between two states: A* over the shared graph, with a lower bound of what is left to pay."""

from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

from distbench.planning.cost_profile import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, MeshCost
from distbench.planning.placement_graph import graph_of, zero_fillable
from distbench.planning.placement_states import State
from distbench.planning.step_prices import COUNTER_BITS, FORBIDDEN, PEAK_SHIFT, Pricing, Problem, unpack

# A lower bound of what is left to pay, for A*: the cheapest path when most of a state is forgotten.
#
# Forgotten are which tensor dims are sharded, in which order, and whether the target's own mesh dims shard already
# (here they always do, as do those that a zero-fill may take out of a shard at any time, here for nothing). Every real
# path maps to such an abstract one that costs no more (a pattern database, Culberson and Schaeffer 1998), so the
# bound is
# admissible and consistent. Bytes are unpadded shares in it: a padded one depends on the tensor dim that is forgotten,
# and could be larger than what the cheapest path really moves.


class Bounds(dict[int, int]):
    """Least packed price from a state with these pending bits (see `Graph`) to one that the target's bits shard."""

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
        # Sharding once more makes all else smaller, and must be gathered again.
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
        """All-gathers of these mesh dims, in the best order, while the target's own mesh dims shard."""
        cached = self._gathers.get(sharding)
        if cached is not None:
            return cached
        options = []
        for mesh_dim in range(self.mesh_ndim):
            if sharding >> mesh_dim & 1:
                label = self.share_label(ALL_GATHER, mesh_dim, self.target | sharding)
                options.append(label + self._gather(sharding ^ 1 << mesh_dim))
        self._gathers[sharding] = cost = min(options)
        return cost

    def _leave(self, bits: int, sharded: int) -> int:
        """Each of these mesh dims leaves its tensor dim, or its partial, while all of `sharded` shard."""
        total = 0
        for mesh_dim in range(self.mesh_ndim):
            if bits >> mesh_dim & 1:
                total += min([self.share_label(op, mesh_dim, sharded) for op in self.leaving_ops])
            elif bits >> mesh_dim + self.mesh_ndim & 1:
                mask = sharded & ~(1 << mesh_dim)
                reduced = self.share_label(ALL_REDUCE, mesh_dim, mask)
                total += min(reduced, self.share_label(REDUCE_SCATTER, mesh_dim, mask))
        return total


_COUNTER = (1 << COUNTER_BITS) - 1


class NoPath(Exception):
    """No path obeys the memory cap, or none exists (a shard or a partial becomes no other partial in one step)."""


@dataclass(frozen=True)
class Route:
    """A cheapest path, source and target included; bytes are those of the busiest rank.

    `peak_bytes` is the most that a step holds, its local tensors before and after; the source alone without a step.
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
    """The path of least time; then fewest bytes sent, fewest collectives, least peak. The same on every rank.

    A* (Hart, Nilsson, Raphael 1968) with the sum of what each mesh dim that must leave where it is costs at least.
    More bytes must never be cheaper by the model, and no step may hold more than `peak_cap_bytes`. `zero_fill`: torch
    makes P(sum) of a shard where the target has it.

    Raises:
        NoPath: the cap forbids every path, or there is none.
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
    """Of the paths whose fullest step holds least, the cheapest; NoPath where there is none.

    What a path holds at most is a bottleneck: Dijkstra's search, with the larger of two instead of their sum.
    """
    if source == target:
        return cheapest_route(problem, model, source, target)
    searcher = _searcher_for(problem, model, source, target, None, zero_fill)
    least_bytes = searcher.least_peak_bytes(searcher.graph.number(source), searcher.graph.number(target))
    return cheapest_route(problem, model, source, target, least_bytes, zero_fill)


def partial_ops_between(source: State, target: State) -> tuple[str, ...]:
    """The reduce ops that a path may split replicas into: none unless the target has a partial, as in torch."""
    return tuple(sorted({op for _, op in (*source.partials, *target.partials)})) if target.partials else ()


def _searcher_for(
    problem: Problem, model: MeshCost, source: State, target: State, cap: int | None, zero_fill: bool
) -> "_Searcher":
    zero_filled = zero_fillable(target) if zero_fill else ()
    return _searcher(problem, model, partial_ops_between(source, target), cap, zero_filled)


@lru_cache(maxsize=256)
def _searcher(
    problem: Problem, model: MeshCost, partial_ops: tuple[str, ...], cap: int | None, zero_filled: tuple[int, ...]
) -> "_Searcher":
    graph = graph_of(len(problem.mesh_shape), len(problem.shape), partial_ops, problem.is_even, zero_filled)
    return _Searcher(Pricing(graph, problem, model, cap))


def forget_prices() -> None:
    """Drop what is kept of single tensors, so that the next plan costs what a tensor's first one does."""
    _searcher.cache_clear()


class _Searcher:
    """One problem's prices and bounds, kept for its next plans."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing, self.graph = pricing, pricing.graph
        self._bounds: dict[int, Bounds] = {}

    def bounds(self, end: int) -> Bounds:
        mask = self.graph.sharded_masks[end]
        if mask not in self._bounds:
            self._bounds[mask] = Bounds(self.pricing, mask)
        return self._bounds[mask]

    def search(self, start: int, end: int) -> tuple[int, dict[int, int]]:
        """(the target's label, each reached state's predecessor)."""
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
        """The least that the fullest step of a path holds."""
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
        limit = "" if cap is None else f" holds at most {cap} bytes a rank at every step; allow more"
        return NoPath(f"no path from {states[start]} to {states[end]}{limit}")
