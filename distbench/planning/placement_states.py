"""Layouts of a tensor on a mesh, and torch's graph of the steps from one layout to another."""

import math
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from distbench.planning.cost_profile import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    CUT,
    PARTITION,
    REDUCE_SCATTER,
    ZERO_FILL,
)
from distbench.spec.placements import Placement, format_placements, parse_placements, shard_orders

REDUCE_OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")


class NotHandled(Exception):
    """A placement or shape that this planner leaves to torch's own planners; the message has the reason."""


@dataclass(frozen=True)
class State:
    """One layout of a tensor on a mesh; mesh dims without an entry hold replicas."""

    mesh_ndim: int
    orders: tuple[tuple[int, ...], ...]  # for each tensor dim, the mesh dims that shard it, in shard order
    partials: tuple[tuple[int, str], ...] = ()  # (mesh dim, reduce op) of pending reductions, ascending

    def __str__(self) -> str:
        return format_placements(self.placements())

    @property
    def tensor_ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.orders)

    def replicated_dims(self) -> tuple[int, ...]:
        """The mesh dims that hold replicas."""
        used_dims = {mesh_dim for order in self.orders for mesh_dim in order} | dict(self.partials).keys()
        return tuple(mesh_dim for mesh_dim in range(self.mesh_ndim) if mesh_dim not in used_dims)

    def placements(self) -> tuple[Placement, ...]:
        """Placements by mesh dim; shards have an explicit order if a tensor dim is not sharded from left to right."""
        placements = [Placement()] * self.mesh_ndim
        for mesh_dim, reduce_op in self.partials:
            placements[mesh_dim] = Placement(reduce_op=reduce_op)
        for tensor_dim, order in enumerate(self.orders):
            is_default = tuple(sorted(order)) == order
            for turn, mesh_dim in enumerate(order):
                placements[mesh_dim] = Placement(tensor_dim, None if is_default else turn)
        return tuple(placements)


def parse_state(text: str, tensor_ndim: int) -> State:
    """Parse `"S(0)R"`, `"S(0)[1]S(0)[0]"` or `"P(sum)S(1)"`; see `state_of`."""
    return state_of(parse_placements(text), tensor_ndim)


def state_of(placements: Sequence[Placement], tensor_ndim: int) -> State:
    """Return the state of placements.

    Raises:
        ValueError: shard orders that are not 0, 1, 2, ... on a tensor dim, or a strided shard.
        NotHandled: an unknown reduce op.
    """
    if any(placement.split_factor is not None for placement in placements):
        text = format_placements(placements)
        raise ValueError(f"placements {text!r} have a strided shard; write S(tensor dim)[position] for each shard")
    partials = [
        (mesh_dim, known_reduce_op(placement.reduce_op))
        for mesh_dim, placement in enumerate(placements)
        if placement.reduce_op is not None
    ]
    return State(len(placements), shard_orders(placements, tensor_ndim), tuple(partials))


def known_reduce_op(reduce_op: str) -> str:
    """Return the reduce op; NotHandled for an op that is not one of torch's plain reduce ops."""
    if reduce_op not in REDUCE_OPS:
        raise NotHandled(f"reduce op {reduce_op!r}")
    return reduce_op


