"""One all-to-all over the whole mesh instead of a path: who sends which box of the tensor to whom.

Ranks along partial mesh dims hold parts of the same boxes. A receiver reduces all parts of what it wants itself, or one
exchange reduces and leaves each rank a share, and a second one moves the shares.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from distbench.planning.placement_states import Box, NotHandled, State, box_of

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Transfer:
    """A box of the full tensor on its way from one flat mesh position (row-major) to another."""

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True, eq=False)
class Exchange:
    """All transfers of a redistribution, the same on every rank; none where the target is local everywhere."""

    before: Numbers  # the box that each flat mesh position holds before, of shape (positions, tensor dims, 2)
    after: Numbers  # and after
    senders: Numbers  # of each transfer, whose box is what the sender holds and the receiver wants
    receivers: Numbers
    volumes: Numbers  # elements
    parts: tuple[int, ...]  # which part of a reduction each position holds
    reduce_op: str | None = None  # of several parts ("sum", "min", ...)
    num_averaged: int = 1  # what a sum of the parts is to be divided by

    @property
    def changes_nothing(self) -> bool:
        """Whether every rank already holds its target."""
        return self.reduce_op is None and bool((self.before == self.after).all())

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """By receiver, then by where the box lies in the tensor."""
        boxes = as_boxes(_overlaps(self.before[self.senders], self.after[self.receivers]))
        transfers = map(Transfer, self.senders.tolist(), self.receivers.tolist(), boxes)
        return tuple(sorted(transfers, key=lambda transfer: (transfer.receiver, transfer.box, transfer.sender)))

    @cached_property
    def received(self) -> list[int]:
        """Elements that each position receives."""
        return self._sums(self.receivers, self.volumes).tolist()

    @cached_property
    def sent(self) -> list[int]:
        """Elements that each position sends."""
        return self._sums(self.senders, self.volumes).tolist()

    @cached_property
    def copied(self) -> list[int]:
        """Elements that each position copies or adds: what does not lie in one piece, what it keeps, and every part."""
        boxes = _overlaps(self.before[self.senders], self.after[self.receivers])
        packed = np.flatnonzero(~_are_contiguous(boxes, self.before[self.senders]))
        # A box that goes to several receivers is packed once.
        packs = np.column_stack([self.senders[packed], boxes[packed].reshape(len(packed), 2 * boxes.shape[1])])
        packed = packed[np.unique(packs, axis=0, return_index=True)[1]]
        elements = self._sums(self.senders[packed], self.volumes[packed])
        if self.reduce_op:
            return (elements + max(self.parts) * _volumes(self.after)).tolist()
        unpacked = ~_are_contiguous(boxes, self.after[self.receivers])
        elements += self._sums(self.receivers[unpacked], self.volumes[unpacked])
        return (elements + _volumes(_overlaps(self.before, self.after))).tolist()

    def load(self) -> tuple[int, float, int]:
        """What its time depends on: (elements that the busiest position sends or receives, how often that many the
        busiest copies or adds, transfers that the busiest sends or receives)."""
        busiest = max(*self.sent, *self.received)
        if not busiest:
            return 0, 0.0, 0
        num_transfers = max(int(np.bincount(ends).max()) for ends in (self.senders, self.receivers))
        return busiest, max(self.copied) / busiest, num_transfers

    def _sums(self, positions: Numbers, volumes: Numbers) -> Numbers:
        sums = np.zeros(len(self.parts), dtype=np.int64)
        np.add.at(sums, positions, volumes)
        return sums


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
    for (start, stop), box_span in zip(reversed(part), reversed(box), strict=True):
        below.pop()
        if (start, stop) != box_span:
            return math.prod(below) == 1
    return True


def plan_direct(
    source: State,
    target: State,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    seconds_of: Callable[[Exchange], float] | None = None,
) -> tuple[tuple[State, Exchange], ...]:
    """Each exchange with the layout it leads to: one, or two where a reduce-scatter of partials first is faster.

    `seconds_of` predicts an exchange, the same on every rank; without it, what the busiest rank moves counts. Raises as
    `plan_exchange` does.
    """
    seconds_of = seconds_of or (lambda exchange: float(exchange.load()[0]))
    paths = [(target,), *((between, target) for between in _reduced_to_shards(source, target) if source.partials)]
    plans = [
        tuple((end, plan_exchange(start, end, shape, mesh_shape)) for start, end in pairwise((source, *path)))
        for path in paths
    ]
    return min(plans, key=lambda plan: sum(seconds_of(exchange) for _, exchange in plan))


def _reduced_to_shards(source: State, target: State) -> list[State]:
    """Layouts without partials in between, of which every rank holds less than of the source: for each tensor dim the
    source with its partial mesh dims as the last ones to shard it; the same with those that hold replicas; and the
    target with its own replicas cut."""
    pushed = tuple(mesh_dim for mesh_dim, _ in source.partials)
    cut = [
        (source.orders, pushed),
        (source.orders, pushed + source.replicated_dims()),
        (target.orders, target.replicated_dims()),
    ]
    layouts = []
    for orders, mesh_dims in cut:
        for tensor_dim in range(source.tensor_ndim):
            longer = [*orders]
            longer[tensor_dim] += mesh_dims
            layouts.append(State(source.mesh_ndim, tuple(longer)))
    return [state for state in dict.fromkeys(layouts) if state != target]


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
    before, after = _held(source, shape, mesh_shape), _held(target, shape, mesh_shape)
    # Positions by part and tile: one row of replicas, in ascending order, for each.
    partial_dims = tuple(mesh_dim for mesh_dim, _ in source.partials)
    copies = source.replicated_dims()
    tiled = tuple(mesh_dim for mesh_dim in range(len(mesh_shape)) if mesh_dim not in (*partial_dims, *copies))
    positions = np.arange(math.prod(mesh_shape)).reshape(mesh_shape)
    num_parts = math.prod(mesh_shape[mesh_dim] for mesh_dim in partial_dims)
    num_copies = math.prod(mesh_shape[mesh_dim] for mesh_dim in copies)
    rows = positions.transpose(partial_dims + tiled + copies).reshape(num_parts, -1, num_copies)
    parts = np.empty(len(before), dtype=np.int64)
    parts[rows] = np.arange(num_parts)[:, None, None]
    replicas = rows.reshape(-1, num_copies)
    lacking = _volumes(_overlaps(before[replicas[:, :1]], after[None]))
    # Who holds the tile lacks nothing of it.
    np.put_along_axis(lacking, replicas, 0, axis=1)
    senders, receivers, volumes = _assigned(lacking, replicas, mesh_shape)
    return Exchange(before, after, senders, receivers, volumes, tuple(parts.tolist()), reduce_op, num_averaged)


@lru_cache(maxsize=512)
def _held(state: State, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Numbers:
    """The box of each flat mesh position, of shape (positions, tensor dims, 2)."""
    boxes = [box_of(state, shape, mesh_shape, cell) for cell in product(*(range(size) for size in mesh_shape))]
    return np.array(boxes, dtype=np.int64).reshape(len(boxes), len(shape), 2)


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


def _assigned(lacking: Numbers, replicas: Numbers, mesh_shape: tuple[int, ...]) -> tuple[Numbers, Numbers, Numbers]:
    """(sender, receiver, elements) of each transfer; `lacking` are elements by row of replicas and receiver.

    Rows have no replica in common, so that all choose at once, each for its next receiver.
    """
    rows, largest_first = np.arange(len(replicas)), np.argsort(-lacking, axis=1, kind="stable")
    shared = _shared_outer(mesh_shape)
    load = np.zeros(replicas.shape, dtype=np.int64)
    chosen = []
    for receivers in largest_first.T[: int((lacking > 0).sum(axis=1).max(initial=0))]:
        volumes = lacking[rows, receivers]
        is_least = load == load.min(axis=1, keepdims=True)
        sender = np.where(is_least, shared[replicas, receivers[:, None]], -1).argmax(axis=1)
        load[rows, sender] += volumes
        chosen.append((replicas[rows, sender], receivers, volumes))
    if not chosen:
        return (np.zeros(0, dtype=np.int64),) * 3
    senders, wanting, volumes = (np.concatenate(column) for column in zip(*chosen, strict=True))
    moved = volumes > 0
    return senders[moved], wanting[moved], volumes[moved]


@lru_cache(maxsize=16)
def _shared_outer(mesh_shape: tuple[int, ...]) -> Numbers:
    """For each two flat mesh positions, how many of their outermost coordinates are the same."""
    cells = np.indices(mesh_shape).reshape(len(mesh_shape), -1)
    return np.cumprod(cells[:, :, None] == cells[:, None, :], axis=0).sum(axis=0)


def _overlaps(boxes: Numbers, other_boxes: Numbers) -> Numbers:
    """`overlap` of boxes as arrays."""
    starts = np.maximum(boxes[..., 0], other_boxes[..., 0])
    stops = np.minimum(boxes[..., 1], other_boxes[..., 1])
    return np.stack([starts, np.maximum(starts, stops)], axis=-1)


def _volumes(boxes: Numbers) -> Numbers:
    return (boxes[..., 1] - boxes[..., 0]).prod(axis=-1)


def _are_contiguous(parts: Numbers, boxes: Numbers) -> NDArray[np.bool_]:
    """`is_contiguous` of boxes as arrays."""
    lengths = parts[..., 1] - parts[..., 0]
    contiguous = np.ones(len(parts), dtype=bool)
    for dim in range(parts.shape[1]):  # the last tensor dim that is cut decides
        is_whole = (parts[:, dim] == boxes[:, dim]).all(axis=-1)
        contiguous = np.where(is_whole, contiguous, lengths[:, :dim].prod(axis=1) == 1)
    return contiguous


def as_boxes(boxes: Numbers) -> tuple[Box, ...]:
    """Boxes of shape (boxes, tensor dims, 2) as tuples."""
    return tuple(tuple(map(tuple, box)) for box in boxes.tolist())
