"""One all-to-all over the whole mesh instead of a path: which rank sends which box of the tensor to which rank.

Ranks along partial mesh dims hold parts of the same boxes. Either a receiver reduces all parts of its target, or a
first exchange reduces parts to shares and a second exchange moves the shares.
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
    """A box of the full tensor that moves from one flat mesh position (row-major) to another."""

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True, eq=False)
class Exchange:
    """All transfers of a redistribution, equal on all ranks; without transfers if every rank already has its target."""

    before: Numbers  # the box that each flat mesh position holds before, of shape (positions, tensor dims, 2)
    after: Numbers  # the box of each position after
    senders: Numbers  # of each transfer, whose box is the overlap of the sender's box and the receiver's target
    receivers: Numbers
    volumes: Numbers  # elements
    parts: tuple[int, ...]  # the part of a reduction that each position holds
    reduce_op: str | None = None  # of several parts ("sum", "min", ...)
    num_averaged: int = 1  # divisor of the sum of the parts

    @property
    def changes_nothing(self) -> bool:
        """Return whether every rank already holds its target."""
        return self.reduce_op is None and bool((self.before == self.after).all())

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers, in order of receiver, then of the box's place in the tensor."""
        boxes = as_boxes(_overlaps(self.before[self.senders], self.after[self.receivers]))
        transfers = map(Transfer, self.senders.tolist(), self.receivers.tolist(), boxes)
        return tuple(sorted(transfers, key=lambda transfer: (transfer.receiver, transfer.box, transfer.sender)))

    @cached_property
    def received(self) -> list[int]:
        """Number of elements that each position receives."""
        return self._sums(self.receivers, self.volumes).tolist()

    @cached_property
    def sent(self) -> list[int]:
        """Number of elements that each position sends."""
        return self._sums(self.senders, self.volumes).tolist()

    @cached_property
    def copied(self) -> list[int]:
        """Number of elements that each position copies or adds: non-contiguous boxes, boxes that remain, all parts."""
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
        """Quantities that determine the exchange's time.

        (most elements that a position sends or receives, most elements that a position copies or adds as a multiple of
        the first number, most transfers that a position sends or receives)
        """
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
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def overlap(box: Box, other: Box) -> Box:
    """Return the intersection of two boxes; its volume is 0 if they are disjoint."""
    starts = [max(a[0], b[0]) for a, b in zip(box, other, strict=True)]
    stops = [min(a[1], b[1]) for a, b in zip(box, other, strict=True)]
    return tuple((start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))


def is_contiguous(part: Box, box: Box) -> bool:
    """Return whether a part of a box is contiguous in a contiguous tensor of the box."""
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
    """Return one exchange with its resulting layout, or two if a reduce-scatter of partials first is faster.

    `seconds_of` must predict equal times on all ranks. Without `seconds_of`, exchanges are compared by the busiest
    rank's elements. Raises the errors of `plan_exchange`.
    """
    seconds_of = seconds_of or (lambda exchange: float(exchange.load()[0]))
    paths = [(target,), *((between, target) for between in _reduced_to_shards(source, target) if source.partials)]
    plans = [
        tuple((end, plan_exchange(start, end, shape, mesh_shape)) for start, end in pairwise((source, *path)))
        for path in paths
    ]
    return min(plans, key=lambda plan: sum(seconds_of(exchange) for _, exchange in plan))


def _reduced_to_shards(source: State, target: State) -> list[State]:
    """Return intermediate layouts without partials in which every rank holds less than in the source.

    Per tensor dim these are the source with its partial mesh dims as the last shards of the tensor dim, the same layout
    with replicating mesh dims as further shards, and the target with its replicas cut.
    """
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
    """Assign senders: each rank receives its target minus its source, each element of each part once.

    The source boxes of a part tile the tensor, and each box has the same number of replicas. A receiver gets the
    missing elements of a tile from the replica with the least to send so far, largest boxes first (Graham 1969). Of
    equal replicas, the replica is chosen that shares most outer mesh coordinates with the receiver, else the first.

    Raises:
        NotHandled: the target has a partial, or the source has several partials whose order matters.
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
    # A holder of a tile has no missing elements in that tile.
    np.put_along_axis(lacking, replicas, 0, axis=1)
    senders, receivers, volumes = _assigned(lacking, replicas, mesh_shape)
    return Exchange(before, after, senders, receivers, volumes, tuple(parts.tolist()), reduce_op, num_averaged)


@lru_cache(maxsize=512)
def _held(state: State, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Numbers:
    """Return the box of each flat mesh position, of shape (positions, tensor dims, 2)."""
    boxes = [box_of(state, shape, mesh_shape, cell) for cell in product(*(range(size) for size in mesh_shape))]
    return np.array(boxes, dtype=np.int64).reshape(len(boxes), len(shape), 2)


def _reduction(source: State, target: State, mesh_shape: tuple[int, ...]) -> tuple[str | None, int]:
    """Return (the source's reduce op, the divisor of a sum of its parts)."""
    ops = {op for _, op in source.partials}
    if target.partials:
        raise NotHandled("an exchange makes no parts, so the target must not have Partial")
    if ops <= {"sum", "avg"}:
        averaged = math.prod(mesh_shape[mesh_dim] for mesh_dim, op in source.partials if op == "avg")
        return "sum" if ops else None, averaged
    if len(ops) > 1:
        raise NotHandled(f"an exchange reduces all parts at once, but {' and '.join(sorted(ops))} do not commute")
    return ops.pop(), 1


def _assigned(lacking: Numbers, replicas: Numbers, mesh_shape: tuple[int, ...]) -> tuple[Numbers, Numbers, Numbers]:
    """Return (sender, receiver, elements) of each transfer; `lacking` has elements by row of replicas and receiver.

    Rows have no replica in common, so all rows choose at the same time, each for its next receiver.
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
    """Return how many outermost coordinates each two flat mesh positions share."""
    cells = np.indices(mesh_shape).reshape(len(mesh_shape), -1)
    is_shared = cells[:, :, None] == cells[:, None, :]
    return np.cumprod(is_shared.astype(np.int64), axis=0).sum(axis=0)


def _overlaps(boxes: Numbers, other_boxes: Numbers) -> Numbers:
    """Return `overlap` of boxes as arrays."""
    starts = np.maximum(boxes[..., 0], other_boxes[..., 0])
    stops = np.minimum(boxes[..., 1], other_boxes[..., 1])
    return np.stack([starts, np.maximum(starts, stops)], axis=-1)


def _volumes(boxes: Numbers) -> Numbers:
    return (boxes[..., 1] - boxes[..., 0]).prod(axis=-1)


def _are_contiguous(parts: Numbers, boxes: Numbers) -> NDArray[np.bool_]:
    """Return `is_contiguous` of boxes as arrays."""
    lengths = parts[..., 1] - parts[..., 0]
    contiguous = np.ones(len(parts), dtype=bool)
    for dim in range(parts.shape[1]):  # the last tensor dim that is cut decides
        is_whole = (parts[:, dim] == boxes[:, dim]).all(axis=-1)
        contiguous = np.where(is_whole, contiguous, lengths[:, :dim].prod(axis=1) == 1)
    return contiguous


def as_boxes(boxes: Numbers) -> tuple[Box, ...]:
    """Convert boxes of shape (boxes, tensor dims, 2) to tuples."""
    return tuple(tuple(map(tuple, box)) for box in boxes.tolist())