def local_shape(state: State, shape: Sequence[int], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the largest local shape of any rank, in elements; every shard is a ceil-sized chunk of the remainder.

    Nested ceilings equal one ceiling of the product, so the shape is independent of the shard order.
    """
    counts = [math.prod(mesh_shape[mesh_dim] for mesh_dim in order) for order in state.orders]
    return tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))


Box = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def box_of(state: State, shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Box:
    """Return the box of one rank: for each tensor dim the interval (start, stop) of the full tensor, stop exclusive.

    `coordinate` is the rank's index along each mesh dim; partial mesh dims do not divide boxes.
    """
    box = []
    for size, order in zip(shape, state.orders, strict=True):
        start, stop = 0, size
        for mesh_dim in order:
            chunk = -(-(stop - start) // mesh_shape[mesh_dim])
            first = min(start + coordinate[mesh_dim] * chunk, stop)
            start, stop = first, min(first + chunk, stop)
        box.append((start, stop))
    return tuple(box)


@dataclass(frozen=True)
class Move:
    """A step's change of one mesh dim's placement, independent of the state before."""

    op: str  # one of `cost_profile.COLLECTIVES` or `cost_profile.LOCAL_OPS`
    mesh_dim: int
    source_dim: int = -1  # the tensor dim that the mesh dim sharded before
    target_dim: int = -1  # the tensor dim that the mesh dim shards after

    @property
    def num_copies(self) -> int:
        """Number of gathered or scattered tensor dims other than the first, which are not contiguous."""
        return (self.source_dim > 0) + (self.target_dim > 0)


# (next state, move, mask of the bits that remain pending, bit that may become pending, entry)
Edge = tuple[int, int, int, int, int]
Kind = int | tuple[int, ...]
NOTHING_ENTERED = -1


class Graph:
    """torch's graph of redistribution states, shared by all tensors of one rank; see `graph_of`.

    The legal steps are those of `DTensorRedistributePlanner.get_next_state` (torch 2.11 to 2.15) without strided
    shards: only the last mesh dim in a tensor dim's shard order may leave, and a mesh dim enters as the last. As in
    `_get_shard_to_partial_target_states` (torch 2.14 and newer), a shard becomes a partial only on a mesh dim with
    P(sum) in the target.

    States and moves have small numbers, each computed once. If all shards are even, a price depends only on the set of
    sharding mesh dims, and on whether the move's tensor dims are the first. States of equal price then share a kind,
    and moves of equal price share a number. A pending bit is set while a mesh dim must still leave its current
    placement: bit m for a shard, bit mesh_ndim + m for a partial.
    """

    def __init__(
        self,
        mesh_ndim: int,
        tensor_ndim: int,
        partial_ops: tuple[str, ...] = (),
        even: bool = False,
        zero_filled: tuple[int, ...] = (),
    ) -> None:
        self.mesh_ndim, self.tensor_ndim, self.even = mesh_ndim, tensor_ndim, even
        self.partial_ops, self.zero_filled = partial_ops, zero_filled
        self.states: list[State] = []
        self.edges: list[tuple[Edge, ...] | None] = []
        self.sharded_masks: list[int] = []
        self.dim_masks: list[tuple[int, ...]] = []
        self.kinds: list[Kind] = []
        self.moves: list[Move] = []
        self.move_facts: list[tuple[str, int, int]] = []
        self._numbers: dict[State, int] = {}
        self._move_numbers: dict[Move, int] = {}
        self._entries: dict[tuple[object, ...], int] = {}
        self._wanted: dict[int, frozenset[int]] = {}
        # Backward plans on autograd's own threads.
        self._lock = threading.RLock()

    def number(self, state: State) -> int:
        """Return the state's number. Numbers depend on earlier plans, so choices must not depend on numbers."""
        number = self._numbers.get(state)
        if number is not None:
            return number
        with self._lock:
            if state in self._numbers:
                return self._numbers[state]
            masks = tuple(sum(1 << mesh_dim for mesh_dim in order) for order in state.orders)
            self.edges.append(None)
            self.dim_masks.append(masks)
            self.sharded_masks.append(sum(masks))
            self.kinds.append(sum(masks) if self.even else masks)
            self.states.append(state)
            self._numbers[state] = len(self.states) - 1
            return self._numbers[state]

    def expand(self, number: int) -> tuple[Edge, ...]:
        """Return the steps out of a state, in an order that depends only on the state."""
        with self._lock:
            steps = legal_steps(self.states[number], self.partial_ops, self.zero_filled)
            edges = tuple(self._edge(state, move) for state, move in steps)
            self.edges[number] = edges
            return edges

    def wanted_entries(self, target: int) -> frozenset[int]:
        """Entries that bring a state nearer to the target: each prefix of the target's shard orders, each partial."""
        if target not in self._wanted:
            state = self.states[target]
            entries = [NOTHING_ENTERED]
            with self._lock:
                for tensor_dim, order in enumerate(state.orders):
                    entries += [self._entry(tensor_dim, order[:length]) for length in range(1, len(order) + 1)]
                entries += [self._entry("P", *partial) for partial in state.partials]
            self._wanted[target] = frozenset(entries)
        return self._wanted[target]

    def pending(self, source: int, target: int) -> int:
        """Return bits of the mesh dims that must leave their source placement on every path to the target."""
        start, end = self.states[source], self.states[target]
        bits = 0
        for order, end_order in zip(start.orders, end.orders, strict=True):
            num_kept = 0
            while num_kept < len(order) and order[: num_kept + 1] == end_order[: num_kept + 1]:
                num_kept += 1
            bits |= sum(1 << mesh_dim for mesh_dim in order[num_kept:])
        for mesh_dim, reduce_op in start.partials:
            if (mesh_dim, reduce_op) not in end.partials:
                bits |= 1 << (self.mesh_ndim + mesh_dim)
        return bits

    def _edge(self, state: State, move: Move) -> Edge:
        bit = 1 << move.mesh_dim
        partial_bit = bit << self.mesh_ndim
        entered = NOTHING_ENTERED
        if move.target_dim >= 0:
            entered = self._entry(move.target_dim, state.orders[move.target_dim])
        elif move.op in (PARTITION, ZERO_FILL):
            entered = self._entry("P", move.mesh_dim, dict(state.partials)[move.mesh_dim])
        if self.even:
            move = Move(move.op, move.mesh_dim, min(move.source_dim, 1), min(move.target_dim, 1))
        added = partial_bit if move.op in (PARTITION, ZERO_FILL) else bit
        return self.number(state), self._move(move), ~(bit | partial_bit), added, entered

    def _entry(self, *key: object) -> int:
        return self._entries.setdefault(key, len(self._entries))

    def _move(self, move: Move) -> int:
        number = self._move_numbers.setdefault(move, len(self.moves))
        if number == len(self.moves):
            self.moves.append(move)
            self.move_facts.append((move.op, move.mesh_dim, move.num_copies))
        return number


# The one graph of a mesh and tensor rank; see `legal_steps`.
graph_of = lru_cache(maxsize=64)(Graph)


def legal_steps(
    state: State, partial_ops: tuple[str, ...] = (), zero_filled: Collection[int] = ()
) -> Iterator[tuple[State, Move]]:
    """Return every state one step away, with the step. A partial never becomes another partial.

    Args:
        partial_ops: reduce ops of partials that a replica may become; empty unless the target has a partial.
        zero_filled: mesh dims of the target's P(sum) whose shards may become P(sum), with torch 2.14 or newer.
    """
    for source_dim, order in enumerate(state.orders):
        if not order:
            continue
        mesh_dim, orders = order[-1], [*state.orders]
        orders[source_dim] = order[:-1]
        gathered = State(state.mesh_ndim, tuple(orders), state.partials)
        yield gathered, Move(ALL_GATHER, mesh_dim, source_dim)
        if mesh_dim in zero_filled:
            # Valid next to any other partial: along its mesh dim, all ranks hold zeros or all hold their shards.
            yield _with_partial(gathered, mesh_dim, "sum"), Move(ZERO_FILL, mesh_dim, source_dim)
        for target_dim in range(state.tensor_ndim):
            if target_dim != source_dim:
                yield _pushed(gathered, target_dim, mesh_dim), Move(ALL_TO_ALL, mesh_dim, source_dim, target_dim)
    for mesh_dim, reduce_op in state.partials:
        other_partials = tuple(partial for partial in state.partials if partial != (mesh_dim, reduce_op))
        reduced = State(state.mesh_ndim, state.orders, other_partials)
        yield reduced, Move(ALL_REDUCE, mesh_dim)
        for target_dim in range(state.tensor_ndim):
            yield _pushed(reduced, target_dim, mesh_dim), Move(REDUCE_SCATTER, mesh_dim, target_dim=target_dim)
    other_ops = {reduce_op for _, reduce_op in state.partials}
    for mesh_dim in state.replicated_dims():
        for target_dim in range(state.tensor_ndim):
            yield _pushed(state, target_dim, mesh_dim), Move(CUT, mesh_dim, target_dim=target_dim)
        for reduce_op in partial_ops:
            if other_ops <= {reduce_op} or {reduce_op, *other_ops} == {"sum", "avg"}:
                yield _with_partial(state, mesh_dim, reduce_op), Move(PARTITION, mesh_dim)


def zero_fillable(target: State) -> tuple[int, ...]:
    """Return the mesh dims on which a shard may become a partial on the way to a target, with torch 2.14 and newer."""
    return tuple(mesh_dim for mesh_dim, reduce_op in target.partials if reduce_op == "sum")


def _with_partial(state: State, mesh_dim: int, reduce_op: str) -> State:
    return State(state.mesh_ndim, state.orders, tuple(sorted((*state.partials, (mesh_dim, reduce_op)))))


def _pushed(state: State, tensor_dim: int, mesh_dim: int) -> State:
    orders = list(state.orders)
    orders[tensor_dim] = (*orders[tensor_dim], mesh_dim)
    return State(state.mesh_ndim, tuple(orders), state.partials)
