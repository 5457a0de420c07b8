"""One all-to-all over the whole mesh instead of a path: who sends which box of the tensor to whom.

Ranks along partial mesh dims hold parts of the same boxes. A receiver gets every part of what it wants and reduces them
itself; where that is too much, one exchange reduces and leaves each rank a share, and a second one moves the shares.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from distbench.planning.states import Box, NotHandled, State, box_of


@dataclass(frozen=True)
class Transfer:
    """A box of the full tensor on its way from one flat mesh position (row-major) to another."""

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True)
class Exchange:
    """All transfers of a redistribution, the same on every rank.

    Args:
        transfers: by receiver, then by where the box lies in the tensor. None: the target is already local everywhere.
        source_boxes: what each flat mesh position holds before; `target_boxes`: after.
        parts: which part of a reduction each position holds, the same number where they hold the same part.
        reduce_op: what puts the parts together ("sum", "min", ...); None where there is one.
        num_averaged: what a sum of the parts is to be divided by.
    """

    transfers: tuple[Transfer, ...]
    source_boxes: tuple[Box, ...]
    target_boxes: tuple[Box, ...]
    parts: tuple[int, ...]
    reduce_op: str | None = None
    num_averaged: int = 1

    @property
    def num_parts(self) -> int:
        """Of how many parts each element is put together."""
        return max(self.parts) + 1

    @property
    def changes_nothing(self) -> bool:
        """Whether every rank already holds its target."""
        return self.reduce_op is None and self.source_boxes == self.target_boxes

    @cached_property
    def received(self) -> list[int]:
        """Elements that each position receives."""
        found = [0] * len(self.target_boxes)
        for transfer in self.transfers:
            found[transfer.receiver] += volume(transfer.box)
        return found

    @cached_property
    def sent(self) -> list[int]:
        """Elements that each position sends."""
        found = [0] * len(self.source_boxes)
        for transfer in self.transfers:
            found[transfer.sender] += volume(transfer.box)
        return found

    @cached_property
    def copied(self) -> list[int]:
        """Elements that each position copies or adds: what does not lie in one piece, what it keeps, and every part."""
        packed: list[set[Box]] = [set() for _ in self.source_boxes]
        found = [0] * len(self.target_boxes)
        for transfer in self.transfers:
            if not is_contiguous(transfer.box, self.source_boxes[transfer.sender]):
                packed[transfer.sender].add(transfer.box)
            if self.reduce_op is None and not is_contiguous(transfer.box, self.target_boxes[transfer.receiver]):
                found[transfer.receiver] += volume(transfer.box)
        for position, (before, after) in enumerate(zip(self.source_boxes, self.target_boxes, strict=True)):
            found[position] += sum(map(volume, packed[position]))
            found[position] += (
                (self.num_parts - 1) * volume(after) if self.reduce_op else volume(overlap(before, after))
            )
        return found

    def load(self) -> tuple[int, float, int]:
        """(elements that the busiest position sends or receives, how often that many the busiest copies or adds,
        transfers that the busiest sends or receives).

        Its time depends on these; all are 0 where nobody sends.
        """
        busiest = max(*self.sent, *self.received)
        if not busiest:
            return 0, 0.0, 0
        ends = (Counter(one.sender for one in self.transfers), Counter(one.receiver for one in self.transfers))
        return busiest, max(self.copied) / busiest, max(max(end.values()) for end in ends)


def volume(box: Box) -> int:
    """Elements in a box."""
    return math.prod(stop - start for start, stop in box)


def overlap(box: Box, other: Box) -> Box:
    """What two boxes share; of volume 0 where they share nothing."""
    starts = [max(a[0], b[0]) for a, b in zip(box, other, strict=True)]
    stops = [min(a[1], b[1]) for a, b in zip(box, other, strict=True)]
    return tuple((start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))


def is_contiguous(part: Box, box: Box) -> bool:
    """Whether a part of a box lies in one piece in a contiguous tensor of the box."""
    below = [stop - start for start, stop in part]
    for (start, stop), held in zip(reversed(part), reversed(box), strict=True):
        below.pop()
        if (start, stop) != held:
            return math.prod(below) == 1
    return True


def plan_direct(
    source: State,
    target: State,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    seconds_of: Callable[[Exchange], float] | None = None,
) -> tuple[tuple[State, Exchange], ...]:
    """Each exchange with the layout it leads to: one, or two where a reduce-scatter of partials comes first.

    Taken is what is predicted faster. `seconds_of` predicts an exchange, the same on every rank; without it, what the
    busiest rank moves counts. Raises as `plan_exchange` does.
    """
    seconds_of = seconds_of or (lambda exchange: float(exchange.load()[0]))
    plans: list[tuple[tuple[State, Exchange], ...]] = [((target, plan_exchange(source, target, shape, mesh_shape)),)]
    for between in _reduced_to_shards(source, target) if source.partials else ():
        first = plan_exchange(source, between, shape, mesh_shape)
        plans.append(((between, first), (target, plan_exchange(between, target, shape, mesh_shape))))
    return min(plans, key=lambda plan: sum(seconds_of(exchange) for _, exchange in plan))


def _reduced_to_shards(source: State, target: State) -> list[State]:
    """Layouts without partials in between, of which every rank holds less than of the source.

    For each tensor dim: the source with its partial mesh dims as the last ones to shard it; the same with those that
    hold replicas; and the target with its own replicas cut.
    """
    pushed = tuple(mesh_dim for mesh_dim, _ in source.partials)
    cut = [(source.orders, pushed), (source.orders, pushed + _replicated(source)), (target.orders, _replicated(target))]
    found = []
    for orders, mesh_dims in cut:
        for tensor_dim in range(source.tensor_ndim):
            longer = [*orders]
            longer[tensor_dim] += mesh_dims
            found.append(State(source.mesh_ndim, tuple(longer)))
    return [state for state in dict.fromkeys(found) if state != target]


def _replicated(state: State) -> tuple[int, ...]:
    taken = {mesh_dim for order in state.orders for mesh_dim in order} | dict(state.partials).keys()
    return tuple(mesh_dim for mesh_dim in range(state.mesh_ndim) if mesh_dim not in taken)


@lru_cache(maxsize=1024)
def plan_exchange(source: State, target: State, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Exchange:
    """Who sends what: each rank receives its target minus its source, each element of each part once.

    The source boxes of a part tile the tensor, and each is held by the same number of ranks, its replicas. What a
    receiver lacks of a tile comes from one replica: the one with least to send so far, largest boxes first (Graham
    1969), then the one that shares most outer mesh coordinates with the receiver, then the first.

    Raises:
        NotHandled: the target has a partial, or the source several whose order would matter.
    """
    reduce_op, num_averaged = _reduction(source, target, mesh_shape)
    cells = list(product(*(range(size) for size in mesh_shape)))
    source_boxes = tuple(box_of(source, shape, mesh_shape, cell) for cell in cells)
    target_boxes = tuple(box_of(target, shape, mesh_shape, cell) for cell in cells)
    partial_cells = [tuple(cell[mesh_dim] for mesh_dim, _ in source.partials) for cell in cells]
    numbers = {partial_cell: number for number, partial_cell in enumerate(sorted(set(partial_cells)))}
    parts = tuple(numbers[partial_cell] for partial_cell in partial_cells)
    holders: dict[tuple[int, Box], list[int]] = defaultdict(list)
    for position, held in enumerate(zip(parts, source_boxes, strict=True)):
        if volume(held[1]):
            holders[held].append(position)
    transfers = []
    for (part, tile), replicas in holders.items():
        lacking = [
            (piece, receiver)
            for receiver, wanted in enumerate(target_boxes)
            if (parts[receiver], source_boxes[receiver]) != (part, tile) and volume(piece := overlap(tile, wanted))
        ]
        transfers += _assigned(lacking, replicas, cells)
    transfers.sort(key=lambda transfer: (transfer.receiver, transfer.box, transfer.sender))
    return Exchange(tuple(transfers), source_boxes, target_boxes, parts, reduce_op, num_averaged)


def _reduction(source: State, target: State, mesh_shape: tuple[int, ...]) -> tuple[str | None, int]:
    """(what puts the source's parts together, what a sum of them is to be divided by)."""
    ops = {op for _, op in source.partials}
    if target.partials:
        raise NotHandled("an exchange makes no parts: the target may not have Partial")
    if ops <= {"sum", "avg"}:
        averaged = math.prod(mesh_shape[mesh_dim] for mesh_dim, op in source.partials if op == "avg")
        return "sum" if ops else None, averaged
    if len(ops) > 1:
        raise NotHandled(f"an exchange reduces all parts at once, and {' and '.join(sorted(ops))} do not commute")
    return ops.pop(), 1


def _assigned(lacking: list[tuple[Box, int]], replicas: list[int], cells: list[tuple[int, ...]]) -> list[Transfer]:
    load = dict.fromkeys(replicas, 0)
    found = []
    for box, receiver in sorted(lacking, key=lambda piece: (-volume(piece[0]), piece[1])):
        sender = min(replicas, key=lambda rank: (load[rank], -_shared_outer(cells[rank], cells[receiver]), rank))
        load[sender] += volume(box)
        found.append(Transfer(sender, receiver, box))
    return found


def _shared_outer(cell: tuple[int, ...], other: tuple[int, ...]) -> int:
    shared = 0
    while shared < len(cell) and cell[shared] == other[shared]:
        shared += 1
    return shared
